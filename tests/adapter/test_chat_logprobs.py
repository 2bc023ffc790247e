"""Tests of chat's `logprobs` and `top_logprobs` on every engine (contract, section 3.4)."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Batch, Capabilities, Finish, Generation, Piece, Token
from openai.types.chat import ChatCompletion
from support.engines.echo import Echo
from support.replies import chunks_in

FIRE = [{"role": "user", "content": "Show me an emoji of fire."}]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


async def chat(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Return the first choice of a chat completion."""
    body = {"model": "m", "seed": 3, "messages": CAPITAL, "logprobs": True, **body}
    reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


async def test_entries_are_the_message(client: httpx2.AsyncClient) -> None:
    """The entries' bytes together are the content, and the end token has no entry."""
    choice = await chat(client)
    entries = choice["logprobs"]["content"]
    assert len(entries) == 7
    data = bytes(byte for entry in entries for byte in entry["bytes"])
    assert data.decode() == choice["message"]["content"] == "The capital of France is Paris."
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["top_logprobs"] == []
        assert entry["logprob"] <= 0
    assert choice["logprobs"]["refusal"] is None


@pytest.mark.parametrize("top", [0, 1, 5, 10])
async def test_alternatives(client: httpx2.AsyncClient, top: int) -> None:
    """Each entry has at most the requested number of alternatives, most likely first."""
    choice = await chat(client, top_logprobs=top)
    for entry in choice["logprobs"]["content"]:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert len(values) <= top
        assert values == sorted(values, reverse=True)
        if top:
            assert values[0] == entry["logprob"]


async def test_twenty_alternatives(apps: Any, client_of: Any) -> None:
    """Twenty alternatives are the maximum; koboldcpp, which returns ten, rejects them."""
    for engine in ("llama_cpp", "llama_server"):
        async with client_of(apps(engine)) as client:
            entries = (await chat(client, top_logprobs=20))["logprobs"]["content"]
            assert all(len(entry["top_logprobs"]) == 20 for entry in entries)
            control = [
                other for entry in entries for other in entry["top_logprobs"]
                if other["token"].startswith("<|")
            ]  # fmt: skip
            assert control
            assert all(other["bytes"] is None for other in control)
    async with client_of(apps("koboldcpp")) as client:
        body = {"model": "m", "messages": CAPITAL, "logprobs": True, "top_logprobs": 20}
        reply = await client.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "top_logprobs")


async def test_none_are_told_that_nobody_asked_for(client: httpx2.AsyncClient) -> None:
    """`logprobs: false` gives null."""
    assert (await chat(client, logprobs=False))["logprobs"] is None


async def test_streams_tell_the_same(client: httpx2.AsyncClient) -> None:
    """The first chunk has an empty list, the last one null, and the others add up to the whole."""
    whole = await chat(client, messages=FIRE, top_logprobs=2)
    body = {"model": "m", "seed": 3, "messages": FIRE, "logprobs": True, "top_logprobs": 2}
    reply = await client.post("/v1/chat/completions", json={**body, "stream": True})
    choices = [chunk["choices"][0] for chunk in chunks_in(reply)]
    assert choices[0]["logprobs"] == {"content": [], "refusal": None}
    assert choices[-1]["logprobs"] is None
    entries = [entry for c in choices[1:-1] for entry in c["logprobs"]["content"]]
    assert [entry["token"] for entry in entries] == [
        entry["token"] for entry in whole["logprobs"]["content"]
    ]
    for choice in choices[1:-1]:
        data = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
        assert data.decode() == choice["delta"]["content"]


async def test_the_sdk_reads_them(served_url: str) -> None:
    """OpenAI's SDK accepts the response under strict validation."""
    client = openai.AsyncOpenAI(
        base_url=f"{served_url}/v1", api_key="x", _strict_response_validation=True
    )
    async with client:
        reply: ChatCompletion = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            logprobs=True,
            top_logprobs=3,
            seed=3,
        )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert math.isclose(logprobs.content[0].logprob, logprobs.content[0].top_logprobs[0].logprob)


class Late(Echo):
    """An engine whose logprobs are complete only at the end, and inexact for all but one choice.

    koboldcpp behaves like this when it samples a token of probability below 1e-4, which no request
    can force.
    """

    capabilities = Capabilities("late", frozenset(), late_logprobs=True)

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Yield one token for each choice, each in a batch of its own."""
        for choice in range(len(job.seeds)):
            yield [Piece(choice, b"a", [Token(1, b"a", b"a", False, -9.3)])]
            inexact = ("logprobs",) if choice else ()
            yield [Finish(choice, "end", None, 3, 1, inexact=inexact)]


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_known_last_is_said_first(client_of: Any, stream: bool) -> None:
    """A header says that a choice's logprobs are inexact, in a stream as well."""
    body = {"model": "m", "messages": FIRE, "logprobs": True, "n": 2, "stream": stream}
    async with client_of(OpenAIAdapter(Late())) as client:
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.headers["x-latimer-inexact"] == "logprobs"
        plain = await client.post("/v1/chat/completions", json={**body, "logprobs": False})
        assert plain.status_code == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_strict_server_refuses_them(client_of: Any, stream: bool) -> None:
    """With `strict` inexact logprobs are a 400, even for a stream."""
    body = {"model": "m", "messages": FIRE, "logprobs": True, "n": 2, "stream": stream}
    async with client_of(OpenAIAdapter(Late(), strict=True)) as client:
        reply = await client.post("/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logprobs")
