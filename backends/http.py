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
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .connection import Connection, Dropped
from .errors import EngineError, EngineUnavailable
from .upstream import whole

if TYPE_CHECKING:
    from types import TracebackType

IDLE_SECONDS = 4.0
CONNECT_SECONDS = 5.0
# Seconds of silence after which an engine is asked whether it is there, and for its answer.
PROBE_AFTER, PROBE_SECONDS = 2.0, 2.0
# Connections that wait for work.
MOST_IDLE = 64


class HttpUpstream:
    """An engine's address, and a pool of connections to it.

    Args:
        address: `http://host:port` or `https://…`, with a path where the engine has a prefix.
        headers: sent with every request (an engine's own API key, for example).
        silence: seconds without a byte after which an answer that has begun counts as lost.
        patience: the same until its first byte: a long prompt takes its time.
        probe: a path that an engine answers while it works. It is asked when an answer falls
            silent, and an engine that does not take the connection any more has lost the answer.

    Attributes:
        on_connect: awaited when a connection is new, before a request is sent on it; what it raises
            is raised to the request. It says whether the engine is known by now to be the one that
            requests are made for. Only connections of which it said so are kept.
    """

    on_connect: Callable[[], Awaitable[bool]] | None = None

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
        self._probes: dict[Connection, asyncio.Task[None]] = {}
        self._interval = min(silence / 4, patience / 4, PROBE_AFTER / 4)
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        lines = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._heads: dict[tuple[str, str], bytes] = {}
        self.stale: EngineUnavailable | None = None
        self.epoch = 0
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def send(self, method: str, path: str, body: bytes | None = None) -> _Exchange:
        """See `Upstream.send`."""
        return _Exchange(self, self._head(method, path, body), body or b"")

    def send_unchecked(self, method: str, path: str, body: bytes | None = None) -> _Exchange:
        """Send a request that is the same whatever the engine serves: `on_connect` is not asked."""
        return _Exchange(self, self._head(method, path, body), body or b"", checked=False)

    @property
    def is_connected(self) -> bool:
        """Whether a connection is open of which `on_connect` said that its engine is known."""
        for connection in self._busy:
            if connection.is_checked and not connection.closed:
                return True
        idle = self._idle
        return bool(
            idle and not idle[-1].closed and idle[-1].idle_since >= time.monotonic() - IDLE_SECONDS
        )

    def refuse(self, error: EngineUnavailable) -> None:
        """Answer the requests that were made before, and are not sent yet, with an error."""
        self.stale = error
        self.epoch += 1

    async def aclose(self) -> None:
        """Close the connections that wait for work; a later request opens new ones."""
        if self._sweep is not None:
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

    def take(self) -> Connection | None:
        """An idle connection that is surely alive, the one used last first."""
        oldest = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest and not connection.closed:
                return connection
            connection.close()
        return None

    def give(self, connection: Connection) -> None:
        """Take a connection back whose answer was read to its end."""
        if self.on_connect is not None and not connection.is_checked:
            connection.close()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > MOST_IDLE:
            self._idle.pop(0).close()

    def watch(self, connection: Connection) -> None:
        """Look after an exchange: one timer for all of them, which runs while there are any."""
        self._busy.add(connection)
        if self._sweep is None:
            self._sweep = connection.loop.call_later(self._interval, self._look, connection.loop)

    def unwatch(self, connection: Connection) -> None:
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

    async def _ask_whether_alive(self, connection: Connection) -> None:
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

    async def connect(self) -> Connection:
        """Open a connection.

        Raises:
            EngineUnavailable: nobody answers there.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: Connection(loop), self._host, self._port, ssl=self._ssl
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {CONNECT_SECONDS} s"
            raise EngineUnavailable(
                f"The engine at {self.address} cannot be reached: {reason}. Is it running?"
            ) from error
        return connection


class _Exchange:
    """One request and its answer; also the `Reply`."""

    __slots__ = (
        "_body", "_checked", "_connection", "_epoch", "_head", "_upstream", "content_type",
        "status",
    )  # fmt: skip

    def __init__(
        self, upstream: HttpUpstream, head: bytes, body: bytes, checked: bool = True
    ) -> None:
        self._upstream = upstream
        self._checked = checked
        self._epoch = upstream.epoch
        self._head = head
        self._body = body

    async def __aenter__(self) -> _Exchange:
        upstream = self._upstream
        connection = upstream.take()
        fresh = connection is None
        while True:
            if connection is None:
                connection = await self._fresh()
            if self._epoch != upstream.epoch and self._checked and upstream.stale is not None:
                connection.close()
                raise upstream.stale
            try:
                connection.start(self._head, self._body, upstream)
                while not connection.headers_complete:
                    await connection.wait()
            except BaseException as error:
                upstream.unwatch(connection)
                connection.close()
                if not isinstance(error, Dropped):
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

    async def _fresh(self) -> Connection:
        """Open a connection, and make sure of what is at its other end."""
        connection = await self._upstream.connect()
        if self._checked and self._upstream.on_connect is not None:
            try:
                connection.is_checked = await self._upstream.on_connect()
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
        if connection.complete and connection.may_be_kept:
            self._upstream.give(connection)
        else:
            connection.close()

    def chunks(self) -> Connection:
        """See `Reply.chunks`."""
        return self._connection

    async def read(self) -> bytes:
        """See `Reply.read`."""
        return await whole(self.status, self._connection)
