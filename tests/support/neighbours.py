"""Requests alone and among fifteen others: how far what they are told is apart."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from latimer.backends.base import Backend, Generation, Piece, Prompt, Sampling, Text, Token

from support.recordings import prompts

AT_ONCE = 16


class Apart(NamedTuple):
    """What differs between two runs of the same requests.

    Args:
        texts: how many have another text.
        worst: the largest difference of a log-probability, up to where texts part.
    """

    requests: int
    texts: int
    worst: float


def requests(count: int) -> list[Generation]:
    """Greedy ones and seeded ones, with log-probabilities, of different lengths."""
    known = itertools.islice(itertools.cycle(prompts()), count)
    return [
        Generation(
            Prompt(Text(prompt["prompt"])),
            20 + number % 30,
            (number,),
            sampling=Sampling(0.0 if number % 2 else 1.0, logit_bias=((0, -100.0), (2, -100.0))),
            logprobs=2,
        )
        for number, prompt in enumerate(known)
    ]


async def tokens_of(backend: Backend, job: Generation) -> Sequence[Token]:
    """What a request is told."""
    tokens: list[Token] = []
    async with backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    tokens += event.tokens
    return tokens


async def apart(backend: Backend, count: int) -> Apart:
    """Run requests one by one, then sixteen at a time, and compare."""
    jobs = requests(count)
    alone = [await tokens_of(backend, job) for job in jobs]
    beside: list[Sequence[Token]] = []
    for start in range(0, count, AT_ONCE):
        part = jobs[start : start + AT_ONCE]
        beside += await asyncio.gather(*(tokens_of(backend, job) for job in part))
    texts, worst = 0, 0.0
    for one, other in zip(alone, beside, strict=True):
        same = [a.id == b.id for a, b in zip(one, other, strict=False)]
        texts += not all(same)
        # What comes behind another token has another beginning.
        until = same.index(False) + 1 if False in same else len(same)
        for a, b in zip(one[:until], other[:until], strict=True):
            values = {entry.id: entry.logprob for entry in b.top}
            worst = max([worst, *(abs(e.logprob - values[e.id]) for e in a.top if e.id in values)])
    return Apart(count, texts, worst)
