"""uvicorn's HTTP/1.1 protocol, with limited heads and a disconnect for every pipelined request.

If the client disconnects, uvicorn notifies only the newest request of the connection. A client can
send its next request before it has the response to the first: the first would then run to its end.
While a second request waits, uvicorn does not read from the connection, and misses the disconnect.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterable
from typing import Any

import orjson
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ...schemas import limits
from ..errors import InvalidRequest, render

MOST_HEAD = limits.HEAD.most
# Seconds between checks of a connection that is not read from.
LOOK_EVERY = 0.25
# macOS reports a disconnect by POLLHUP only, and Windows has no poll.
_GONE = getattr(select, "POLLRDHUP", 0) | getattr(select, "POLLHUP", 0)


class _Cycle(RequestResponseCycle):
    """A request, and a response that sends its head together with the body that follows.

    uvicorn writes them separately, and each write is a system call. It also matches every header
    against two regular expressions, which take as long as Latimer takes to read a request. A head
    with a content length waits for the body. Any other head waits until the next iteration of the
    event loop at most.
    """

    _head = b""

    async def send(self, message: Any) -> None:
        """See `RequestResponseCycle.send`; header names must be in lower case."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if self.scope["method"] == "HEAD":
            # uvicorn handles responses without a body.
            await super().send(message)
        elif not self.response_started:
            self._start(message["status"], message["headers"])
        elif self.response_complete:
            raise RuntimeError("the response continues after its end")
        else:
            self._write(message.get("body", b""), message.get("more_body", False))

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [*map(b": ".join, self.default_headers), *map(b": ".join, headers)]
        head = b"\r\n".join([STATUS_LINE[status].rstrip(), *lines])
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError("a response header contains a line break")
        if b"\r\nconnection: close" in head:
            self.keep_alive = False
        elif not self.keep_alive:
            head += b"\r\nconnection: close"
        self.chunked_encoding = b"\r\ncontent-length: " not in head and status not in (204, 304)
        if self.chunked_encoding:
            head += b"\r\ntransfer-encoding: chunked"
            asyncio.get_running_loop().call_soon(self._flush)
        self._head = head + b"\r\n\r\n"

    def _write(self, body: bytes, more: bool) -> None:
        if self.chunked_encoding:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if not more:
                body += b"0\r\n\r\n"
        if self._head:
            body, self._head = self._head + body, b""
        self.transport.write(body)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)


# `HttpToolsProtocol` looks up its cycle class by this name, and has no setting for it.
httptools_impl.RequestResponseCycle = _Cycle  # type: ignore[misc]


class Protocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._running: RequestResponseCycle | None = None
        self._looking: asyncio.TimerHandle | None = None
        # Bytes received since the last complete head or part of a body.
        self._unread = 0

    def data_received(self, data: bytes) -> None:
        """Take data from the client."""
        self._unread += len(data)
        super().data_received(data)
        # These bytes are a head, trailers, or the header of a chunk.
        if self._unread > MOST_HEAD and not self.transport.is_closing():
            self._refuse(
                "The request line, headers and trailers are too large. This server accepts at most "
                f"{MOST_HEAD} bytes.",
                431,
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """Notify every request of the connection that the client has disconnected."""
        if self._looking is not None:
            self._looking.cancel()
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self._unread = 0
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Take the end of a request's head."""
        self._unread = 0
        super().on_headers_complete()
        # The parser adds trailers to this list, but they are not headers of the request.
        self.headers = []
        if self.pipeline and self._looking is None:
            self._look()

    def send_400_response(self, msg: str) -> None:
        """Respond to data that is not HTTP."""
        self._refuse(msg, 400)

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the app responds to the request."""

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _look(self) -> None:
        """Check for a disconnect as long as a request waits behind another."""
        self._looking = None
        if self.transport.is_closing() or not self.pipeline:
            return
        if self.flow.read_paused and self._has_gone():
            self.transport.abort()
            return
        self._looking = self.loop.call_later(LOOK_EVERY, self._look)

    def _has_gone(self) -> bool:
        connection = self.transport.get_extra_info("socket")
        if connection is None or not _GONE:
            return False
        poll = select.poll()
        poll.register(connection.fileno(), _GONE)
        return bool(poll.poll(0))

    def _refuse(self, message: str, status: int) -> None:
        """Send an error object and close; only close if another response is incomplete."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        _, error, _ = render(InvalidRequest(message, status=status))
        body = orjson.dumps(error)
        head = [
            STATUS_LINE[status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join(head) + body)
        self.transport.close()
