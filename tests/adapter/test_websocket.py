"""Tests that a WebSocket is refused in a way by which clients use HTTP instead."""

from __future__ import annotations

import socket
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter, OpenAIMiddleware
from latimer.backends.llama_cpp import DEMO_MODEL
from support.engines.echo import Echo
from support.servers import begun, serving

R = "/v1/responses"
HANDSHAKE = (
    "GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
    "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def check_handshake(url: str) -> None:
    """Check that a server answers a handshake with a 426."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(HANDSHAKE.encode())
        assert connection.recv(12) == b"HTTP/1.1 426"


def test_a_handshake_with_latimer_serve() -> None:
    """A handshake gets a 426, and the log does not ask for a WebSocket library."""
    with begun(str(DEMO_MODEL)) as (process, url, _):
        check_handshake(url)
        process.terminate()
        assert "WebSocket" not in process.communicate(timeout=30)[1]


def test_a_handshake_with_a_server_that_knows_websockets() -> None:
    """A handshake gets a 426 also from a server that would accept it."""
    with serving(lambda: OpenAIAdapter(Echo()), "auto") as url:
        check_handshake(url)


async def test_a_websocket_over_http(echo: httpx2.AsyncClient) -> None:
    """A handshake gets a 426, by which clients know that they can use HTTP."""
    headers = {"connection": "Upgrade", "upgrade": "websocket"}
    reply = await echo.get(R, headers=headers)
    assert reply.status_code == 426
    assert (reply.headers["upgrade"], reply.headers["connection"]) == ("HTTP/1.1", "upgrade")
    assert reply.json()["error"]["code"] == "unsupported_endpoint"
    assert (await echo.get(R)).status_code == 200


@pytest.mark.parametrize("mounted", [True, False])
@pytest.mark.parametrize("can_answer", [True, False])
async def test_a_websocket_over_asgi(mounted: bool, can_answer: bool) -> None:
    """A server with WebSockets sends the 426 if it can, and else closes the connection."""
    app: Any = OpenAIMiddleware(OpenAIAdapter(Echo()), Echo()) if mounted else OpenAIAdapter(Echo())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "websocket", "path": R, "headers": []}
    scope |= {"extensions": {"websocket.http.response": {}}} if can_answer else {}
    await app(scope, None, send)
    if can_answer:
        assert [message["type"] for message in sent] == [
            "websocket.http.response.start", "websocket.http.response.body",
        ]  # fmt: skip
        assert sent[0]["status"] == 426
    else:
        assert sent == [{"type": "websocket.close", "code": 1000}]
