"""Tests of `oai_compat: false`, which returns the engine's own response unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.koboldcpp import KoboldCpp
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.recorded import RecordedKoboldcpp, RecordedServer
from support.recordings import DEMO_CHATML

COUNT = DEMO_CHATML.format("Count to 12.")
BODY = {"model": "m", "prompt": COUNT, "max_tokens": 5, "temperature": 0, "oai_compat": False}


@pytest.fixture(params=["llama_server", "koboldcpp"])
async def upstream(
    request: pytest.FixtureRequest, apps: Callable[[str], Any], client_of: Any
) -> Any:
    """Return a client of an adapter for an engine with a native API."""
    async with client_of(apps(request.param)) as client:
        yield client


async def test_a_plain_reply(upstream: httpx2.AsyncClient) -> None:
    """A plain response is the engine's own JSON."""
    reply = await upstream.post("/v1/completions", json=BODY)
    value = reply.json()
    assert "choices" not in value
    text = value["content"] if "content" in value else value["results"][0]["text"]
    assert text == "1, 2, 3"
    assert reply.headers["x-request-id"].startswith("req_")


async def test_a_stream(upstream: httpx2.AsyncClient) -> None:
    """A stream has the engine's own events and no `[DONE]`."""
    reply = await upstream.post("/v1/completions", json={**BODY, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in reply.text
    assert '"stop":true' in reply.text or '"finish_reason": "length"' in reply.text


async def test_a_stream_that_the_engine_cuts_ends_with_an_error(client_of: Any) -> None:
    """A stream that breaks ends with an error event and no `[DONE]`."""

    async def half() -> AsyncIterator[bytes]:
        yield b'data: {"content":"1"}\n\n'
        raise httpx2.ReadError("gone")

    def stream(_request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=half())

    engine = RecordedServer({"/completion": stream})
    async with client_of(OpenAIAdapter(engine.backend, any_model=True)) as client:
        reply = await client.post("/v1/completions", json={**BODY, "stream": True})
    events = reply.text.split("\n\n")
    assert events[0] == 'data: {"content":"1"}'
    assert "The connection to the engine" in events[1]
    assert events[2:] == [""]


@pytest.mark.parametrize("text", ["1, 2", ""])
async def test_a_stream_that_koboldcpp_cuts_ends_with_an_error(client_of: Any, text: str) -> None:
    """A stream that closes before its generation has ended does not look complete."""
    event = b'data: {"token": "%b", "finish_reason": null}\n\n' % text.encode()
    engine = RecordedKoboldcpp({"/api/extra/generate/stream": event if text else b""})
    async with client_of(OpenAIAdapter(engine.backend, any_model=True)) as client:
        reply = await client.post("/v1/completions", json={**BODY, "stream": True})
    *events, last, end = reply.text.split("\n\n")
    assert events == ([event.decode().strip()] if text else [])
    assert "koboldcpp ended its response before it was finished." in last
    assert end == ""


async def test_a_stream_without_a_final_event_is_whole(client_of: Any) -> None:
    """koboldcpp's streams without a final event are passed on as they are."""
    async with FakeKoboldcpp(quiet=True) as fake:
        backend = KoboldCpp(fake.url)
        async with client_of(OpenAIAdapter(backend, any_model=True)) as client:
            body = {**BODY, "prompt": "echo:a long answer", "max_tokens": 8, "stream": True}
            reply = await client.post("/v1/completions", json=body)
        await backend.aclose()
    assert '"token"' in reply.text
    assert "error" not in reply.text


async def test_chat(upstream: httpx2.AsyncClient) -> None:
    """A chat's messages are rendered as usual, and the response is the engine's own."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Count to 12."}]}
    reply = await upstream.post(
        "/v1/chat/completions",
        json={**body, "max_tokens": 5, "temperature": 0, "oai_compat": False},
    )
    assert "1, 2, 3" in reply.text
    assert "choices" not in reply.json()


@pytest.mark.parametrize(
    "more", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"max_tokens": 0}]
)
async def test_what_takes_more_than_one_call_is_refused(
    upstream: httpx2.AsyncClient, more: dict[str, Any]
) -> None:
    """A request that needs more than one native call is rejected."""
    reply = await upstream.post("/v1/completions", json={**BODY, **more})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "oai_compat"
