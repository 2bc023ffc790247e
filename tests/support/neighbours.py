"""Comparison of requests that run alone with the same requests run sixteen at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from latimer.backends.base import Backend, Generation, Piece, Prompt, Sampling, Text, Token

from support.recordings import prompts

AT_ONCE = 16


class Apart(NamedTuple):
    """The differences between two runs of the same requests.

    Args:
        texts: the number of requests whose texts differ.
        worst: the largest difference of a log-probability before the texts diverge.
    """

    requests: int
    texts: int
    worst: float


def requests(count: int) -> list[Generation]:
    """Return greedy and seeded generations of different lengths, with log-probabilities."""
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
    """Return the tokens that a generation yields."""
    tokens: list[Token] = []
    async with backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    tokens += event.tokens
    return tokens


async def apart(backend: Backend, count: int) -> Apart:
    """Run requests one by one, then sixteen at a time, and compare the results."""
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
        # Tokens after the first different one have a different prefix.
        until = same.index(False) + 1 if False in same else len(same)
        for a, b in zip(one[:until], other[:until], strict=True):
            values = {entry.id: entry.logprob for entry in b.top}
            worst = max([worst, *(abs(e.logprob - values[e.id]) for e in a.top if e.id in values)])
    return Apart(count, texts, worst)
