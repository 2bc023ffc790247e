"""Tests of the backend over a real llama-server."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import orjson
import pytest
from latimer.backends.base import Generation, Grammar, Prompt, Sampling, Stops, Text
from latimer.backends.errors import (
    ContextExceeded,
    EngineError,
    EngineUnavailable,
    RequestError,
    UnknownToken,
    Unsupported,
)
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
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


async def test_facts_of_the_model(backend: LlamaServer) -> None:
    """The backend reads the model's name, context length, chat template and end token from the
    server."""
    model = await backend.model()
    assert (model.name, model.context, model.adds_bos) == ("demo.gguf", 2048, False)
    assert "<|im_start|>" in (model.template or "")
    assert model.eos_token == "<|im_end|>"


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


async def test_a_long_answer_is_whole(backend: LlamaServer) -> None:
    """A completion contains all of its text, and its token count excludes the end token."""
    texts, finishes = await run(backend, Generation(Prompt(COUNT), 64, sampling=GREEDY))
    assert texts == [b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12."]
    assert (finishes[0].reason, finishes[0].completion_tokens) == ("end", 24)


async def test_no_tokens_need_no_call(backend: LlamaServer) -> None:
    """`max_tokens: 0` generates nothing, although the server itself would generate one token."""
    texts, finishes = await run(backend, Generation(Prompt(COUNT), 0, sampling=GREEDY))
    assert texts == [b""]
    assert (finishes[0].reason, finishes[0].completion_tokens) == ("length", 0)
    assert finishes[0].prompt_tokens == 12


async def test_choices_are_calls_of_one_job(backend: LlamaServer) -> None:
    """Nine choices on four slots are complete, and each repeats with its seed."""
    job = Generation(Prompt(Text("One day,")), 12, tuple(range(7, 16)))
    first, finishes = await run(backend, job)
    assert len(set(first)) > 1
    assert all(finish.prompt_tokens == 3 for finish in finishes)
    assert (await run(backend, job))[0] == first
    alone, _ = await run(backend, Generation(Prompt(Text("One day,")), 12, (9,)))
    assert alone == [first[2]]


async def test_what_does_not_fit_is_refused(backend: LlamaServer) -> None:
    """A prompt or a completion beyond the context length raises an error with the numbers."""
    with pytest.raises(ContextExceeded) as caught:
        await run(backend, Generation(Prompt(Text("word " * 3000)), 5))
    assert caught.value.context == 2048
    assert caught.value.prompt_tokens > 2048
    with pytest.raises(ContextExceeded):
        await run(backend, Generation(Prompt(COUNT), 2040))
    texts, _ = await run(backend, Generation(Prompt(COUNT), 2036, sampling=GREEDY))
    assert texts[0].endswith(b"12.")


async def test_without_a_limit_the_context_is_the_limit(backend: LlamaServer) -> None:
    """A completion without a limit ends at the context length, as it does in process."""
    endless = Sampling(temperature=0.0, extras={"ignore_eos": True})
    _, finishes = await run(backend, Generation(Prompt(COUNT), None, sampling=endless))
    assert (finishes[0].reason, finishes[0].completion_tokens) == ("length", 2048 - 12)


async def test_bad_ids_are_refused(backend: LlamaServer) -> None:
    """A token id beyond the vocabulary is an error of the request."""
    with pytest.raises(RequestError) as caught:
        await run(backend, Generation(Prompt((1, 99999)), 5))
    assert caught.value.param == "prompt"


async def test_ids_are_used_verbatim(backend: LlamaServer) -> None:
    """A prompt of token ids gives the completion of its text, and is counted exactly."""
    ids = await backend.tokenize(COUNT.text, add_special=True, parse_special=True)
    texts, finishes = await run(backend, Generation(Prompt(ids), 20, sampling=GREEDY))
    assert texts == (await run(backend, Generation(Prompt(COUNT), 20, sampling=GREEDY)))[0]
    assert finishes[0].prompt_tokens == len(ids) == 12


async def test_control_tokens_can_be_text(backend: LlamaServer) -> None:
    """Without `parse_special`, a control token's spelling is ordinary text."""
    plain = Text("<|im_end|>", parse_special=False)
    _, finishes = await run(backend, Generation(Prompt(plain), 1))
    assert finishes[0].prompt_tokens > 1


async def test_control_tokens_can_be_stops(backend: LlamaServer) -> None:
    """A stop sequence that spells a control token ends the completion at that token."""
    stops = ("<|im_end|>",)
    texts, finishes = await run(
        backend, Generation(Prompt(COUNT), 64, stops=Stops(stops), sampling=GREEDY)
    )
    assert texts[0].startswith(b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12.")
    assert finishes[0].completion_tokens == 24


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


async def test_the_native_reply_is_untouched(backend: LlamaServer) -> None:
    """A native reply is the server's own JSON, with keys of its own."""
    async with backend.native(Generation(Prompt(COUNT), 5, sampling=GREEDY), False) as reply:
        value = orjson.loads(b"".join([chunk async for chunk in reply.body]))
    assert reply.status == 200
    assert value["content"] == "1, 2, 3"
    assert value["generation_settings"]["n_predict"] == 5


async def test_health_is_the_servers(backend: LlamaServer) -> None:
    """A running server is healthy, and a missing one is unavailable."""
    await backend.health()
    with pytest.raises(EngineUnavailable):
        await LlamaServer("http://127.0.0.1:1").health()


def fake(handler: Callable[[httpx2.Request], httpx2.Response]) -> LlamaServer:
    """Return a backend over a server with behaviour that a real one does not show on demand."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/props":
            return httpx2.Response(200, content=body("llama_server", "props"))
        if request.url.path == "/tokenize":
            return httpx2.Response(200, json={"tokens": []})
        return handler(request)

    client = httpx2.MockTransport(answer)
    return LlamaServer("http://fake", client=client)


async def test_a_reverse_prompt_of_the_server_is_passed_on_as_told() -> None:
    """The finish names a stop sequence that the server has but the request does not."""
    stream = body("llama_server", "stop-word-stream")
    backend = fake(lambda request: httpx2.Response(200, content=stream))
    _, finishes = await run(backend, Generation(Prompt(COUNT), 40))
    assert (finishes[0].reason, finishes[0].stop) == ("stop", "5, 6")


async def test_a_stream_that_just_ends_is_an_error() -> None:
    """A stream without a final event raises an error."""
    stream = body("llama_server", "greedy-stream").rpartition(b"data:")[0]
    backend = fake(lambda request: httpx2.Response(200, content=stream))
    with pytest.raises(EngineError, match="before it was finished"):
        await run(backend, Generation(Prompt(COUNT), 40))


async def test_an_error_in_mid_stream_surfaces() -> None:
    """An error event in the middle of a stream raises an error with its message."""
    first = body("llama_server", "greedy-stream").partition(b"\n\n")[0] + b"\n\n"
    event = b'data: {"error":{"code":500,"message":"out of luck","type":"server_error"}}\n\n'
    backend = fake(lambda request: httpx2.Response(200, content=first + b":\n\n" + event))
    with pytest.raises(EngineError, match="out of luck"):
        await run(backend, Generation(Prompt(COUNT), 40))


async def test_a_server_that_is_no_llama_server_is_named() -> None:
    """If the server at the address is not llama-server, the error says so."""
    client = httpx2.MockTransport(lambda _: httpx2.Response(200, json={}))
    with pytest.raises(EngineError, match="is not llama-server"):
        await LlamaServer("http://fake", client=client).model()


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
