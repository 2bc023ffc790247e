"""The default upstream: HTTP/1.1 on an `asyncio.Protocol` and httptools, uvicorn's parser.

A general client costs more per request than everything else between a client and its engine
(`tests/benchmarks/proxy.py`), and this road is narrow: one host, no redirects, no cookies, no
compression, bodies as bytes.

llama-server closes a connection after 100 answers or 5 idle seconds, so idle ones are dropped after
4 s, and a request whose reused connection dies before the first byte of the answer is sent once
more on a fresh one. Only the headers given here are ever sent: nothing of a client's request
reaches an engine (`X-Conversation-Id` would keep llama-server generating after a disconnect).
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httptools

from .errors import EngineError, EngineSilent, EngineUnavailable
from .upstream import whole

if TYPE_CHECKING:
    from types import TracebackType

IDLE_SECONDS = 4.0
CONNECT_SECONDS = 5.0
# A body waits here while its reader is slow; beyond this the socket is not read.
HIGH_WATER = 2**20
# Seconds of silence after which an engine is asked whether it is there, and for its answer.
PROBE_AFTER, PROBE_SECONDS = 2.0, 2.0
# Connections that wait for work, and bytes of an answer's head.
MOST_IDLE = 64
MOST_HEAD = 2**18
# Bytes of a request's body that are written at once; copying 20 MB would hold the event loop.
PIECE = 2**18


_NOTHING = memoryview(b"")


class _Dropped(Exception):
    """A connection died before the first byte of an answer."""


class HttpUpstream:
    """An engine's address, and a pool of connections to it.

    Args:
        address: `http://host:port` or `https://…`, with a path where the engine has a prefix.
        headers: sent with every request (an engine's own API key, for example).
        silence: seconds without a byte after which an answer that has begun counts as lost.
        patience: the same until its first byte: a long prompt takes its time.
        probe: a path that an engine answers while it works. It is asked when an answer falls
            silent, and an engine that does not take the connection any more has lost the answer.
    """

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
            raise ValueError(f"{address!r} is no address like http://127.0.0.1:8080")
        self.address = address.rstrip("/")
        self.silence = silence
        self.patience = patience
        self._probe = probe
        self._probes: dict[_Connection, asyncio.Task[None]] = {}
        self._interval = min(silence / 4, patience / 4, PROBE_AFTER / 4)
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._heads: dict[tuple[str, str], bytes] = {}
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def send(self, method: str, path: str, body: bytes | None = None) -> _Exchange:
        """See `Upstream.send`."""
        return _Exchange(self, self._head(method, path, body), body or b"")

    async def aclose(self) -> None:
        """Close the connections that wait for work; a later request opens new ones."""
        if self._sweep is not None and not self._busy:
            # Exchanges that still run end by silence all the same.
            self._sweep.cancel()
            self._sweep = None
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        # Lets the transports finish closing before the event loop goes away.
        await asyncio.sleep(0)

    def _head(self, method: str, path: str, body: bytes | None) -> bytes:
        head = self._heads.get((method, path))
        if head is None:
            line = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._lines}"
            head = self._heads[method, path] = line.encode("latin-1")
        if body is None:
            return head + b"\r\n"
        return head + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)

    def take(self) -> _Connection | None:
        """An idle connection that is surely alive, the one used last first."""
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.closed:
                return connection
            connection.close()
        return None

    def give(self, connection: _Connection) -> None:
        """Take a connection back whose answer was read to its end."""
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > MOST_IDLE:
            self._idle.pop(0).close()

    def watch(self, connection: _Connection) -> None:
        """Look after an exchange: one timer for all of them, which runs while there are any."""
        self._busy.add(connection)
        if self._sweep is None:
            self._sweep = connection.loop.call_later(self._interval, self._look, connection.loop)

    def unwatch(self, connection: _Connection) -> None:
        """The exchange has ended."""
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
                # Its reader is slow, not the engine.
                continue
            if quiet > limit:
                connection.lose(f"was silent for {limit:g} s")
            elif quiet > PROBE_AFTER and self._probe and connection not in self._probes:
                self._probes[connection] = loop.create_task(self._ask_whether_alive(connection))
        self._sweep = loop.call_later(self._interval, self._look, loop) if self._busy else None

    async def _ask_whether_alive(self, connection: _Connection) -> None:
        """Give a silent answer up if its engine takes no connections any more.

        A llama-server that was told to end stops listening, and keeps connections open in silence.
        """
        while True:
            if not await self._is_alive():
                break
            await asyncio.sleep(PROBE_AFTER)
        connection.lose("does not take connections any more, and its answer has stopped")

    async def _is_alive(self) -> bool:
        for _ in range(2):
            try:
                async with asyncio.timeout(PROBE_SECONDS):
                    reader, writer = await asyncio.open_connection(
                        self._host, self._port, ssl=self._ssl
                    )
                    writer.write(self._head("GET", self._probe or "/", None))
                    try:
                        if await reader.read(1):
                            return True
                    finally:
                        writer.close()
            except (OSError, TimeoutError):
                await asyncio.sleep(PROBE_SECONDS / 4)
        return False

    async def connect(self) -> _Connection:
        """Open a connection.

        Raises:
            EngineUnavailable: nobody answers there.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop), self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {CONNECT_SECONDS} s"
            raise EngineUnavailable(
                f"The engine at {self.address} cannot be reached: {reason}. Is it running?"
            ) from error
        return connection


class _Exchange:
    """One request and its answer; also the `Reply`."""

    __slots__ = ("_body", "_connection", "_head", "_upstream", "content_type", "status")

    def __init__(self, upstream: HttpUpstream, head: bytes, body: bytes) -> None:
        self._upstream = upstream
        self._head = head
        self._body = body

    async def __aenter__(self) -> _Exchange:
        upstream = self._upstream
        connection = upstream.take()
        fresh = connection is None
        while True:
            if connection is None:
                connection = await upstream.connect()
            try:
                connection.start(self._head, self._body, upstream)
                while not connection.headers_complete:
                    await connection.wait()
            except BaseException as error:
                upstream.unwatch(connection)
                connection.close()
                if not isinstance(error, _Dropped):
                    raise
                if fresh:
                    raise EngineError(
                        f"The engine at {upstream.address} closed the connection without an answer."
                    ) from error
                connection, fresh = None, True
                continue
            self._connection = connection
            self.status = connection.status
            self.content_type = connection.content_type
            return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        connection = self._connection
        self._upstream.unwatch(connection)
        if connection.complete and connection.may_be_kept:
            self._upstream.give(connection)
        else:
            connection.close()

    def chunks(self) -> _Connection:
        """See `Reply.chunks`."""
        return self._connection

    async def read(self) -> bytes:
        """See `Reply.read`."""
        return await whole(self.status, self._connection)


class _Connection(asyncio.Protocol):
    """A connection; parses one answer after the other, and iterates over its body.

    Every coroutine between a token and its task costs: iterating is one, and waits by itself.
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
        self._parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._body: list[bytes] = []
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
        """Whether the connection can be used again once its answer is complete."""
        return self.keep_alive and not self._unsent and not self.closed

    def start(self, head: bytes, body: bytes, upstream: HttpUpstream) -> None:
        """Send a request."""
        self._reset()
        if self.closed:
            raise _Dropped
        self._address = upstream.address
        self._is_waiting = True
        self.last = self.loop.time()
        upstream.watch(self)
        if len(body) <= PIECE:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        self._unsent = memoryview(body)
        self._send_more()

    def _send_more(self) -> None:
        """Write more of a large body, until the transport has enough."""
        # A server that reads is not silent.
        self.last = self.loop.time()
        while self._unsent and not self._is_full and not self.closed:
            self._transport.write(self._unsent[:PIECE])
            # An empty view of the body would keep it in memory.
            self._unsent = self._unsent[PIECE:] or _NOTHING

    def __aiter__(self) -> _Connection:
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
        """Close the connection at once."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    async def wait(self) -> None:
        """Return when something has happened; raises what went wrong."""
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
        """Whether some of the answer has arrived."""
        return self._answered

    @property
    def is_paused(self) -> bool:
        """Whether the answer waits for its reader."""
        return self._paused

    def lose(self, reason: str) -> None:
        """Give an answer up that does not come any more."""
        self._fail(EngineSilent(f"The engine at {self._address} {reason}."))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._is_waiting:
            # Nobody asked: it would be taken for the answer to the next request.
            self.close()
            return
        self._answered = True
        self.last = self.loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.complete:
                self._fail(EngineError(f"The engine at {self._address} answers no HTTP: {error}."))
            self.close()
            return
        if not self.headers_complete:
            self._head_size += len(data)
            if self._head_size > MOST_HEAD:
                self._fail(EngineError(f"The engine at {self._address} sends headers without end."))
                self.close()
                return
        if self._size > HIGH_WATER and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        """Write no more; the transport has enough."""
        self._is_full = True

    def resume_writing(self) -> None:
        """Write the rest of a large body."""
        self._is_full = False
        self._send_more()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self.complete:
            return
        if self.headers_complete and self._until_close and error is None:
            self.complete = True
            self._wake()
        elif not self._answered:
            self._fail(_Dropped())
        else:
            self._fail(
                EngineError(f"The connection to the engine at {self._address} broke: {error!r}.")
            )

    # httptools

    def on_message_begin(self) -> None:
        """An answer begins; behind the one that was asked for there must be none."""
        if self.complete:
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        if self.complete:
            return
        name = name.lower()
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        """The head is complete; an informational one (1xx) is not the answer's."""
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        self._is_informational = self.status < 200
        self.headers_complete = not self._is_informational

    def on_body(self, body: bytes) -> None:
        """A part of the body, chunks undone."""
        if self.complete:
            return
        self._body.append(body)
        self._size += len(body)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._is_informational:
            self._is_informational = False
            self._until_close = True
            return
        self.complete = True
        self._is_waiting = False
        self.keep_alive = self._parser.should_keep_alive()
