"""uvicorn's HTTP/1.1 protocol, with limited heads, and at most two requests at a time.

A client can send its next request before it has the response to the first. This request is the last
one of its connection: RFC 9112 lets a server close a connection with requests that it has not read.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any
from urllib.parse import unquote

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
from ...backends.errors import shortened
from ...schemas import limits
from ..errors import InvalidRequest, LateRequest, render
from ..request import PUSH, WHOLE
from . import timeouts
from .timeouts import ReadProtocol

MOST_HEAD = limits.HEAD.maximum
_SOCKETS = "latimer.adapter.cli.sockets"
# The version of a WebSocket's handshake, and the length of its key: 16 bytes in base64.
_VERSION, _KEY = b"13", 24
# The headers that determine the length of a body.
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
# The headers that are noted as they arrive.
_NOTED = frozenset({b"expect", b"host", b"transfer-encoding"})
_INVALID = "Invalid HTTP request received."
_CHUNKS = (
    "The body of the request has a chunk or a trailer that is invalid. Send the length of each "
    "chunk in hexadecimal, or send a content-length."
)
_LARGE = (
    "The request line, headers and trailers are too large. This server accepts at most "
    f"{MOST_HEAD} bytes."
)
# The options of an extension that has none.
_PLAIN: dict[object, object] = {}


class _Unserved(Exception):
    """The error for a head that is not served, which ends the parser's work."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.error = InvalidRequest(message, status=status)


class _Cycle(RequestResponseCycle):
    """A request, and a response that sends its head together with the body that follows.

    uvicorn writes them separately, and each write is a system call. It also matches every header
    against two regular expressions, which take as long as Latimer takes to read a request. A head
    with a content length waits for the body. Any other head waits until the next iteration of the
    event loop at most. A whole response can be one message (`WHOLE`), and a part of a body can be
    sent without one (`PUSH`).
    """

    # As uvicorn sets them for each request; most leave these values as they are.
    logger = logging.getLogger("uvicorn.error")
    access_log = False
    disconnected = waiting_for_100_continue = response_started = response_complete = False
    more_body = True
    chunked_encoding: bool | None = None
    expected_content_length = 0
    # The reason for which the rest of the body is not read: it is late, or invalid.
    fault: InvalidRequest | None = None
    _head = b""

    def __init__(self, protocol: Protocol, keep_alive: bool) -> None:
        self.scope, self.transport, self.flow = protocol.scope, protocol.transport, protocol.flow
        self.default_headers = protocol.server_state.default_headers
        self.on_response = protocol.on_response_complete
        self.message_event = asyncio.Event()
        self.keep_alive = keep_alive
        self.body = bytearray()

    @override
    async def receive(self) -> Any:
        """Return the next message of the client.

        Raises:
            InvalidRequest: the rest of the body has not arrived in time, or is invalid.
        """
        if self.more_body or not self.body or self.disconnected or self.response_complete:
            message = await super().receive()
            if self.fault is not None and self.more_body and not self.disconnected:
                self.keep_alive = False
                raise self.fault
            return message
        # Most bodies have arrived as a whole before the app asks for them.
        if self.flow.read_paused:
            self.flow.resume_reading()
        self.message_event.clear()
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": False}

    @override
    async def send(self, message: Any) -> None:
        """Send a message; header names must be in lower case."""
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if message["type"] == WHOLE and not self.response_started:
            head = self._begin(message["status"], message["headers"])
            self.transport.write(b"%b\r\n\r\n%b" % (head, message["body"]))
            self._end()
        elif self.scope["method"] == "HEAD":
            # uvicorn handles responses without a body.
            await super().send(message)
        elif not self.response_started:
            self._start(message["status"], message["headers"])
            message[PUSH] = self.push
        elif self.response_complete:
            raise RuntimeError("the response continues after its end")
        else:
            self._write(message.get("body", b""), message.get("more_body", False))

    def push(self, body: bytes) -> bool:
        """Send a part of the body at once (`PUSH`); a client that has left gets none.

        Returns:
            False if the client reads too slowly, or has left; `send` must send the next part.
        """
        if not self.disconnected:
            self._write(body, True)
        return not (self.flow.write_paused or self.disconnected)

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Begin the response, and return its head without the line end after it."""
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
        return head

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        head = self._begin(status, headers)
        is_open = b"\r\ncontent-length: " not in head and status not in (204, 304)
        # HTTP/1.0 has no chunks: the end of such a body is that of the connection.
        self.chunked_encoding = is_open and self.scope["http_version"] != "1.0"
        if self.chunked_encoding:
            head += b"\r\ntransfer-encoding: chunked"
        if is_open:
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
            self._end()

    def _end(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            if self.more_body and not isinstance(self.fault, LateRequest):
                _Discarding(self.transport.get_protocol())
            else:
                self.transport.close()
        self.on_response()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)


class _Discarding(asyncio.Protocol):
    """The rest of a connection whose request was answered before its end, as a body too large is.

    What arrives is discarded. To close at once would reset the connection, and a client that still
    sends might not get the response (RFC 9112, 9.6). The timer of an idle connection closes this
    one, too.

    Args:
        protocol: that of the connection until now.
    """

    def __init__(self, protocol: Any) -> None:
        self._protocol: Protocol = protocol
        self._until = protocol.loop.time() + timeouts.REQUEST
        protocol.transport.set_protocol(self)
        if protocol.transport.can_write_eof():
            protocol.transport.write_eof()

    @override
    def data_received(self, data: bytes) -> None:
        self._protocol.idle_until(self._until)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)


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


class Protocol(ReadProtocol, HttpToolsProtocol):
    """One connection of a client."""

    cycle: _Cycle
    # The module of WebSockets, when it is imported.
    _sockets: ModuleType | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._running: RequestResponseCycle | None = None
        # Bytes received since the last complete head or part of a body.
        self._unread = 0
        # Bytes that have arrived together last.
        self._piece = 0
        self._opens_socket = False
        # The number of hosts in a head, and its transfer encodings, each after a comma.
        self._hosts, self._codings = 0, b""
        # The time at which the rest of a head must be there, as the server ends; then the next
        # request is the last one. Infinite before.
        self._end = math.inf
        # The time at which the connection closes if nothing arrives; infinite during a request.
        self._idle_until = math.inf
        # The time since which the rest of a head or a body is missing; infinite if nothing is.
        self._late_since = math.inf
        # The error of a request behind one that runs, which is answered first.
        self._refused: InvalidRequest | None = None

    def closed(self) -> None:
        """Note that the connection has closed."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_until = self.loop.time() + timeouts.REQUEST
        self._begin_timer(self.timeout_keep_alive)

    @override
    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        self._piece = len(data)
        self._unread += self._piece
        # The timer runs on; to look at its end costs less than to set it for each request.
        self._idle_until = math.inf
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _Unserved):
                self.logger.warning(error.__context__)
                self._refuse(error.__context__.error)
            else:
                self._refuse_invalid()
            return
        except httptools.HttpParserUpgrade as upgrade:
            if self._opens_socket:
                self.handle_websocket_upgrade()
                return
            self._ignore_upgrade(data[upgrade.args[0] :])
            return
        # These bytes are a head, trailers, or the header of a chunk.
        if self._unread > MOST_HEAD and not self.transport.is_closing():
            self._refuse(InvalidRequest(_LARGE, status=431))
            return
        cycle = self.cycle
        if self._unread or cycle is None or cycle.more_body or cycle.response_complete:
            self._await_rest()
        else:
            self._late_since = math.inf

    def _await_rest(self) -> None:
        """Note that the client has not sent all of a request, which usually arrives at once."""
        cycle = self.cycle
        lacks_body = cycle is not None and cycle.more_body
        if not self._unread and not lacks_body:
            # The end of a request that has its response already.
            self._late_since = math.inf
            self._idle_until = self.loop.time() + self.timeout_keep_alive
        elif lacks_body or self._late_since == math.inf:
            self._late_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._begin_timer(self.timeout_keep_alive)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Notify the running request; uvicorn notifies the newest one only."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        self._end_timer()
        self.end_reading()
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
        if not self.parser.should_upgrade():
            self.cycle.more_body = False
            self.cycle.message_event.set()

    @override
    def on_response_complete(self) -> None:
        """Begin the next request, or the time for which the connection may be idle."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            self._close()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        if self._refused is not None:
            self._refuse(self._refused)
            return
        now = self.loop.time()
        if self._late_since < math.inf:
            # The client may have begun the next request while it waited for this response.
            self._late_since = now if self._unread or self.cycle.more_body else math.inf
        self._idle_until = now + self.timeout_keep_alive
        if self.timeout_keep_alive_task is None:
            self._begin_timer(self.timeout_keep_alive)

    @override
    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle, or whose request is late; the one timer of both."""
        self.timeout_keep_alive_task = None
        if self._idle_until < math.inf:
            left = self._idle_until - self.loop.time()
            if left > 0:
                self._begin_timer(min(left, self.timeout_keep_alive))
                return
            self._close()
        elif self._late_since < math.inf:
            self._look_for_rest()

    def _look_for_rest(self) -> None:
        """End a request whose rest has not arrived in time; look again later otherwise."""
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if is_open and not cycle.more_body:
            # The head of the next request may wait; the end of the response begins the timer.
            return
        if is_open and (
            self.flow.read_paused or cycle.waiting_for_100_continue or cycle is not self._running
        ):
            # The client waits for the server.
            self._late_since = self.loop.time()
        end = self._late_since + timeouts.REQUEST
        left = (end if is_open else min(end, self._end)) - self.loop.time()
        if left > 0:
            self._begin_timer(min(left, self.timeout_keep_alive))
        elif not is_open:
            self._refuse(LateRequest())
        elif cycle.fault is not None or cycle.response_started:
            self._close()
        else:
            # The app sends the error, unless it does not read.
            cycle.fault = LateRequest()
            cycle.message_event.set()
            self._begin_timer(self.timeout_keep_alive)

    def idle_until(self, most: float) -> None:
        """Begin the time for which the connection may be idle again, which ends at `most`."""
        self._idle_until = min(self.loop.time() + self.timeout_keep_alive, most)

    @override
    def shutdown(self) -> None:
        """Close after the request that runs, or else after one that arrives within moments.

        uvicorn closes an idle connection at once. A request that the kernel had received already
        would be lost, and its client would see a reset connection.
        """
        now, cycle = self.loop.time(), self.cycle
        self._end = now + timeouts.LAST_HEAD
        self.timeout_keep_alive = timeouts.LAST  # type: ignore[assignment]
        if cycle is not None and not cycle.response_complete:
            # The head of a response that has begun lets the client send another request.
            cycle.keep_alive &= cycle.response_started
        elif self._late_since == math.inf:
            self._idle_until = now + timeouts.LAST
        self._end_timer()
        self._begin_timer(timeouts.LAST)

    def _begin_timer(self, seconds: float) -> None:
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(min(seconds, timeouts.LOOK), handler)

    def _end_timer(self) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    @override
    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._hosts, self._codings = 0, b""

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _NOTED:
            if name == b"host":
                self._hosts += 1
            elif name == b"transfer-encoding":
                # The parser leaves the spaces after a value; it does not take a tab for one here.
                self._codings += b", " + value.strip(b" ")
            elif value.strip(b" \t").lower() == b"100-continue":
                self.expect_100_continue = True
        self.headers.append((name, value))

    @override
    def on_headers_complete(self) -> None:
        """Begin a request, unless an earlier one runs.

        Raises:
            _Unserved: the head is too large, or HTTP does not allow it.
        """
        # To measure a head takes a call for each header, which most requests are too small for.
        large = self._unread > MOST_HEAD or self._piece > MOST_HEAD
        if large and self._head_size() > MOST_HEAD:
            raise _Unserved(_LARGE, 431)
        self._unread = 0
        parser, headers = self.parser, self.headers
        version = parser.get_http_version()
        if self._hosts != 1 or version != "1.1" or self._codings:
            self._check_head(version)
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": self.scheme,
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": headers,
            "client": self.client,
            "server": self.server,
            "state": self.app_state.copy(),
            "extensions": {WHOLE: _PLAIN, PUSH: _PLAIN},
        }
        self._opens_socket = parser.should_upgrade() and self._is_handshake()
        if self._opens_socket:
            return
        # The parser adds trailers to this list, but they are not headers of the request.
        self.headers = []
        earlier = self.cycle
        cycle = self.cycle = _Cycle(
            self, version != "1.0" and parser.should_keep_alive() and self._end == math.inf
        )
        if self.expect_100_continue:
            cycle.waiting_for_100_continue = True
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(cycle, self.app)
            return
        cycle.keep_alive = False
        if not self.pipeline:
            # Otherwise, the connection closes before its turn.
            self.pipeline.append((cycle, self.app))
        # A disconnect is only noticed while the connection is read.
        self.flow.resume_reading()

    def _check_head(self, version: str) -> None:
        """Check a head that is not like most (RFC 9112).

        Raises:
            _Unserved: the version, the hosts or the transfer encodings are not allowed.
        """
        if version not in ("1.1", "1.0"):
            raise _Unserved(f"HTTP/{version} is not supported. Use HTTP/1.1.", 505)
        if self._hosts > 1 or not (self._hosts or version == "1.0"):
            raise _Unserved(
                f"The request has {self._hosts or 'no'} 'Host' headers. Send exactly one, with the "
                "host of the URL.",
                400,
            )
        codings = self._codings.removeprefix(b", ")
        if codings.lower() not in (b"", b"chunked"):
            shown = shortened(codings.decode("latin-1"))
            raise _Unserved(
                f"The transfer encoding '{shown}' is not supported. Send 'chunked' alone, or a "
                "content-length.",
                501 if codings.lower().endswith(b"chunked") else 400,
            )

    def _head_size(self) -> int:
        """Return the bytes of the request line and the headers, without optional spaces."""
        lines = sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)
        return len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n\r\n") + lines

    def _is_handshake(self) -> bool:
        """Return True if the request opens a WebSocket, and no other one is unanswered.

        It asks for another protocol.
        """
        if self._get_upgrade() != b"websocket":
            return False
        found = dict(self.headers)
        return (
            self.parser.get_method() == b"GET"
            and found.get(b"sec-websocket-version") == _VERSION
            and len(found.get(b"sec-websocket-key", b"")) == _KEY
            and (self.cycle is None or self.cycle.response_complete)
        )

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
        # The end of the server may have begun one meanwhile.
        self._end_timer()
        if not self.transport.is_closing():
            # uvicorn calls it as a class.
            make: Any = partial(found.SocketProtocol, closed=self.closed)
            self.ws_protocol_class = make
            super().handle_websocket_upgrade()
            self.flow.resume_reading()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the body of a request that asks for another protocol, which is ignored.

        RFC 9110 7.8 allows that. Java's client and `curl --http2` ask for HTTP/2 in this way. A new
        parser reads the body, after a head that says how the body is framed.
        """
        head = b"".join(
            b"%b: %b\r\n" % header for header in self.scope["headers"] if header[0] in _FRAMING
        )
        self.parser = httptools.HttpRequestParser(_Rest(self))
        # As uvicorn's own parser.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"POST / HTTP/1.1\r\n%b\r\n%b" % (head, rest))

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def _refuse_invalid(self) -> None:
        """Refuse bytes that are not HTTP; the app sends the error of a body, and others arrive."""
        cycle = self.cycle
        if cycle is None or not cycle.more_body or cycle.response_started:
            self.logger.warning(_INVALID)
            self._refuse(InvalidRequest(_INVALID))
            return
        self._unread = 0
        if cycle.fault is None:
            cycle.fault, cycle.keep_alive = InvalidRequest(_CHUNKS), False
            cycle.message_event.set()
        self._await_rest()

    def _refuse(self, error: InvalidRequest) -> None:
        """Send an error object, after the responses to earlier requests, and discard the rest.

        Only close if the rest of a body is missing, whose response is incomplete.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            if self.cycle.more_body:
                self._close()
            else:
                self._refused = error
            return
        status, reply, _ = render(error)
        body = orjson.dumps(reply)
        head = [
            STATUS_LINE[status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join(head) + body)
        if isinstance(error, LateRequest):
            self._close()
            return
        # The client may still send a body.
        self._late_since = math.inf
        _Discarding(self)
        self.idle_until(math.inf)
        if self.timeout_keep_alive_task is None:
            self._begin_timer(self.timeout_keep_alive)

    def _close(self) -> None:
        """Close the connection when the client has read what was written."""
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self.await_reading()
