"""Tests that random requests all end, without leaks, in a KV cache that is too small for them."""

from __future__ import annotations

import asyncio
import os
import random
import resource

import pytest
from latimer.backends.base import Finish, Generation, Grammar, Prompt, Sampling, Stops, Text
from latimer.backends.errors import LatimerError
from latimer.backends.llama_cpp import LlamaCpp

pytestmark = pytest.mark.slow

CELLS = 512
# The number of requests; for a longer run, set LATIMER_SOAK=2000.
REQUESTS = int(os.environ.get("LATIMER_SOAK", "100"))
# Mostly no grammar; the others are valid, invalid, and one without an allowed token.
GRAMMARS = [
    *[None] * 12,
    Grammar("regex", "[a-z ]{3,30}", "regex"),
    Grammar("lark", 'start: "a" | "b" start', "lark"),
    Grammar("gbnf", 'root ::= ("yes" | [^a] root)', "grammar"),
    Grammar("json_schema", '{"type": "object", "maxProperties": 3}', "json_schema"),
    Grammar("gbnf", 'root ::= "ab" "\\x00"', "grammar"),
    Grammar("gbnf", "root ::= (", "grammar"),
    Grammar("regex", "(", "regex"),
]


def job(rng: random.Random) -> Generation:
    """Return a random job: long or short, with stop sequences, choices or scores, or invalid."""
    kind = rng.random()
    words = rng.choice(["one two three ", "the cat sat ", "1, 2, 3, ", "é 漢 🔥 "])
    size = rng.randrange(1, 60)
    if kind < 0.05:
        size = 2000
    prompt = Text(words * size) if rng.random() < 0.8 else tuple(rng.choices(range(1024), k=size))
    if kind > 0.97:
        prompt = (10_000,)
    return Generation(
        Prompt(prompt, logprobs=rng.choice([None, None, None, 2])),
        rng.choice([None, 0, 1, 8, 40]),
        tuple(rng.choice([None, 3]) for _ in range(rng.choice([1, 1, 1, 2, 5, 12]))),
        Stops(tuple(rng.sample(["a", "e", " t", "\n", "3,"], rng.randrange(3)))),
        Sampling(
            rng.choice([0.0, 1.0]),
            presence_penalty=rng.choice([0.0, 1.0]),
            extras=rng.choice([{}, {}, {"dry_multiplier": 0.8}, {"ignore_eos": True}]),
        ),
        logprobs=rng.choice([None, None, 0, 3]),
        grammar=rng.choice(GRAMMARS),
    )


async def run(backend: LlamaCpp, work: Generation, rng: random.Random) -> str:
    """Run a job, and return its end: complete, left early or rejected."""
    leaves = rng.random() < 0.2
    ended = 0
    try:
        async with backend.open(work) as batches:
            async for batch in batches:
                ended += sum(isinstance(event, Finish) for event in batch)
                if leaves and rng.random() < 0.3:
                    return "left"
    except LatimerError:
        return "refused"
    assert ended == len(work.seeds)
    return "whole"


@pytest.mark.timeout(600)
async def test_everything_ends_and_nothing_leaks() -> None:
    """Each of 24 concurrent random requests ends, memory stays flat and no cell is lost."""
    rng = random.Random(5)
    backend = LlamaCpp(context=CELLS, parallel=8, max_waiting=100_000, cache_memory=4 << 20)
    turns = asyncio.Semaphore(24)
    sizes: list[int] = []

    async def one() -> str:
        async with turns:
            found = await asyncio.wait_for(run(backend, job(rng), rng), 120)
        sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return found

    found = await asyncio.gather(*(one() for _ in range(REQUESTS)))
    assert {"whole", "left", "refused"} == set(found)
    assert sizes[-1] - sizes[len(sizes) // 2] < 30 * 1024
    # A prompt of the whole KV cache succeeds only when every cell is free again.
    last = Generation(Prompt(tuple([5] * (CELLS - 1))), 1, sampling=Sampling(0.0))
    assert await asyncio.wait_for(run(backend, last, random.Random(1)), 60) in ("whole", "left")
    await backend.aclose()
