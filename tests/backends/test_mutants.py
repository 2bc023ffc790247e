"""Tests that a request ends with a response or a `LatimerError` for any bytes of the engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Container

import pytest
from httpcore2 import AsyncConnectionInterface
from latimer.backends.base import Backend, Generation, Prompt, Sampling, Stops, Text
from latimer.backends.errors import LatimerError
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.koboldcpp import run as koboldcpp_run
from latimer.backends.llama_server import LlamaServer
from latimer.backends.streams import map_concurrently
from support.mutants import Record, Recorder, Replayed, mutants
from support.recordings import DEMO_CHATML
from support.samples import sample

PROMPT = Text(DEMO_CHATML.format("What is the capital of France?"))
GREEDY = Sampling(temperature=0.0)
LLAMA_SERVER = {
    "plain": Generation(Prompt(PROMPT), 5, sampling=GREEDY),
    "stops": Generation(Prompt(PROMPT), 16, sampling=GREEDY, stops=Stops(("Paris", "is Par"))),
    "logprobs": Generation(Prompt(PROMPT), 5, sampling=GREEDY, logprobs=2),
    "echo": Generation(Prompt(Text("One day"), logprobs=1), 0, sampling=GREEDY, logprobs=1),
    "visible": Generation(Prompt(PROMPT), 5, sampling=GREEDY, preserved_tokens=("<|im_end|>",)),
    "unscored": Generation(Prompt(PROMPT), 0),
}
METHODS = {"GET", "POST"}
KOBOLDCPP = {
    "plain": Generation(Prompt(Text(DEMO_CHATML.format("Hello!"))), 3, sampling=GREEDY),
}


async def outcome(backend: Backend, job: Generation) -> str:
    """Return how a job ends, and raise every error that is not a `LatimerError`."""
    try:
        async with asyncio.timeout(5):
            async with backend.open(job) as batches:
                async for _batch in batches:
                    pass
    except LatimerError as error:
        return f"{type(error).__name__}: {error.message}"
    finally:
        await backend.aclose()
    return "answered"


async def check(
    make: Callable[[AsyncConnectionInterface], Backend],
    address: str,
    job: Generation,
    at_once: int = 1,
    methods: Container[str] = METHODS,
) -> None:
    """Record the engine's responses to a job, then run the job with mutated responses.

    Args:
        at_once: the number of jobs that run at the same time.
        methods: those of the requests whose responses are mutated.
    """
    recorder = Recorder(address)
    assert await outcome(make(recorder), job) == "answered"
    await recorder.aclose()
    broken: list[str] = []

    async def run(what: str, record: Record) -> None:
        try:
            await outcome(make(Replayed(record)), job)
        except Exception as error:
            broken.append(f"{what}\n  {error!r}")

    chosen = mutants(recorder.record, random.Random(random.random()), sample(10, 25), methods)
    await map_concurrently((run(*mutant) for mutant in chosen), at_once)
    assert not broken, "\n".join(broken[:10])


@pytest.mark.parametrize("name", LLAMA_SERVER)
async def test_llama_server_may_answer_anything(llama_server_url: str, name: str) -> None:
    """A job ends cleanly with every mutation of llama-server's responses."""

    def make(client: AsyncConnectionInterface) -> Backend:
        return LlamaServer("http://engine", client=client)

    # The facts of a model are the same for every job, and this one reads all of them.
    methods = METHODS if name == "stops" else {"POST"}
    await check(make, llama_server_url, LLAMA_SERVER[name], methods=methods)


@pytest.mark.parametrize("name", KOBOLDCPP)
async def test_koboldcpp_may_answer_anything(
    koboldcpp_replay: tuple[str, object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job ends cleanly with every mutation of koboldcpp's responses."""
    monkeypatch.setattr(koboldcpp_run, "CHECK_SECONDS", 0.001)

    def make(client: AsyncConnectionInterface) -> Backend:
        backend = KoboldCpp("http://engine", silence=0.05, client=client)
        backend.server.patience = 0.05
        return backend

    # Most of the time is waits between aborts.
    await check(make, koboldcpp_replay[0], KOBOLDCPP[name], at_once=32)
