"""uvicorn's HTTP/1.1 protocol, with what it leaves out: who leaves is noticed, heads have an end.

uvicorn tells only the newest request of a connection that the client has left. Where a client sends
its next request before it has the answer to the first, the first would be worked on to its end; and
once a second one waits, uvicorn does not read from the connection, and does not see its end at all.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ...schemas import limits
from ..errors import InvalidRequest, render

MOST_HEAD = limits.HEAD.most
# A chunk of one byte takes six.
PER_BYTE = 8
# Seconds between looks at a connection that is not read from.
LOOK_EVERY = 0.25
# Not everywhere: macOS tells the same by POLLHUP, Windows has no poll.
_GONE = getattr(select, "POLLRDHUP", 0) | getattr(select, "POLLHUP", 0)


class _Joining:
    """A transport that sends a reply's head together with what comes right behind it.

    uvicorn writes them one by one, and each write is a call of the kernel. A head that tells the
    body's length waits for the body, all others for this turn of the event loop at most.
    """

    __slots__ = ("_flushing", "_has_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self._has_begun = False
        self._flushing: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        """Keep the head for a moment, and write all else at once."""
        if not self._has_begun:
            self._has_begun = True
            self._head = data
            if b"\r\ncontent-length: " not in data:
                self._flushing = self._loop.call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            if self._flushing is not None:
                self._flushing.cancel()
                self._flushing = None
            self._transport.write(head + data)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        self._flushing = None
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        """Close when all is written."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """See `asyncio.Transport.is_closing`."""
        return self._transport.is_closing()


class Protocol(HttpToolsProtocol):
    """One connection of a client."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._running: RequestResponseCycle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._is_complete = True
        # Bytes of the request, and how many of them were its body's.
        self._received = 0
        self._body_size = 0

    def data_received(self, data: bytes) -> None:
        """Take what a client sent."""
        self._received += len(data)
        super().data_received(data)
        if self._is_in_head:
            # Where in it the head has begun is not told.
            self._received = max(self._received, len(data))
        # What is neither body nor its framing is head or trailers.
        if self._received - PER_BYTE * self._body_size > MOST_HEAD:
            is_done = not self._is_in_head and self._is_complete
            if not is_done and not self.transport.is_closing():
                self._refuse(
                    f"The request's line, headers and trailers are larger than {MOST_HEAD} bytes.",
                    431,
                )

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every request of the connection that its client has left."""
        if self._looking is not None:
            self._looking.cancel()
        for cycle in (self._running, *(cycle for cycle, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._is_in_head, self._is_complete = True, False
        self._received = self._body_size = 0
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._is_complete = True
        super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_size += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """A request's head is complete."""
        self._is_in_head = False
        super().on_headers_complete()
        # Trailers come the same way, and are no headers of the request.
        self.headers = []
        if self.pipeline and self._looking is None:
            self._look()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(msg, 400)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["method"] == "POST":
            # The reply to a HEAD has no body to wait for.
            cycle.transport = _Joining(self.transport, self.loop)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def _look(self) -> None:
        """While a request waits behind another, look whether its client is still there."""
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
        """Send an error object and close; in the middle of another answer only close."""
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
