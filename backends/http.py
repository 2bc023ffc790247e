"""The default upstream: HTTP/1.1 on an `asyncio.Protocol` and httptools, uvicorn's parser.

A general HTTP client costs more per request than the rest of the adapter
(`tests/benchmarks/proxy.py`). An engine needs little of it: one host, no redirects, no cookies, no
compression, bodies as bytes.

llama-server closes a connection after 100 responses or 5 idle seconds, so idle connections are
closed after 4 s. If a reused connection is lost before the first byte of the response, the request
is sent once more on a new connection. Only the headers given here are sent. No header of a client's
request reaches an engine (`X-Conversation-Id` would keep llama-server generating after a
disconnect).

The default implementation is in `http.py`.

A general HTTP client costs more per request than the rest of the adapter
(`tests/benchmarks/proxy.py`). An engine needs little of it: one host, no redirects, no cookies, no
compression, bodies as bytes.

llama-server closes a connection after 100 responses or 5 idle seconds, so idle connections are
closed after 4 s. If a reused connection is lost before the first byte of the response, the request
is sent once more on a new connection. Only the headers given here are sent. No header of a client's
request reaches an engine (`X-Conversation-Id` would keep llama-server generating after a
disconnect).
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, urlsplit

import httptools

from .errors import EngineError, EngineSilent, EngineUnavailable

if TYPE_CHECKING:
    from types import TracebackType


class Reply(Protocol):
    """A response whose headers have arrived."""

    status: int
    content_type: str

    def chunks(self) -> AsyncIterator[bytes]:
        """Return the body as it arrives; data that waits together is one chunk."""
        ...

    async def read(self) -> bytes:
        """Return the whole body."""
        ...


class Upstream(Protocol):
    """The HTTP server of an engine."""

    address: str

    def send(
        self, method: str, path: str, body: bytes | None = None
    ) -> AbstractAsyncContextManager[Reply]:
        """Send a request; leaving the context early closes the connection immediately.

        Raises:
            EngineUnavailable: the engine cannot be reached.
            EngineError: the engine was silent for too long, or the connection broke.
        """
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Encode headers as lines of an HTTP/1.1 head, in UTF-8.

    Raises:
        ValueError: a name is not a token, or a value has a control character or cannot be encoded.
            The message omits values, since they are often keys.
    """
    lines = []
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an HTTP header")
        if _CONTROL.search(value):
            raise ValueError(
                f"the value of the header {name} contains a line break or control character"
            )
        try:
            lines.append(f"{name}: {value}\r\n".encode())
        except UnicodeEncodeError:
            # The error itself contains the value, so it must not be the context of another one.
            pass
        else:
            continue
        raise ValueError(f"the value of the header {name} is not valid UTF-8")
    return b"".join(lines)


def shown_address(address: str) -> str:
    """Return an address for messages: without user, password, query and fragment."""
    scheme = re.match("[a-zA-Z][a-zA-Z0-9+.-]*://", address)
    start = scheme.group() if scheme else ""
    rest = address.removeprefix(start).rpartition("@")[2]
    return start + re.split("[?#]", rest, maxsplit=1)[0].rstrip("/")


# The largest number of bytes to read of an error's body, and of any other body: the largest
# vocabularies take 60 MB.
MOST_ERROR, MOST_BODY = 2**16, 2**28


async def whole(status: int, chunks: AsyncIterator[bytes]) -> bytes:
    """Read a whole body; for an error, only as much as a message needs.

    Raises:
        EngineError: the body is larger than `MOST_BODY`.
    """
    parts, size = [], 0
    async for chunk in chunks:
        parts.append(chunk)
        size += len(chunk)
        if status >= 400 and size > MOST_ERROR:
            break
        if size > MOST_BODY:
            raise EngineError(f"The engine's response is larger than {MOST_BODY} bytes.")
    return b"".join(parts)


class HttpxUpstream:
    """An upstream on the user's own httpx client.

    Use it for custom TLS or proxies, for an engine in the same process (`ASGITransport`), or for
    mocks.

    Args:
        client: an `httpx2.AsyncClient` or `httpx.AsyncClient`; the user closes it.
        address: `http://host:port`; by default the client's own `base_url`.
    """

    def __init__(self, client: Any, address: str | None = None) -> None:
        self._client = client
        self._base = (address if address is not None else str(client.base_url)).rstrip("/")
        self.address = shown_address(self._base)

    @asynccontextmanager
    async def send(self, method: str, path: str, body: bytes | None = None) -> AsyncIterator[Reply]:
        """See `Upstream.send`."""
        request = self._client.build_request(
            method, self._base + path, content=body, headers={"Content-Type": "application/json"}
        )
        try:
            response = await self._client.send(request, stream=True)
        except Exception as error:
            if not _is_transport_error(error):
                raise
            message = f"The engine at {self.address} cannot be reached: {error!r}"
            raise EngineUnavailable(message) from error
        try:
            yield _HttpxReply(response, self.address)
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Do nothing, since the user closes the client."""


class _HttpxReply:
    def __init__(self, response: Any, address: str) -> None:
        self._response = response
        self._address = address
        self.status: int = response.status_code
        self.content_type: str = response.headers.get("content-type", "")

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_bytes():
                yield chunk
        except Exception as error:
            if not _is_transport_error(error):
                raise
            message = f"The connection to the engine at {self._address} was lost: {error!r}."
            raise EngineError(message) from error

    async def read(self) -> bytes:
        return await whole(self.status, self.chunks())


def _is_transport_error(error: Exception) -> bool:
    # httpx and httpx2 have separate error trees; neither is a dependency.
    return isinstance(error, OSError) or any(
        base.__name__ == "TransportError" for base in type(error).__mro__
    )


# Bytes of a body to buffer for a slow reader; beyond this the socket is not read.
HIGH_WATER = 2**17
# Bytes of a response that the kernel buffers; its default reaches six megabytes.
RECEIVE_BUFFER = 2**16
# The largest response head, in bytes.
MOST_HEAD = 2**18
# Bytes of a request's body per write; copying 20 MB would block the event loop.
PIECE = 2**18

_NOTHING = memoryview(b"")


class Dropped(Exception):
    """The loss of a connection before the first byte of the response."""


class Pool(Protocol):
    """The owner of connections (`http.HttpUpstream`)."""

    address: str

    def watch(self, connection: Connection) -> None:
        """Watch an exchange that begins."""
        ...


class _Behind(Exception):
    """Data after a complete response; raised in a callback to stop httptools."""


class Connection(asyncio.Protocol):
    """A connection that parses consecutive responses and iterates over their bodies.

    Every coroutine between a token and its task costs time: `__anext__` is one, and waits itself.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._transport: Any = None
        self.closed = False
        self.idle_since = 0.0
        self.last = 0.0
        self._address = ""
        self._unsent = _NOTHING
        self._is_full = False
        self._is_waiting = False
        self._body: list[bytes] = []
        # The parser's callback for decoded body data: the path of every token.
        self.on_body = self._body.append
        self._parser: Any = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._body.clear()
        self._size = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._answered = False
        self._head_size = 0
        self._is_informational = False
        self.headers_complete = False
        self._until_close = True
        self.status = 0
        self.content_type = ""
        self.complete = False
        self.keep_alive = False

    @property
    def may_be_kept(self) -> bool:
        """True if the connection can be reused once its response is complete."""
        return self.keep_alive and not self._unsent and not self.closed

    def start(self, head: bytes, body: bytes, pool: Pool) -> None:
        """Send a request."""
        self._reset()
        if self.closed:
            raise Dropped
        self._address = pool.address
        self._is_waiting = True
        self.last = self.loop.time()
        pool.watch(self)
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
        """Close the connection immediately."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def drop(self) -> None:
        """Close the connection when its reader has finished.

        The traceback of a raised error refers to the connection. Clearing the error breaks that
        cycle; otherwise thousands of connections, some KB each, wait for the garbage collector.
        """
        self.close()
        self._error = None

    async def wait(self) -> None:
        """Wait until data arrives or the connection ends; raise an error that is already set."""
        if self._error is not None:
            raise self._error
        self._waiter = self.loop.create_future()
        await self._waiter

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
        if not self.headers_complete:
            self._head_size += len(data)
            if self._head_size > MOST_HEAD:
                self._fail(
                    EngineError(f"The engine at {self._address} sent headers that are too large.")
                )
                self.close()
                return
        else:
            # The size includes the framing; pausing needs body data that the reader can take.
            self._size += len(data)
            if self._size > HIGH_WATER and self._body and not self._paused:
                self._paused = True
                self._transport.pause_reading()
        self._wake()

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
        if self.headers_complete and self._until_close and error is None:
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

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a header of the response."""
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        """Read the status; an informational head (1xx) is not that of the response."""
        self.status = self._parser.get_status_code()
        self._is_informational = self.status < 200
        self.headers_complete = not self._is_informational

    def on_message_complete(self) -> None:
        """Mark the response as complete, unless it was informational."""
        if self._is_informational:
            self._is_informational = False
            self._until_close = True
            return
        self.complete = True
        self._is_waiting = False
        self.keep_alive = self._parser.should_keep_alive()


IDLE_SECONDS = 4.0
CONNECT_SECONDS = 5.0
# Seconds of silence before a probe of the engine, and the time limit of a probe.
PROBE_AFTER, PROBE_SECONDS = 2.0, 2.0
# The largest number of idle connections.
MOST_IDLE = 64
# Seconds for which a verified engine need not be verified again.
TRUST_SECONDS = 1.0


class HttpUpstream:
    """A pool of connections to one engine.

    Args:
        address: `http://host:port` or `https://…`, with a path if the engine has a prefix.
        headers: sent with every request (an engine's own API key, for example), in UTF-8.
        silence: seconds without a byte after which a response that has begun counts as lost.
        patience: seconds without a first byte after which a response counts as lost; a long prompt
            takes time.
        probe: a path that an engine answers while it generates. It is requested when a response
            falls silent. If the engine no longer accepts connections, the response counts as lost.

    Attributes:
        on_connect: awaited for a new connection, before a request is sent on it; its errors are
            raised to the request.
    """

    on_connect: Callable[[], Awaitable[None]] | None = None

    def __init__(
        self,
        address: str,
        headers: Mapping[str, str] | None = None,
        silence: float = 600.0,
        patience: float = 600.0,
        probe: str | None = None,
    ) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = shown_address(address)
            raise ValueError(f"{shown!r} is not a valid address such as http://127.0.0.1:8080")
        self.address = shown_address(address)
        self.silence = silence
        self.patience = patience
        self._probe = probe
        self._probes: dict[Connection, asyncio.Task[None]] = {}
        self._interval = min(silence / 4, patience / 4, PROBE_AFTER / 4)
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        lines = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._lines = header_lines(lines)
        self._heads: dict[tuple[str, str], bytes] = {}
        self.stale: EngineUnavailable | None = None
        self.epoch = 0
        self._witness: Connection | None = None
        self._trusted = -1e9
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def send(self, method: str, path: str, body: bytes | None = None) -> HttpReply:
        """See `Upstream.send`."""
        return HttpReply(self, self._head(method, path, body), body or b"")

    def ask(self, path: str, witness: bool = False) -> HttpReply:
        """Send a request that does not depend on the engine's model, on a separate connection.

        Args:
            witness: True if the response verifies the engine; its connection is then kept.
        """
        return HttpReply(self, self._head("GET", path, None), b"", True, witness)

    @property
    def is_sure(self) -> bool:
        """True if the engine was verified a moment ago, on a connection that is still open.

        The open connection shows that the process is running. The time limit is needed because a
        process that shuts down may keep its connections while another one listens. Other
        connections prove nothing: llama-server closes those of streamed responses.
        """
        witness = self._witness
        if witness is None or witness.closed:
            return False
        return time.monotonic() - self._trusted < TRUST_SECONDS

    def trust(self) -> None:
        """Mark the engine as verified now."""
        self._trusted = time.monotonic()

    def doubt(self) -> None:
        """Mark the engine as not verified."""
        self._trusted = -1e9

    def take_witness(self) -> Connection | None:
        """Return the connection that verified the engine, if it is alive, or None."""
        witness, self._witness = self._witness, None
        if witness is None or (not witness.closed and witness.idle_since >= _oldest()):
            return witness
        witness.close()
        return None

    def give_witness(self, connection: Connection) -> None:
        """Store the connection that verified the engine."""
        connection.idle_since = time.monotonic()
        if self._witness is not None:
            self._witness.close()
        self._witness = connection

    def refuse(self, error: EngineUnavailable) -> None:
        """Fail the requests that were created before this call and are not sent yet."""
        self.stale = error
        self.epoch += 1
        self.doubt()
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def aclose(self) -> None:
        """Close the idle connections; a later request opens new ones."""
        if self._sweep is not None and not self._busy:
            # With busy connections the timer stays, since it ends silent exchanges.
            self._sweep.cancel()
            self._sweep = None
        idle, self._idle = self._idle, []
        if self._witness is not None:
            idle.append(self._witness)
            self._witness = None
        for connection in idle:
            connection.close()
        # Lets the transports finish closing before the event loop is closed.
        await asyncio.sleep(0)

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        head = self._heads.get((method, path))
        if head is None:
            line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode()
            head = self._heads[method, path] = line + self._lines
        if body is None:
            return head + b"\r\n"
        return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    def take(self) -> Connection | None:
        """Return the most recently used idle connection that is alive, or None."""
        oldest = _oldest()
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.closed:
                return connection
            connection.close()
        return None

    def give(self, connection: Connection) -> None:
        """Return a connection to the pool after its response was read to the end."""
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > MOST_IDLE:
            self._idle.pop(0).close()

    def watch(self, connection: Connection) -> None:
        """Watch an exchange; one timer watches all of them, and runs while there are any."""
        self._busy.add(connection)
        if self._sweep is None:
            self._sweep = connection.loop.call_later(self._interval, self._look, connection.loop)

    def unwatch(self, connection: Connection) -> None:
        """Stop watching an exchange that has ended."""
        self._busy.discard(connection)
        probe = self._probes.pop(connection, None)
        if probe is not None:
            probe.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self._busy):
            quiet = now - connection.last
            limit = self.silence if connection.has_begun else self.patience
            if connection.is_paused:
                # The reader is slow, not the engine.
                continue
            if quiet > limit:
                connection.lose(f"sent nothing for {limit:g} s")
            elif quiet > PROBE_AFTER and self._probe and connection not in self._probes:
                self._probes[connection] = loop.create_task(self._ask_whether_alive(connection))
        self._sweep = loop.call_later(self._interval, self._look, loop) if self._busy else None

    async def _ask_whether_alive(self, connection: Connection) -> None:
        """Fail a silent exchange once its engine no longer accepts connections.

        A llama-server that shuts down stops listening but keeps its silent connections open.
        """
        while True:
            if not await self._is_alive():
                break
            await asyncio.sleep(PROBE_AFTER)
        connection.lose("no longer accepts connections, and its response has stopped")

    async def _is_alive(self) -> bool:
        for _ in range(2):
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    reader, writer = await asyncio.open_connection(
                        self._host, self._port, ssl=self._ssl
                    )
                    writer.write(self._head("GET", self._probe or "/", None))
                    try:
                        # An engine that is loading its model has restarted.
                        line = await reader.read(64)
                        if line and line.split(maxsplit=2)[1:2] != [b"503"]:
                            return True
                    finally:
                        writer.close()
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(PROBE_SECONDS / 4)
        return False

    async def connect(self) -> Connection:
        """Open a connection.

        Raises:
            EngineUnavailable: the engine does not accept the connection.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no response within {CONNECT_SECONDS} s"
            raise EngineUnavailable(
                f"The engine at {self.address} cannot be reached: {reason}. Is it running?"
            ) from error
        return connection


class HttpReply:
    """One request and its response; also the `Reply`."""

    __slots__ = (
        "_asks", "_body", "_connection", "_epoch", "_head", "_upstream", "_witness", "content_type",
        "status",
    )  # fmt: skip

    def __init__(
        self,
        upstream: HttpUpstream,
        head: bytes,
        body: bytes,
        asks: bool = False,
        witness: bool = False,
    ) -> None:
        self._upstream = upstream
        self._asks = asks
        self._witness = witness
        self._epoch = upstream.epoch
        self._head = head
        self._body = body

    async def __aenter__(self) -> HttpReply:
        upstream = self._upstream
        connection = self._kept() if self._asks else upstream.take()
        fresh = connection is None
        while True:
            if connection is None:
                connection = await self._fresh()
            if self._epoch != upstream.epoch and not self._asks and upstream.stale is not None:
                # The request was made for the model that the engine served before.
                upstream.give(connection)
                raise upstream.stale
            try:
                connection.start(self._head, self._body, upstream)
                while not connection.headers_complete:
                    await connection.wait()
            except BaseException as error:
                upstream.unwatch(connection)
                connection.drop()
                if not isinstance(error, Dropped):
                    raise
                if fresh:
                    raise EngineError(
                        f"The engine at {upstream.address} closed the connection without a "
                        "response."
                    ) from error
                connection, fresh = None, True
                continue
            self._connection = connection
            self.status = connection.status
            self.content_type = connection.content_type
            return self

    def _kept(self) -> Connection | None:
        """Return the connection that verified the engine, if it is open and wanted."""
        return self._upstream.take_witness() if self._witness else None

    async def _fresh(self) -> Connection:
        """Open a connection and verify the engine at its other end."""
        connection = await self._upstream.connect()
        if not self._asks and self._upstream.on_connect is not None:
            try:
                await self._upstream.on_connect()
            except BaseException:
                connection.close()
                raise
        return connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        connection = self._connection
        self._upstream.unwatch(connection)
        may_be_kept = connection.complete and connection.may_be_kept
        if may_be_kept and not self._asks:
            self._upstream.give(connection)
        elif may_be_kept and self._witness:
            self._upstream.give_witness(connection)
        else:
            connection.drop()

    def chunks(self) -> Connection:
        """See `Reply.chunks`."""
        return self._connection

    async def read(self) -> bytes:
        """See `Reply.read`."""
        return await whole(self.status, self._connection)


def _oldest() -> float:
    """Return the earliest `idle_since` of a connection that can be reused."""
    return time.monotonic() - IDLE_SECONDS
