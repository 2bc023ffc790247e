"""Toy servers for the runs of checks, called in process or over sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvicorn
from suite.server import Server


class Stage:
    """An ASGI app with one server for each run of a check, selected by the first part of a path."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        _, number, rest = scope["raw_path"].split(b"/", 2)
        await self.servers[number.decode()]({**scope, "raw_path": b"/" + rest}, receive, send)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to pytest."""
        yield


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve an app in the running event loop, and yield its address."""
    config = uvicorn.Config(app, port=0, lifespan="off", ws="none", log_level="critical",
                            timeout_graceful_shutdown=1)  # fmt: skip
    server = _Uvicorn(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class Direct:
    """An in-process client for an app, with the part of `httpx2.AsyncClient` that checks use."""

    def __init__(self, app: Any, base_url: httpx2.URL, headers: Mapping[str, str]) -> None:
        self._app = app
        self.base_url = base_url
        self.headers = httpx2.Headers(headers)

    async def request(
        self, method: str, path: str, *, content: bytes | None, headers: Mapping[str, str]
    ) -> httpx2.Response:
        """Send a request and return the complete response."""
        raw, _, query = f"{self.base_url.path}{path}".encode().partition(b"?")
        sent = {**self.headers, **headers}
        scope = {
            "type": "http", "method": method, "raw_path": raw, "query_string": query,
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
        }  # fmt: skip
        requests = iter([{"type": "http.request", "body": content or b""}])
        replies: list[Any] = []

        async def receive() -> Any:
            message = next(requests, None)
            return message or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            replies.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:
            if replies:
                raise httpx2.RemoteProtocolError("the response is incomplete") from None
            return httpx2.Response(500)
        start, *parts = replies
        body = b"".join(part["body"] for part in parts)
        return httpx2.Response(start["status"], headers=_received(start["headers"]), content=body)


def _received(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers as a client parses them: a line break in a value starts another header."""
    lines = b"\r\n".join(b": ".join(pair) for pair in headers).split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return [(name, value.strip()) for name, _, value in pairs]
