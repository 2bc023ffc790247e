"""A connection to an engine: HTTP/1.1 on an `asyncio.Protocol` and httptools, uvicorn's parser."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import httptools

from .errors import EngineError, EngineSilent

# Bytes of a body to buffer for a slow reader; beyond this the socket is not read.
HIGH_WATER = 2**17
# Bytes of a body to collect for a reader that wants all of it; they are parsed in a turn of the
# event loop.
MOST_HELD = 2**14
# Bytes of a response that the kernel buffers; its default reaches six megabytes.
RECEIVE_BUFFER = 2**16
# The largest response head, in bytes.
MOST_HEAD = 2**18
# Bytes of a request's body per write; copying 20 MB would block the event loop.
PIECE = 2**18

_NOTHING = memoryview(b"")
# The headers that say where a body ends.
_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


class Dropped(Exception):
    """The loss of a connection before the first byte of the response."""


class _Behind(Exception):
    """Data after a complete response; raised in a callback to stop httptools."""


class Connection(asyncio.Protocol):
    """A connection that parses consecutive responses and iterates over their bodies.

    Every coroutine between a token and its task costs time: `__anext__` is one, and waits itself.

    Attributes:
        may_be_kept: True if the response is complete and the engine keeps the connection open.
        holds: True to wake the reader at the end of the body, or when it has `MOST_HELD` bytes.
        push: gets the data of the body instead of a reader that waits; see `base.Pushing`. None
            wakes the reader. The last data of a body is always for the reader.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, address: str = "") -> None:
        self.loop = loop
        self._transport: Any = None
        self.closed = False
        self.idle_since = 0.0
        self.last = 0.0
        self._address = address
        self._unsent = _NOTHING
        self._is_full = False
        self._is_waiting = False
        self._body: list[bytes] = []
        # Of a repeated header, the last value: engines repeat none that Latimer reads.
        self._lines: dict[bytes, bytes] = {}
        # The parser's callbacks for decoded body data, the path of every token, and for headers.
        self.on_body = self._body.append
        self.on_header = self._lines.__setitem__
        # The lines of the head, as they came.
        self.head: Mapping[bytes, bytes] = {}
        self.status = 0
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self.push: Callable[[bytes], bool] | None = None
        self._error: Exception | None = None
        self._answered = self.headers_complete = self.complete = self.may_be_kept = False

    def start(self, head: bytes, body: bytes) -> None:
        """Send a request.

        Raises:
            Dropped: the connection is closed.
        """
        self._body.clear()
        self._lines.clear()
        self._size = 0
        self._paused = self._answered = self._is_informational = self.holds = False
        self.push = None
        self.headers_complete = self.complete = self.may_be_kept = False
        if self.closed:
            raise Dropped
        self._is_waiting = True
        self.last = self.loop.time()
        if len(body) <= PIECE:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        self._unsent = memoryview(body)
        self._send_more()

    def _send_more(self) -> None:
        """Write more of a large body, until the transport's buffer is full."""
        # A server that reads the request is not silent.
        self.last = self.loop.time()
        while self._unsent and not self._is_full and not self.closed:
            self._transport.write(self._unsent[:PIECE])
            # An empty view of the body would keep it in memory.
            self._unsent = self._unsent[PIECE:] or _NOTHING

    def __aiter__(self) -> Connection:
        return self

    async def __anext__(self) -> bytes:
        while not self._body:
            if self.complete:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            await self._waiter
        data = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """Close the connection immediately, even if its event loop is closed."""
        self.closed = True
        if self._transport is None:
            return
        if not self.loop.is_closed():
            self._transport.abort()
            return
        transport, self._transport = self._transport, None
        # What the event loop calls after `abort`. No public function closes the socket, which the
        # garbage collector would close with a `ResourceWarning`.
        end = getattr(transport, "_call_connection_lost", None)
        if end is not None:
            # Also after its end.
            with suppress(AttributeError, RuntimeError):
                end(None)

    def drop(self) -> None:
        """Close the connection when its reader has finished.

        The traceback of a raised error refers to the connection. Clearing the error breaks that
        cycle; otherwise thousands of connections, some KB each, wait for the garbage collector.
        """
        self.close()
        self._error = None

    def wait(self) -> asyncio.Future[None]:
        """Wait until data arrives or the connection ends; raise an error that is already set."""
        if self._error is not None:
            raise self._error
        self._waiter = waiter = self.loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    @property
    def is_read(self) -> bool:
        """True if the response is complete, and all of it was read."""
        return self.complete and not self._body

    @property
    def unread(self) -> bytes:
        """The data that has arrived and that its reader has not taken."""
        return b"".join(self._body)

    @property
    def has_begun(self) -> bool:
        """True if a part of the response has arrived."""
        return self._answered

    @property
    def is_paused(self) -> bool:
        """True if reading is paused for a slow reader."""
        return self._paused

    def lose(self, reason: str) -> None:
        """Fail the exchange because its response has stopped."""
        self._fail(EngineSilent(f"The engine at {self._address} {reason}."))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)

    def data_received(self, data: bytes) -> None:
        if not self._is_waiting:
            # Without a request, the data would pass for the response to the next one.
            self.close()
            return
        self._answered = True
        self.last = self.loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self.complete:
                changes = isinstance(error, httptools.HttpParserUpgrade)
                reason = "an upgrade" if changes else str(error)
                self._fail(
                    EngineError(
                        f"The engine at {self._address} sent an invalid HTTP response: {reason}."
                    )
                )
            self.close()
            # The reader still waits for the last data of a complete response.
            self._wake()
            return
        waiter, body = self._waiter, self._body
        if (
            self.push is not None
            and body
            and waiter is not None
            and not (self.complete or waiter.done())
        ):
            try:
                taken = self.push(body[0] if len(body) == 1 else b"".join(body))
            except Exception as error:
                taken, self._waiter = True, None
                waiter.set_exception(error)
                # The error refers to this frame.
                waiter = None
            if taken:
                body.clear()
                self._size = 0
                return
        # The size includes the framing; pausing needs body data that the reader can take.
        size = self._size = self._size + len(data)
        if size > HIGH_WATER:
            if self.headers_complete:
                # A connection that is kept after its response must be read for the next one.
                if self._body and not (self._paused or self.complete):
                    self._paused = True
                    self._transport.pause_reading()
            elif size > MOST_HEAD:
                self._fail(
                    EngineError(f"The engine at {self._address} sent headers that are too large.")
                )
                self.close()
                return
        if waiter is not None and (not self.holds or self.complete or self._size > MOST_HELD):
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def pause_writing(self) -> None:
        """Stop writing: the transport's buffer is full."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Write the rest of a large body."""
        self._is_full = False
        self._send_more()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        # The parser refers to the connection.
        self._parser = None
        if self.complete:
            return
        if self.headers_complete and error is None and self._ends_with_connection():
            self.complete = True
            self._wake()
        elif not self._answered:
            self._fail(Dropped())
        else:
            why = "the engine closed it" if error is None else repr(error)
            self._fail(
                EngineError(f"The connection to the engine at {self._address} was lost: {why}.")
            )

    # httptools

    def on_message_begin(self) -> None:
        """Reject a second response to one request."""
        if self.complete:
            raise _Behind

    def on_headers_complete(self) -> None:
        """Read the head; an informational head (1xx) is not that of the response."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self._is_informational = True
            return
        self.headers_complete = True
        self.head = self._lines.copy()

    def _ends_with_connection(self) -> bool:
        """Return True if the head does not say where the body ends."""
        return _LENGTHS.isdisjoint(map(bytes.lower, self.head))

    def on_message_complete(self) -> None:
        """Mark the response as complete, unless it was informational."""
        if self._is_informational:
            self._is_informational = False
            self._lines.clear()
            return
        self.complete = True
        self._is_waiting = False
        self.may_be_kept = self._parser.should_keep_alive() and not self._unsent
