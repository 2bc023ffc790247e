"""Tests of streams on a real socket: timing, disconnects, errors in a stream, many clients."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Finish
from latimer.backends.errors import EngineError
from support.engines.echo import Echo, Slow
from support.recordings import prompts
from support.servers import serving

PROMPTS = prompts()


async def test_an_error_in_mid_stream_is_an_event() -> None:
    """An error in a stream keeps the text sent before it, then sends the error and `[DONE]`."""
    app = OpenAIAdapter(Slow(error=EngineError("lost power")), any_model=True)
    with serving(lambda: app) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            for path, text in (
                ("/v1/completions", {"prompt": "x"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ):
                options = {"stream": True, "stream_options": {"include_usage": True}}
                reply = await client.post(path, json={"model": "m", **text, **options})
                *chunks, error, done, rest = reply.text.split("\n\n")
                assert (done, rest) == ("data: [DONE]", "")
                assert json.loads(error.removeprefix("data: ")) == {
                    "error": {
                        "message": "lost power",
                        "type": "server_error",
                        "param": None,
                        "code": "engine_error",
                    }
                }
                assert "one " in chunks[-2]
                assert all('"finish_reason":null' in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x"})]
)
@pytest.mark.timed
async def test_a_client_that_leaves_ends_the_job(
    path: str, body: dict[str, str], stream: bool
) -> None:
    """When a client disconnects, the backend's context exits immediately, streaming or not."""
    backend = Slow()
    with serving(lambda: OpenAIAdapter(backend, any_model=True)) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            with pytest.raises(httpx2.ReadTimeout):
                await client.post(path, json={"model": "m", **body, "stream": stream}, timeout=0.3)
        start = time.monotonic()
        while backend.running or not backend.left.is_set():
            assert time.monotonic() - start < 0.5
            await asyncio.sleep(0.01)


async def test_what_arrived_together_is_sent_together() -> None:
    """Two tokens of one batch arrive in one read, before the next batch exists."""
    backend = Slow()
    with serving(lambda: OpenAIAdapter(backend, any_model=True)) as address:
        async with (
            httpx2.AsyncClient(base_url=address) as client,
            client.stream(
                "POST", "/v1/completions", json={"model": "m", "prompt": "x", "stream": True}
            ) as reply,
        ):
            first = await anext(reply.aiter_raw())
            assert first.count(b"data: ") == 2


@pytest.mark.slow
async def test_two_hundred_clients_at_once(served_url: str) -> None:
    """Each of 200 concurrent clients gets its own complete answer or a 429 with a retry time."""
    limits = httpx2.Limits(max_connections=None)
    refused = 0
    async with httpx2.AsyncClient(base_url=served_url, limits=limits, timeout=110) as client:

        async def ask(number: int) -> None:
            nonlocal refused
            prompt = PROMPTS[number % 20]
            body = {
                "model": "m",
                "prompt": prompt["prompt"],
                "max_tokens": 64,
                "temperature": 0,
                "stream": number % 2 == 0,
            }
            reply = await client.post("/v1/completions", json=body)
            if reply.status_code == 429:
                assert 0 < int(reply.headers["retry-after-ms"]) <= 60_000
                assert reply.json()["error"]["code"] == "rate_limit_exceeded"
                refused += 1
                return
            assert reply.status_code == 200, reply.text
            if not body["stream"]:
                assert reply.json()["choices"][0]["text"] == prompt["greedy"]
                return
            # A busy machine can be silent for so long that a stream sends a comment.
            events = [one for one in reply.text.split("\n\n")[:-2] if not one.startswith(":")]
            chunks: list[Any] = [json.loads(event.removeprefix("data: ")) for event in events]
            assert "".join(c["choices"][0]["text"] for c in chunks) == prompt["greedy"]
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"

        await asyncio.gather(*(ask(number) for number in range(200)))
    assert refused < 200


async def test_a_slow_reader_loses_nothing(served_url: str) -> None:
    """A client that reads late gets the whole stream."""
    body = {
        "model": "m",
        "prompt": PROMPTS[4]["prompt"],
        "max_tokens": 64,
        "temperature": 0,
        "stream": True,
    }
    async with (
        httpx2.AsyncClient(base_url=served_url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as reply,
    ):
        await asyncio.sleep(0.3)
        text = (await reply.aread()).decode()
    chunks = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPTS[4]["greedy"]


async def test_finishes_are_counted() -> None:
    """A generation that ends with an unfinished choice is an engine error."""
    app = OpenAIAdapter(Echo([[Finish(0, "end", None, 1, 1)]]), any_model=True)
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://x"
    ) as client:
        reply = await client.post("/v1/completions", json={"model": "m", "prompt": "x", "n": 2})
    assert reply.status_code == 502
    assert "every choice" in reply.json()["error"]["message"]
