"""Tests that clients which leave at any moment leave no memory of llama.cpp behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import llama_cpp
import pytest
from latimer.backends import offload
from latimer.backends.base import Finish, Generation, Grammar, Prompt, Text
from latimer.backends.llama_cpp import LlamaCpp, chain
from latimer.backends.queue import Ticket
from support.leaving import leave_at

GRAMMAR = Grammar("gbnf", 'root ::= "left"', "grammar")
DRY = chain.Dry(1.0, 1.5, 3, 17, (b"\n",))


@pytest.fixture
async def engine() -> AsyncIterator[Any]:
    """The engine of a backend with the demo model."""
    backend = LlamaCpp(context=256)
    yield await backend._engine()
    await backend.aclose()


async def test_a_grammar_is_freed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose client leaves when llama.cpp has just read it is freed."""
    freed: list[object] = []
    free = llama_cpp.llama_sampler_free

    def noted(pointer: object) -> None:
        freed.append(pointer)
        free(pointer)

    monkeypatch.setattr(llama_cpp, "llama_sampler_free", noted)
    work = engine.generator.grammars.compile(GRAMMAR)
    pointer = await leave_at(monkeypatch, llama_cpp, "llama_sampler_init_grammar", work)
    async with asyncio.timeout(5):
        while not any(one is pointer for one in freed):
            # With Python 3.14, a wait that was cancelled is a reference cycle of asyncio.
            gc.collect()
            await asyncio.sleep(0.01)


async def test_a_sampler_is_kept(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DRY sampler whose client leaves when it was just made is kept for the next one."""
    work = offload.run(offload.UNKNOWN, chain.prepare, engine.vocabulary, DRY)
    pointer = await leave_at(monkeypatch, llama_cpp, "llama_sampler_init_dry", work)
    async with asyncio.timeout(5):
        while chain._made.get((engine.vocabulary, DRY)) is not pointer:
            await asyncio.sleep(0.01)


class Left(Exception):
    """A client has disconnected."""


async def test_tokens_that_end_a_choice_do_not_count() -> None:
    """The tokens of a client that leaves are counted as in the usage, without the end tokens."""
    backend, ticket = LlamaCpp(context=256), Ticket()
    job = Generation(Prompt(Text("a")), 64, seeds=(1, 2), grammar=GRAMMAR, ticket=ticket)
    ends: list[Finish] = []
    with pytest.raises(Left):
        async with backend.open(job) as batches:
            async for batch in batches:
                ends += [event for event in batch if isinstance(event, Finish)]
                if len(ends) == len(job.seeds):
                    raise Left
    await backend.aclose()
    assert [end.reason for end in ends] == ["end", "end"]
    assert ticket.generated == sum(end.completion_tokens for end in ends) > 0
