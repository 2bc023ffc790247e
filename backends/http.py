"""The default upstream: HTTP/1.1 on an `asyncio.Protocol` and httptools, uvicorn's parser.

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
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from .connection import Connection, Dropped
from .errors import EngineError, EngineUnavailable
from .upstream import header_lines, shown_address, whole

if TYPE_CHECKING:
    from types import TracebackType

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
