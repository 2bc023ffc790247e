"""Tests of what Ray Serve's proxy answers for a replica that has ended; without Ray."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from latimer.adapter.ray_proxy import PLACE, EndedReplicas, middlewares
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = {"x-request-id": "mine-1"}


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    """Return without an answer, as Ray Serve's proxy does."""


async def cut(scope: Scope, receive: Receive, send: Send) -> None:
    """Begin an answer, and do not end it."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})


async def sent(app: ASGIApp, **scope: Any) -> list[Message]:
    """Return the messages that a request gets."""
    found: list[Message] = []

    async def send(message: Message) -> None:
        found.append(message)

    async def receive() -> Message:
        raise AssertionError

    await EndedReplicas(app)({"path": "/v1/responses", "headers": [], **scope}, receive, send)
    return found


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/small/v1/responses"])
async def test_a_request_without_an_answer_can_be_sent_again(path: str) -> None:
    """It gets a 503 with `retry-after`, OpenAI's error object, and its own id."""
    transport = httpx2.ASGITransport(EndedReplicas(silent))
    async with httpx2.AsyncClient(transport=transport, base_url="http://ray") as client:
        reply = await client.post(path, json={}, headers=NAME)
        head = await client.head(path, headers=NAME)
    assert reply.status_code == head.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.headers.get_list("x-request-id") == ["mine-1"]
    assert reply.json()["error"]["code"] == "replica_ended"
    assert int(head.headers["content-length"]) == len(reply.content)


async def test_anthropics_client_gets_its_own_error() -> None:
    """A request of Messages gets Anthropic's error object, under the prefix of an application."""
    transport = httpx2.ASGITransport(EndedReplicas(silent))
    async with httpx2.AsyncClient(transport=transport, base_url="http://ray") as client:
        reply = await client.post("/small/v1/messages", json={}, headers=NAME)
    assert (reply.status_code, reply.headers["retry-after"]) == (529, "1")
    assert reply.json()["error"]["type"] == "overloaded_error"
    assert reply.json()["request_id"] == "mine-1"


async def test_an_answer_that_has_begun_is_left_alone() -> None:
    """Nothing is added to a stream, so its client sees that it was cut."""
    types = [one["type"] for one in await sent(cut, type="http", method="POST")]
    assert types == ["http.response.start", "http.response.body"]
    assert not await sent(silent, type="lifespan")


@pytest.mark.parametrize(
    ("extensions", "types"),
    [
        ({"websocket.http.response": {}}, ["start", "body"]),
        (None, ["websocket.close"]),
    ],
)
async def test_a_handshake_is_refused(extensions: Any, types: list[str]) -> None:
    """A WebSocket without an answer gets the same error, or is closed if it cannot."""
    found = await sent(silent, type="websocket", extensions=extensions)
    assert [one["type"].removeprefix("websocket.http.response.") for one in found] == types
    assert found[0].get("status", 503) == 503


async def test_a_client_that_has_left_its_handshake_is_no_error() -> None:
    """The middleware ends what the server raises for such a client."""

    async def gone(message: Message) -> None:
        raise ConnectionResetError

    async def receive() -> Message:
        raise AssertionError

    scope = {"type": "websocket", "path": "/v1/responses", "headers": []}
    await EndedReplicas(silent)(scope, receive, gone)


def test_the_proxy_finds_it() -> None:
    """The place that the environment names is that of the function."""
    assert PLACE == "latimer.adapter.ray_proxy:middlewares"
    (one,) = middlewares()
    assert one.cls is EndedReplicas  # type: ignore[comparison-overlap]
