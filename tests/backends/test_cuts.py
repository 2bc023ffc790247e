"""Tests that engines end a choice that the reader of its events has cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from latimer.backends.base import Backend, Finish, Generation, Piece, Prompt, Sampling, Stops, Text
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer

LIMIT = 1_500
ENDLESS = Sampling(temperature=0.0, extras={"ignore_eos": True})


async def cut(backend: Backend, choices: int, logprobs: int | None = None) -> list[Finish]:
    """Cut every choice at its second piece; return their ends."""
    stops = Stops(("x",), by_reader=True)
    job = Generation(Prompt(Text("One day,")), LIMIT, (None,) * choices, stops, ENDLESS, logprobs)
    pieces = [0] * choices
    finishes: dict[int, Finish] = {}
    async with asyncio.timeout(60), backend.open(job) as batches:
        async for batch in batches:
            for event in batch:
                if isinstance(event, Piece):
                    pieces[event.choice] += 1
                    if pieces[event.choice] >= 2:
                        stops.ends[event.choice] = 3
                elif isinstance(event, Finish):
                    assert event.choice not in finishes
                    finishes[event.choice] = event
    await backend.aclose()
    return [finishes[index] for index in range(choices)]


def check(finishes: list[Finish]) -> None:
    """Check that choices have ended long before their limit."""
    for finish in finishes:
        assert (finish.reason, finish.stop, finish.prompt_tokens) == ("stop", None, 3)
        assert finish.completion_tokens < 100


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_llama_server(llama_server_url: str, choices: int, logprobs: int | None) -> None:
    """llama-server is interrupted, also by several choices."""
    check(await cut(LlamaServer(llama_server_url), choices, logprobs))


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_in_process(demo_f32: Path, choices: int, logprobs: int | None) -> None:
    """The engine in this process ends its sequences."""
    check(await cut(LlamaCpp(demo_f32, context=8192, threads=1), choices, logprobs))
