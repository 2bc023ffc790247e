"""Tests of the backend over a real llama-server."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
from latimer.backends.base import Generation, Grammar, Prompt, Sampling, Stops, Text
from latimer.backends.errors import (
    EngineError,
    EngineUnavailable,
    UnknownToken,
    Unsupported,
)
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from support.engines.recorded import RecordedServer
from support.jobs import run
from support.recordings import DEMO_CHATML, body
from support.servers import llama_server

GREEDY = Sampling(temperature=0.0)
COUNT = Text(DEMO_CHATML.format("Count to 12."))


@pytest.fixture(scope="module")
async def backend(llama_server_url: str) -> AsyncIterator[LlamaServer]:
    """A backend over the real server."""
    made = LlamaServer(llama_server_url)
    yield made
    await made.aclose()


def slots(url: str) -> list[dict[str, Any]]:
    """Return the server's slots."""
    with urllib.request.urlopen(f"{url}/slots") as reply:  # noqa: S310
        loaded: list[dict[str, Any]] = json.load(reply)
        return loaded


async def test_a_bias_of_an_unknown_id_is_an_error(backend: LlamaServer) -> None:
    """A bias of an id that the vocabulary lacks, which the server ignores, names the id."""
    size = len(await backend.token_bytes())
    for token in (size - 1, size):
        job = Generation(Prompt(COUNT), 2, sampling=Sampling(logit_bias=((token, 1.0),)))
        if token < size:
            await run(backend, job)
            continue
        with pytest.raises(UnknownToken) as caught:
            await run(backend, job)
        assert (caught.value.param, caught.value.token) == ("logit_bias", size)


async def test_an_unknown_id_of_a_prompt_is_named(backend: LlamaServer) -> None:
    """An id of a prompt that the vocabulary lacks is named with the size of the vocabulary."""
    size = len(await backend.token_bytes())
    await run(backend, Generation(Prompt((5, size - 1)), 1, sampling=GREEDY))
    for token in (size, 2**31 - 1):
        with pytest.raises(UnknownToken) as caught:
            await run(backend, Generation(Prompt((5, token)), 1, sampling=GREEDY))
        assert (caught.value.param, caught.value.token) == ("prompt", token)
        assert caught.value.size == size


async def test_held_characters_of_several_tokens_are_not_lost(backend: LlamaServer) -> None:
    """Text that the server holds back for a stop sequence is restored at the length limit."""
    grammar = Grammar("gbnf", 'root ::= "Zoë 漢"', "grammar")
    prompt = Text(DEMO_CHATML.format("Say"))
    for stops in (("ë !",), ("ë ?", "no", "xë !")):
        job = Generation(Prompt(prompt), 4, stops=Stops(stops), sampling=GREEDY, grammar=grammar)
        texts, finishes = await run(backend, job)
        assert texts[0].decode() == "Zoë "
        assert (finishes[0].reason, finishes[0].completion_tokens) == ("length", 4)


@pytest.mark.timed
async def test_leaving_ends_the_work_in_the_server(
    backend: LlamaServer, llama_server_url: str
) -> None:
    """The server frees its slot within 1.5 seconds after the client closes the stream."""
    bans = Sampling(temperature=0.0, extras={"ignore_eos": True})
    async with backend.open(Generation(Prompt(COUNT), 2000, sampling=bans)) as batches:
        await anext(aiter(batches))
        assert any(slot["is_processing"] for slot in slots(llama_server_url))
    start = time.monotonic()
    while any(slot["is_processing"] for slot in await asyncio.to_thread(slots, llama_server_url)):
        assert time.monotonic() - start < 1.5
        await asyncio.sleep(0.02)


async def test_more_requests_than_a_connection_lives(backend: LlamaServer) -> None:
    """Requests succeed although the server closes a connection after 100 responses."""
    for _ in range(120):
        await run(backend, Generation(Prompt((1, 2)), 1, sampling=GREEDY))


async def test_health_is_the_servers(backend: LlamaServer) -> None:
    """A running server is healthy, and a missing one is unavailable."""
    await backend.health()
    with pytest.raises(EngineUnavailable):
        await LlamaServer("http://127.0.0.1:1").health()


async def test_a_reverse_prompt_of_the_server_is_passed_on_as_told() -> None:
    """The finish names a stop sequence that the server has but the request does not."""
    stream = body("llama_server", "stop-word-stream")
    backend = RecordedServer({"/completion": stream}).backend
    _, finishes = await run(backend, Generation(Prompt(COUNT), 40))
    assert (finishes[0].reason, finishes[0].stop) == ("stop", "5, 6")


async def test_a_stream_that_just_ends_is_an_error() -> None:
    """A stream without a final event raises an error."""
    stream = body("llama_server", "greedy-stream").rpartition(b"data:")[0]
    backend = RecordedServer({"/completion": stream}).backend
    with pytest.raises(EngineError, match="before it was finished"):
        await run(backend, Generation(Prompt(COUNT), 40))


async def test_an_error_in_mid_stream_surfaces() -> None:
    """An error event in the middle of a stream raises an error with its message."""
    first = body("llama_server", "greedy-stream").partition(b"\n\n")[0] + b"\n\n"
    event = b'data: {"error":{"code":500,"message":"out of luck","type":"server_error"}}\n\n'
    backend = RecordedServer({"/completion": first + b":\n\n" + event}).backend
    with pytest.raises(EngineError, match="out of luck"):
        await run(backend, Generation(Prompt(COUNT), 40))


COUNTED = Text(DEMO_CHATML.format("Count to 12.") + "1, 2, 3, 4,")


@pytest.mark.parametrize("slots", ["--slots", "--no-slots"])
async def test_a_speculative_server_tells_no_log_probabilities(slots: str) -> None:
    """The backend rejects log-probabilities with a draft model, for prompts and completions, and
    serves text."""
    draft = ("-md", str(DEMO_MODEL), "--spec-type", "draft-simple")
    with llama_server(DEMO_MODEL, *draft, slots, slots=1) as address:
        backend = LlamaServer(address)
        for job in (
            Generation(Prompt(COUNTED), 12, logprobs=1),
            Generation(Prompt(COUNTED, logprobs=1), 0),
        ):
            with pytest.raises(Unsupported, match="draft model"):
                await run(backend, job)
        assert (await run(backend, Generation(Prompt(COUNTED), 4)))[0][0]
        await backend.aclose()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_server_that_shows_control_tokens_is_refused(streamed: bool) -> None:
    """An answer that ends with the spelling of the end token is an error that names `--special`,
    and so is all that must tell control tokens from text."""
    prompt = Prompt(Text(DEMO_CHATML.format("What is the capital of France?")))
    with llama_server(DEMO_MODEL, "--special", slots=1) as address:
        backend = LlamaServer(address)
        job = Generation(prompt, 20, sampling=GREEDY, streamed=streamed)
        for ask in (run(backend, job), backend.special_tokens(), backend.token_bytes()):
            with pytest.raises(EngineError, match=r"--special.* without that option"):
                await ask
        await backend.aclose()
