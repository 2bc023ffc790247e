"""Requests that other workers of the server have to answer, passed on through their Unix sockets.

Each worker has the responses in the background that it runs. A client's connection is with any
worker, so that worker passes the request on, and the response back. The operator's requests are for
all workers. A file for each drained engine lets workers that start later drain it, too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Coroutine, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...backends.errors import LatimerError
from ..admin import DRAINED, PREFIX, combined
from ..errors import Header, LateRequest, error_event, render
from ..responses.register import Register
from ..service import Service

_RESPONSE = re.compile(r"/responses/+(resp_[0-9a-f]+)")
# Seconds that a worker gets to start again, and between two attempts to reach it.
_PATIENCE, _AGAIN = 5.0, 0.05
# Seconds that the others may take longer than this worker for a request of the operator.
_LONGER = 1.0
# The header with the address of the client.
_CLIENT = b"x-forwarded-for"
# Headers of a connection, and those of proxies, which a worker believes when a sibling sends them.
_OF_CONNECTION = frozenset(
    (
        b"connection", b"content-length", b"date", b"keep-alive", b"transfer-encoding", b"upgrade",
        _CLIENT, b"x-forwarded-proto",
    )
)  # fmt: skip
# The bytes of a body that are passed on; these requests need none.
_MOST = 1 << 20


class WorkerGone(LatimerError):
    """An error for a request whose worker has ended."""

    status = 503
    type = "service_unavailable_error"
    code = "worker_unavailable"
    retry_after = 1.0

    def __init__(self) -> None:
        super().__init__(
            "The process that has this response has ended. Retrieve the response again."
        )


def path_of(folder: Path, number: int) -> Path:
    """Return the Unix socket of a worker."""
    return folder / f"{number}.sock"


class Relay:
    """An ASGI app that answers what this worker can, and passes the rest on.

    Args:
        app: the app of this worker.
        register: the responses in the background of all workers.
        folder: the folder with the Unix sockets.
        number: the number of this worker.
    """

    def __init__(self, app: ASGIApp, register: Register, folder: Path, number: int) -> None:
        self._app = app
        self._register = register
        self._folder = folder
        self._number = number
        self._clients: dict[int, httpx2.AsyncClient] = {}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer a request; one of this worker takes no coroutine more."""
        if scope["type"] == "http" and "/responses/" in scope["path"]:
            found = _RESPONSE.search(scope["path"])
            number = None if found is None else self._register.worker_of(found[1])
            if number is not None and number != self._number:
                passing = self._pass_on(number, scope, receive, send)
                return _or_error(passing, scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith(PREFIX):
            return _or_error(self._in_all(scope, receive, send), scope, receive, send)
        return self._app(scope, receive, send)

    async def aclose(self) -> None:
        """Close the connections to the other workers."""
        for client in self._clients.values():
            await client.aclose()

    def drain_again(self, service: Service) -> None:
        """Drain the engines that the operator has drained before this worker began."""
        pools = [entry.pool for entry in service.entries if entry.pool is not None]
        for replica in (one for pool in pools for one in pool.replicas):
            if self._drained(replica.name).exists():
                replica.set("draining", DRAINED)

    def _drained(self, engine: str) -> Path:
        return self._folder / f"{sha256(engine.encode()).hexdigest()}.drained"

    async def _in_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let all workers answer a request of the operator, and send what they say together."""
        body, begun = await _body(receive), time.monotonic()
        status, headers, own = await self._own(scope, body)
        # What this worker refuses, the others would refuse, log and count, too.
        if status == 200:
            self._note(scope["path"])
            limit = time.monotonic() - begun + _LONGER
            workers = {int(path.stem) for path in self._folder.glob("*.sock")}
            numbers = sorted(workers - {self._number})
            others = await asyncio.gather(
                *(self._other(one, scope, body, limit) for one in numbers)
            )
            replies = [orjson.loads(own)]
            replies += [orjson.loads(data) for code, data in others if code == 200]
            silent = [one + 1 for one, (code, _) in zip(numbers, others, strict=True) if not code]
            own = orjson.dumps(combined(replies, silent))
        response = Response(own, status)
        response.raw_headers += [one for one in headers if one[0] != b"content-length"]
        await response(scope, receive, send)

    def _note(self, path: str) -> None:
        """Note that an engine was drained, or is used again."""
        name, _, verb = path.removeprefix(f"{PREFIX}/").rpartition("/")
        if verb == "drain":
            self._drained(name).touch()
        elif verb == "load":
            self._drained(name).unlink(missing_ok=True)

    async def _own(self, scope: Scope, body: bytes) -> tuple[int, Sequence[Header], bytes]:
        """Return the status, the headers and the body of this worker's response."""
        status, parts = 500, list[bytes]()
        headers: Sequence[Header] = ()

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            nonlocal status, headers
            status, headers = message.get("status", status), message.get("headers", headers)
            parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return status, headers, b"".join(parts)

    async def _other(
        self, number: int, scope: Scope, body: bytes, limit: float
    ) -> tuple[int, bytes]:
        """Return the status and the body of another worker's response.

        The status is 0 if it does not answer in time, and 503 if it has ended.
        """
        try:
            async with asyncio.timeout(limit):
                response = await self._sent(number, scope, body, patience=limit / 2)
                try:
                    return response.status_code, await response.aread()
                finally:
                    await response.aclose()
        except TimeoutError:
            return 0, b""
        except httpx2.TransportError:
            return WorkerGone.status, b""

    async def _pass_on(self, number: int, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            client = scope["client"][0] if scope["client"] else ""
            response = await self._sent(number, scope, await _body(receive), client)
        except httpx2.TransportError:
            raise WorkerGone from None
        passing = asyncio.ensure_future(_pass_back(response, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait([passing, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not passing.done():
                passing.cancel()
            await response.aclose()
        if passing.done() and not passing.cancelled():
            passing.result()

    async def _sent(
        self,
        number: int,
        scope: Scope,
        body: bytes,
        client: str = "",
        patience: float = _PATIENCE,
    ) -> httpx2.Response:
        """Send a request to a worker, which may be starting; return its response's head.

        Args:
            client: the address of the client for the log of that worker; empty for a request that
                this one logs.
            patience: seconds that it gets to start.

        Raises:
            httpx2.TransportError: the worker did not answer.
        """
        connection = self._clients.get(number)
        if connection is None:
            # Each of its streams holds a connection, and by default a hundred of them all others.
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
            path = str(path_of(self._folder, number))
            transport = httpx2.AsyncHTTPTransport(uds=path, limits=limits)
            # A stream may be silent for long.
            connection = httpx2.AsyncClient(transport=transport, timeout=None)
            self._clients[number] = connection
        target = b"http://worker" + scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [one for one in scope["headers"] if one[0] not in _OF_CONNECTION]
        if client:
            headers.append((_CLIENT, client.encode()))
        request = httpx2.Request(
            scope["method"], target.decode("ascii"), headers=headers, content=body
        )
        until = asyncio.get_running_loop().time() + patience
        while True:
            try:
                return await connection.send(request, stream=True)
            except httpx2.ConnectError:
                if asyncio.get_running_loop().time() > until:
                    raise
                await asyncio.sleep(_AGAIN)


async def _or_error(
    work: Coroutine[Any, Any, None], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request, or send the error why it cannot be passed on."""
    try:
        await work
    except (LateRequest, WorkerGone) as error:
        status, body, headers = render(error)
        response = Response(orjson.dumps(body), status, media_type="application/json")
        response.raw_headers += headers
        await response(scope, receive, send)


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        part: bytes = message.get("body", b"")
        size += len(part)
        if size <= _MOST:
            parts.append(part)
        more = message.get("more_body", False)
    return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_back(response: httpx2.Response, send: Send) -> None:
    head = [(name.lower(), value) for name, value in response.headers.raw]
    is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
    head = [
        one
        for one in head
        if one[0] not in _OF_CONNECTION or (one[0] == b"content-length" and not is_stream)
    ]
    await send({"type": "http.response.start", "status": response.status_code, "headers": head})
    end = b""
    try:
        async for part in response.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except httpx2.TransportError:
        if not is_stream:
            raise
        end = error_event(WorkerGone())
    await send({"type": "http.response.body", "body": end})
