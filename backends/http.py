"""The HTTP client of engines, with a pool of connections (`connection.Connection`).

A general HTTP client costs more per request than the rest of the adapter
(`tests/benchmarks/proxy.py`). An engine needs little of it: one host, no redirects, no cookies, no
compression, bodies as bytes. `ConnectionPool` has httpcore's interface, so a client of httpcore2 or
httpx2 can take its place.

llama-server closes a connection after 100 responses or 5 idle seconds, so idle connections are
closed after 4 s. If a reused connection is lost before the first byte of the response, the request
is sent once more on a new connection. Only the headers given here are sent, and those in
`FORWARDED`, which trace a request. No other header of a client's request reaches an engine
(`X-Conversation-Id` would keep llama-server generating after a disconnect).
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import suppress
from contextvars import ContextVar
from copy import copy
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import SplitResult, quote, urlsplit

from typing_extensions import override

from .connection import Connection, Dropped
from .errors import EngineError, EngineUnavailable

if TYPE_CHECKING:
    import httpcore2
    import httpx2

    # Everything that can send the requests to an engine.
    Client: TypeAlias = (
        "ConnectionPool | httpcore2.AsyncConnectionPool | httpcore2.AsyncConnectionInterface"
        " | httpx2.AsyncBaseTransport | httpx2.AsyncClient"
    )

IDLE_SECONDS = 4.0
CONNECT_SECONDS = 5.0
# Seconds of silence before a probe of the engine, and the time limit of a probe.
PROBE_AFTER, PROBE_SECONDS = 2.0, 2.0
# The largest number of idle connections.
MOST_IDLE = 64

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


def reason_of(error: OSError) -> str:
    """Return why a connection failed, without the number of the system's error."""
    if isinstance(error, ConnectionError) and error.errno:
        # asyncio's own text has the address, which messages have already.
        return os.strerror(error.errno)
    return (error.strerror if isinstance(error, socket.gaierror) else None) or str(error)


# The largest number of bytes to read of an error's body, and of any other body: the largest
# vocabularies take 60 MB.
MOST_ERROR, MOST_BODY = 2**16, 2**28


async def read_whole(status: int, chunks: AsyncIterable[bytes]) -> bytes:
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


# The head and the body of a request.
Request: TypeAlias = tuple[bytes, bytes]


class Response:
    """A response whose head has arrived; the attributes are those of `httpcore2.Response`.

    Args:
        lines: the headers as they came.

    Attributes:
        stream: the body as it arrives; data that waits together is one chunk.
    """

    __slots__ = ("_lines", "_pool", "status", "stream")

    stream: AsyncIterator[bytes]

    def __init__(
        self,
        status: int,
        lines: Iterable[tuple[bytes, bytes]],
        stream: AsyncIterator[bytes],
        pool: ConnectionPool | None = None,
    ) -> None:
        self.status = status
        self._lines = lines
        self.stream = stream
        self._pool = pool

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Names in lower case, and values; of a repeated header, the last value."""
        return [(name.lower(), value) for name, value in self._lines]

    @property
    def content_type(self) -> str:
        """The value of the header `Content-Type`, or an empty string."""
        found = [value for name, value in self.headers if name == b"content-type"]
        return found[-1].decode("latin-1") if found else ""

    async def aread(self) -> bytes:
        """Return the whole body; of an error's only the beginning."""
        return await read_whole(self.status, self.stream)

    async def aclose(self) -> None:
        """End the exchange; before the end of the body this closes the connection."""
        pool, self._pool = self._pool, None
        if pool is not None:
            assert isinstance(self.stream, Connection)
            pool.release(self.stream)

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


class ConnectionPool:
    """A pool of connections to one engine, with the interface of `httpcore2.AsyncRequestInterface`.

    A connection belongs to an event loop. The pool belongs to the first one that uses it, and has a
    pool of its own for each other one. After the end of its event loop it belongs to the next.

    Args:
        url: `http://host:port` or `https://…`; a path is ignored.
        silence: seconds without a byte after which a response that has begun counts as lost.
        patience: seconds without a first byte after which a response counts as lost; a long prompt
            takes time.
        probe: a path that an engine answers while it generates. It is requested when a response
            falls silent. If the engine answers no new connections, the response counts as lost.
        most_idle: the largest number of idle connections.

    Attributes:
        most_idle: the same.
        on_connect: awaited for a new connection, before a request is sent on it; its errors are
            raised to the request.
    """

    on_connect: Callable[[], Awaitable[None]] | None = None

    def __init__(
        self,
        url: str,
        silence: float = 600.0,
        patience: float = 600.0,
        probe: str | None = None,
        most_idle: int = MOST_IDLE,
    ) -> None:
        parts = _parts_of(url)
        self._url, self.address = url, shown_address(url)
        self._silence = silence
        self._patience = patience
        self._probe = probe
        self._probes: dict[Connection, asyncio.Task[None]] = {}
        self._interval = min(silence / 4, patience / 4, PROBE_AFTER / 4)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._host_header = _host_of(parts)
        self.most_idle = most_idle
        self._failure: EngineUnavailable | None = None
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._last_byte = 0.0
        # Closes the connections at the end of the event loop.
        self._end: AsyncIterator[None] | None = None
        self._others: dict[asyncio.AbstractEventLoop, ConnectionPool] = {}
        # The end of a task can be that of a request to the same engine.
        self._lock = threading.RLock()

    @property
    def last_byte(self) -> float:
        """The time of the last byte of a response, by the event loop; 0 if there was none."""
        return max([self._last_byte, *(one.last for one in self._busy if one.headers_complete)])

    def separate(self, most_idle: int) -> ConnectionPool:
        """Return a pool with the same settings and connections of its own."""
        return ConnectionPool(self._url, self._silence, self._patience, self._probe, most_idle)

    def _of(self, loop: asyncio.AbstractEventLoop) -> ConnectionPool:
        """Return the pool of an event loop, which may be this one."""
        self.forget_closed()
        with self._lock:
            if self._loop is None:
                self._loop = loop
            if self._loop is loop:
                return self
            own = self._others.get(loop)
            if own is None:
                own = self._others[loop] = self.separate(self.most_idle)
                own._loop, own.on_connect = loop, self.on_connect
            own.most_idle = self.most_idle
            return own

    def forget_closed(self) -> None:
        """Drop the connections of event loops that are closed, and end the tasks of these loops.

        Such an event loop neither runs nor cancels its tasks, and some have places at the engine.
        """
        with self._lock:
            for loop in [one for one in self._others if one.is_closed()]:
                self._others.pop(loop)._abandon(loop)
            if self._loop is not None and self._loop.is_closed():
                self._abandon(self._loop)
                self._loop = None

    def _abandon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop the connections of an event loop that is closed, and end its tasks."""
        for task in asyncio.all_tasks(loop) if self._busy else ():
            # What the garbage collector does with a task that nothing refers to. An error of a
            # user's task is not one of the request that comes here.
            with suppress(Exception, asyncio.CancelledError):
                task.get_coro().close()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        self._busy.clear()
        self._probes.clear()
        self._sweep = self._end = None

    async def _close_at_end(self) -> AsyncGenerator[None, None]:
        """Close the idle connections when the event loop ends its generators, before its end."""
        try:
            yield
        finally:
            self._close_idle()
            # Lets the transports finish closing.
            await asyncio.sleep(0)

    async def handle_async_request(self, request: Request | httpcore2.Request) -> Response:
        """Send a request, and return its response when the head has arrived.

        Raises:
            EngineUnavailable: the engine cannot be reached.
            EngineError: the engine was silent for too long, or the connection broke.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            own = self._of(loop)
            if own is not self:
                return await own.handle_async_request(request)
        if not isinstance(request, tuple):
            request = await _encoded(request)
        failure = self._failure
        connection = self._take()
        is_fresh = connection is None
        while True:
            if connection is None:
                connection = await self._connect()
                if self._failure is not failure and self._failure is not None:
                    # The request was waiting for the connection when `fail_pending` was called.
                    self._keep(connection)
                    # The request runs once more after a `ModelChanged`.
                    raise type(self._failure)(self._failure.message)
            try:
                self._busy.add(connection)
                if self._sweep is None:
                    self._sweep = loop.call_later(self._interval, self._look, loop)
                connection.start(*request)
                while not connection.headers_complete:
                    await connection.wait()
            except BaseException as error:
                self._busy.discard(connection)
                self._end_probe(connection)
                connection.drop()
                if not isinstance(error, Dropped):
                    raise
                if is_fresh:
                    raise EngineError(
                        f"The engine at {self.address} closed the connection without a response."
                    ) from error
                connection, is_fresh = None, True
                continue
            return Response(connection.status, connection.head.items(), connection, self)

    def fail_pending(self, error: EngineUnavailable) -> None:
        """Fail the requests that are waiting for a connection, and close the idle connections."""
        self._failure = error
        self._in_loop(self._close_idle)
        for other in [*self._others.values()]:
            other.fail_pending(error)

    def _in_loop(self, call: Callable[[], None]) -> None:
        """Call a function in the event loop of the pool; drop the connections of a closed one."""
        loop = self._loop
        if loop is None or loop is asyncio.get_running_loop():
            call()
        elif loop.is_closed():
            self._abandon(loop)
        else:
            with suppress(RuntimeError):
                # It may be closed meanwhile.
                loop.call_soon_threadsafe(call)

    async def aclose(self) -> None:
        """Close the idle connections; a later request opens new ones."""
        self._in_loop(self._stop)
        for other in [*self._others.values()]:
            other._in_loop(other._stop)
        # Lets the transports finish closing before the event loop is closed.
        await asyncio.sleep(0)

    def _stop(self) -> None:
        """Close the idle connections, and end the timer."""
        if self._sweep is not None and not self._busy:
            # With busy connections the timer stays, since it ends silent exchanges.
            self._sweep.cancel()
            self._sweep = None
        self._close_idle()

    def release(self, connection: Connection) -> None:
        """Take back a connection; it is closed unless its response was read to the end."""
        self._busy.discard(connection)
        if connection.headers_complete:
            self._last_byte = connection.last
        if self._probes:
            self._end_probe(connection)
        if connection.may_be_kept and not connection.closed:
            self._keep(connection)
        else:
            connection.drop()

    def _take(self) -> Connection | None:
        """Return the most recently used idle connection that is alive, or None."""
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.closed:
                return connection
            connection.close()
        return None

    def _keep(self, connection: Connection) -> None:
        """Add an idle connection to the pool."""
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > self.most_idle:
            self._idle.pop(0).close()

    def _close_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _end_probe(self, connection: Connection) -> None:
        """End the probe of an exchange that has ended, if there is one."""
        probe = self._probes.pop(connection, None)
        if probe is not None:
            probe.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that were idle for too long; fail or probe silent exchanges."""
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.pop(0).close()
        now = loop.time()
        for connection in list(self._busy):
            quiet = now - connection.last
            limit = self._silence if connection.has_begun else self._patience
            if connection.is_paused:
                # The reader is slow, not the engine.
                continue
            if quiet > limit:
                connection.lose(f"sent nothing for {limit:g} s")
            elif quiet > PROBE_AFTER and self._probe and connection not in self._probes:
                self._probes[connection] = loop.create_task(self._ask_whether_alive(connection))
        again = self._busy or self._idle
        self._sweep = loop.call_later(self._interval, self._look, loop) if again else None

    async def _ask_whether_alive(self, connection: Connection) -> None:
        """Fail an exchange, while it is silent, once its engine answers no new connections.

        A llama-server that shuts down stops listening but keeps its silent connections open.
        """
        last = connection.last
        while connection.last == last:
            if not await self._is_alive() and connection.last == last:
                connection.lose("answers no new connections, and its response has stopped")
                return
            await asyncio.sleep(PROBE_AFTER)
        # Its next silence begins another probe.
        self._probes.pop(connection, None)

    async def _is_alive(self) -> bool:
        head = f"GET {self._probe or '/'} HTTP/1.1\r\nHost: {self._host_header}\r\n\r\n"
        for _ in range(2):
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    reader, writer = await asyncio.open_connection(
                        self._host, self._port, ssl=self._ssl
                    )
                    writer.write(head.encode())
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

    async def _connect(self) -> Connection:
        """Open a connection.

        Raises:
            EngineUnavailable: the engine does not accept the connection.
        """
        loop = asyncio.get_running_loop()
        if self._end is None:
            self._end = self._close_at_end()
            await anext(self._end)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop, self.address), self._host, self._port, ssl=self._ssl
                )
        except ssl.SSLCertVerificationError as error:
            raise EngineUnavailable(
                f"The engine at {self.address} has a certificate that is not trusted here: "
                f"{error.verify_message}. Set the variable SSL_CERT_FILE to a file with the "
                "certificate of its authority."
            ) from error
        except (OSError, TimeoutError) as error:
            reason = reason_of(error) or f"no response within {CONNECT_SECONDS} s"
            raise EngineUnavailable(
                f"The engine at {self.address} cannot be reached: {reason}. Is it running?"
            ) from error
        if self.on_connect is not None:
            try:
                await self.on_connect()
            except BaseException:
                connection.close()
                raise
        return connection


def _parts_of(url: str) -> SplitResult:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        shown = shown_address(url)
        raise ValueError(f"{shown!r} is not a valid address such as http://127.0.0.1:8080")
    return parts


def _host_of(parts: SplitResult) -> str:
    return parts.netloc.rpartition("@")[2]


async def _encoded(request: httpcore2.Request) -> Request:
    """Return a request of httpcore2 in bytes."""
    assert isinstance(request.stream, AsyncIterable)
    body = b"".join([part async for part in request.stream])
    lines = [b"%s %s HTTP/1.1" % (request.method, request.url.target)]
    lines += [
        b"%s: %s" % (name, value)
        for name, value in request.headers
        if name.lower() not in (b"content-length", b"transfer-encoding")
    ]
    if body:
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n", body


class HttpClient:
    """The HTTP server of one engine.

    Args:
        url: `http://host:port` or `https://…`, with a path if the engine has a prefix.
        headers: sent with every request (an engine's own API key, for example), in UTF-8.
        client: sends the requests. A client of httpcore2 or httpx2 is closed by its user.

    Attributes:
        pool: the client's connections, or None if they are not known.
    """

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, client: Client | None = None
    ) -> None:
        parts = _parts_of(url)
        self.address = shown_address(url)
        self._prefix = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        self._lines = header_lines({"Host": _host_of(parts), **(headers or {})})
        self._heads: dict[tuple[str, str], bytes] = {}
        if client is None:
            client = ConnectionPool(url)
        self.pool = client if isinstance(client, ConnectionPool) else None
        origin = f"{parts.scheme}://{_host_of(parts)}"
        self._client = self.pool or _Foreign(client, origin, self.address)

    @property
    def last_byte(self) -> float:
        """See `ConnectionPool.last_byte`; 0 for a user's client."""
        return 0.0 if self.pool is None else self.pool.last_byte

    def separate(self) -> HttpClient:
        """Return a client with one idle connection of its own; a user's client is shared."""
        if self.pool is None:
            return self
        client = copy(self)
        client._client = client.pool = self.pool.separate(most_idle=1)
        return client

    def send(
        self, method: str, path: str, body: bytes | None = None
    ) -> Coroutine[Any, Any, Response]:
        """Send a request, and return its response when the head has arrived.

        Raises:
            EngineUnavailable: the engine cannot be reached.
            EngineError: the engine was silent for too long, or the connection broke.
        """
        head = self._heads.get((method, path))
        if head is None:
            line = f"{method} {self._prefix}{path} HTTP/1.1\r\n".encode()
            head = self._heads[method, path] = line + self._lines
        if body is None:
            head, body = head + b"\r\n", b""
        else:
            head += FORWARDED.get() + _CONTENT % len(body)
        return self._client.handle_async_request((head, body))

    def forget_closed(self) -> None:
        """See `ConnectionPool.forget_closed`."""
        if self.pool is not None:
            self.pool.forget_closed()

    async def aclose(self) -> None:
        """Close the idle connections."""
        if self.pool is not None:
            await self.pool.aclose()


# The lines of the headers of the current request that its calls of engines have too.
FORWARDED: ContextVar[bytes] = ContextVar("latimer_forwarded", default=b"")

_CONTENT = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
# Libraries whose clients have the interface, all with the same arguments of `Request`.
_LIBRARIES = ("httpcore", "httpcore2", "httpx", "httpx2")


def _library_of(thing: object) -> str | None:
    """Return the library that defines an object's class or one of its base classes."""
    roots = [base.__module__.partition(".")[0] for base in type(thing).__mro__]
    return next((root for root in roots if root in _LIBRARIES), None)


def _is_transport_error(error: Exception) -> bool:
    return isinstance(error, OSError) or _library_of(error) is not None


class _Foreign:
    """A client of httpcore2 or httpx2 for the requests of this module, with its errors."""

    def __init__(self, client: Any, origin: str, address: str) -> None:
        self._origin = origin
        self._address = address
        self._headers: list[tuple[bytes, bytes]] = []
        if hasattr(client, "handle_async_request"):
            # These have no time limits of their own.
            limits = {"connect": CONNECT_SECONDS, "read": 600.0, "write": 600.0, "pool": None}
            library = import_module(_library_of(client) or "httpcore2")
            self._make = partial(library.Request, extensions={"timeout": limits})
            self._send = client.handle_async_request
        else:
            self._make = client.build_request
            self._send = partial(client.send, stream=True)
            # Bodies are read as they arrive.
            self._headers.append((b"Accept-Encoding", b"identity"))

    async def handle_async_request(self, request: Request) -> Response:
        head, body = request
        line, *lines = head.split(b"\r\n")[:-2]
        method, target, _ = line.decode().split(" ")
        headers = [(name, value) for name, _, value in (one.partition(b": ") for one in lines)]
        native = self._make(
            method,
            self._origin + target,
            headers=headers + self._headers,
            content=body or None,
        )
        try:
            response = await self._send(native)
        except Exception as error:
            if not _is_transport_error(error):
                raise
            message = f"The engine at {self._address} cannot be reached: {error!r}"
            raise EngineUnavailable(message) from error
        return _ForeignResponse(response, self._chunks(response))

    async def _chunks(self, response: Any) -> AsyncIterator[bytes]:
        try:
            async for chunk in response.stream:
                yield chunk
        except Exception as error:
            if not _is_transport_error(error):
                raise
            message = f"The connection to the engine at {self._address} was lost: {error!r}."
            raise EngineError(message) from error


class _ForeignResponse(Response):
    """A response of httpcore2 or httpx2."""

    __slots__ = ("_response",)

    def __init__(self, response: Any, stream: AsyncIterator[bytes]) -> None:
        status = response.status if hasattr(response, "status") else response.status_code
        super().__init__(status, getattr(response.headers, "raw", response.headers), stream)
        self._response = response

    @override
    async def aclose(self) -> None:
        await self._response.aclose()
