"""uvicorn's HTTP/1.1 protocol, with limited heads, and at most two requests at a time.

A client can send its next request before it has the response to the first. This request is the last
one of its connection: RFC 9112 lets a server close a connection with requests that it has not read.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import httptools
import orjson
from typing_extensions import override
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ...backends import offload
from ...schemas import limits
from ..errors import InvalidRequest, render

MOST_HEAD = limits.HEAD.maximum
_SOCKETS = "latimer.adapter.cli.sockets"
# The version of a WebSocket's handshake, and the length of its key: 16 bytes in base64.
_VERSION, _KEY = b"13", 24
# The headers that determine the length of a body.
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class _Cycle(RequestResponseCycle):
    """A request, and a response that sends its head together with the body that follows.

    uvicorn writes them separately, and each write is a system call. It also matches every header
    against two regular expressions, which take as long as Latimer takes to read a request. A head
    with a content length waits for the body. Any other head waits until the next iteration of the
    event loop at most.
    """

    _head = b""

    @override
    async def send(self, message: Any) -> None:
        """Send a message; header names must be in lower case."""
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


class _Rest:
    """The receiver of what a parser reports of a connection, without the first head."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._is_first = True
        self.on_body = protocol.on_body
        self.on_message_complete = protocol.on_message_complete

    def on_message_begin(self) -> None:
        """Pass on the beginning of a request."""
        if not self._is_first:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Pass on a part of a path."""
        if not self._is_first:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Pass on a header."""
        if not self._is_first:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass on the end of a head, and all that follows the first one."""
        if not self._is_first:
            self._protocol.on_headers_complete()
        self._is_first = False


class Protocol(HttpToolsProtocol):
    """One connection of a client."""

    # The module of WebSockets, when it is imported.
    _sockets: ModuleType | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._running: RequestResponseCycle | None = None
        # Bytes received since the last complete head or part of a body.
        self._unread = 0
        self._data = b""
        self._opens_socket = False
        # The time of the end of the last response; infinite if something has arrived since.
        self._idle_since = math.inf

    def closed(self) -> None:
        """Note that the connection has closed."""

    @override
    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        self._data = data
        super().data_received(data)
        # These bytes are a head, trailers, or the header of a chunk.
        if self._unread > MOST_HEAD and not self.transport.is_closing():
            self._refuse(
                "The request line, headers and trailers are too large. This server accepts at most "
                f"{MOST_HEAD} bytes.",
                431,
            )

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the running request; uvicorn notifies the newest one only."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._end_timer()
        self.closed()

    @override
    def on_body(self, body: bytes) -> None:
        self._unread = 0
        cycle = self.cycle
        if not (self._opens_socket or cycle.response_complete):
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    @override
    def on_message_complete(self) -> None:
        self._unread = 0
        # The parser ends a request that asks for another protocol before its body.
        if not (self.parser.should_upgrade() or self.cycle.response_complete):
            self.cycle.more_body = False
            self.cycle.message_event.set()

    @override
    def on_response_complete(self) -> None:
        """Begin the next request, or the time for which the connection may be idle."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._begin_timer(self.timeout_keep_alive)

    @override
    def _unset_keepalive_if_required(self) -> None:
        """Let the timer run on; to look at its end costs less than to set it for each request."""
        self._idle_since = math.inf

    @override
    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left <= 0:
            super().timeout_keep_alive_handler()
        elif left < math.inf:
            self._begin_timer(left)

    def _begin_timer(self, seconds: float) -> None:
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(seconds, handler)

    def _end_timer(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    @override
    def on_headers_complete(self) -> None:
        self._unread = 0
        self._opens_socket = self._is_handshake()
        super().on_headers_complete()
        if self._opens_socket:
            return
        # uvicorn has no setting for the class, and the request's task has not begun.
        self.cycle.__class__ = _Cycle
        # The parser adds trailers to this list, but they are not headers of the request.
        self.headers = []
        if self.pipeline:
            self.cycle.keep_alive = False
            if len(self.pipeline) > 1:
                # The connection closes before its turn.
                self.pipeline.popleft()
            # A disconnect is only noticed while the connection is read.
            self.flow.resume_reading()

    def _is_handshake(self) -> bool:
        """Return True if the request opens a WebSocket, and no other one is unanswered."""
        if not self.parser.should_upgrade() or self._get_upgrade() != b"websocket":
            return False
        found = dict(self.headers)
        return (
            self.parser.get_method() == b"GET"
            and found.get(b"sec-websocket-version") == _VERSION
            and len(found.get(b"sec-websocket-key", b"")) == _KEY
            and (self.cycle is None or self.cycle.response_complete)
        )

    @override
    def _should_upgrade(self) -> bool:
        return self._opens_socket

    @override
    def handle_websocket_upgrade(self) -> None:
        """Continue with the protocol of WebSockets, which the first handshake imports."""
        self._end_timer()
        self.flow.pause_reading()
        self._upgrading = self.loop.create_task(self._upgrade())

    async def _upgrade(self) -> None:
        found = Protocol._sockets
        if found is None:
            found = await offload.importing(import_module, _SOCKETS)
            Protocol._sockets = found
        if not self.transport.is_closing():
            # uvicorn calls it as a class.
            make: Any = partial(found.SocketProtocol, closed=self.closed)
            self.ws_protocol_class = make
            super().handle_websocket_upgrade()
            self.flow.resume_reading()

    @override
    def send_400_response(self, msg: str) -> None:
        self._refuse(msg, 400)

    @override
    def _unsupported_upgrade_warning(self) -> None:
        """Read the body of a request that asks for another protocol, which is ignored.

        RFC 9110 7.8 allows that. Java's client and `curl --http2` ask for HTTP/2 in this way. A new
        parser reads the body, after a head that says how the body is framed.
        """
        upgrade = sys.exc_info()[1]
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        head = b"".join(
            b"%b: %b\r\n" % header for header in self.scope["headers"] if header[0] in _FRAMING
        )
        self.parser = httptools.HttpRequestParser(_Rest(self))
        # As uvicorn's own parser.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"POST / HTTP/1.1\r\n%b\r\n%b" % (head, self._data[upgrade.args[0] :]))

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

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
