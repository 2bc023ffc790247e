"""`oai_compat: false`: the engine's own reply, untouched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from support.recordings import DEMO_CHATML

COUNT = DEMO_CHATML.format("Count to 12.")
BODY = {"model": "m", "prompt": COUNT, "max_tokens": 5, "temperature": 0, "oai_compat": False}


@pytest.fixture(params=["llama_server", "koboldcpp"])
async def upstream(
    request: pytest.FixtureRequest, apps: Callable[[str], Any], client_of: Any
) -> Any:
    """A client of an adapter in front of an engine with replies of its own."""
    async with client_of(apps(request.param)) as client:
        yield client


async def test_a_plain_reply(upstream: httpx2.AsyncClient) -> None:
    """The engine's JSON, with its own keys and nothing of OpenAI's."""
    reply = await upstream.post("/v1/completions", json=BODY)
    value = reply.json()
    assert "choices" not in value
    text = value["content"] if "content" in value else value["results"][0]["text"]
    assert text == "1, 2, 3"
    assert reply.headers["x-request-id"].startswith("req_")


async def test_a_stream(upstream: httpx2.AsyncClient) -> None:
    """The engine's events, without OpenAI's end."""
    reply = await upstream.post("/v1/completions", json={**BODY, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in reply.text
    assert '"stop":true' in reply.text or '"finish_reason": "length"' in reply.text


async def test_chat(upstream: httpx2.AsyncClient) -> None:
    """The messages are rendered as usual, the reply is the engine's."""
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
    """One native call gives one choice of one prompt."""
    reply = await upstream.post("/v1/completions", json={**BODY, **more})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "oai_compat"
