"""Comments in a stream while it has nothing to send, so that clients and proxies keep waiting.

Many clients and proxies close a connection on which nothing arrives for a minute. Clients ignore
the comments of server-sent events. A WebSocket has none, so the first events of a response are sent
early instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from ...backends.base import Backend
from ...backends.errors import LatimerError
from ...backends.queue import Ticket
from ..request import EVENT_STREAM, Exchange
from .frames import ChunkEncoder

# Ticks per interval: a comment follows after three to four of them without a frame.
TICKS = 4
# The value of `KeepAlive.idle` while a frame is being sent. Ticks never make it positive.
SENDING = -(2**60)
# The shortest time between two ticks, in seconds.
SHORTEST = 0.005
# Seconds without a frame after which the first events are sent early.
EARLY = 0.1


class KeepAlive:
    """The comments of one stream.

    The first comment sends the head of the response. After that, errors are events in the stream.
    The head is therefore sent only when the engine has accepted the request: its context check has
    passed, it is in the engine's queue, and the engine is available.

    Attributes:
        idle: the number of ticks since the last frame; `SENDING` while a frame is being sent.
        writing: the task that sends a comment, or None. `settle` must precede the next frame.
        ticket: the request's jobs; one of them is admitted after the context check.
        first: returns the first events of a response, unless they are made already; they are sent
            instead of comments. None to send comments.
    """

    __slots__ = (
        "__weakref__", "_backend", "_exchange", "_frames", "_is_sending", "_streams", "first",
        "idle", "ticket", "writing",
    )  # fmt: skip

    def __init__(self, exchange: Exchange, backend: Backend, frames: ChunkEncoder) -> None:
        self._exchange = exchange
        self._frames = frames
        self._backend = backend
        self._is_sending = False
        self._streams: _Streams = set()
        self.idle = 0
        self.writing: asyncio.Task[None] | None = None
        self.ticket = Ticket()
        self.first: Callable[[], bytes] | None = None

    def begin(self, seconds: float) -> None:
        """Send a comment for each `seconds` of silence until `end`."""
        self._streams = _streams_of(seconds)
        self._streams.add(self)

    def end(self) -> None:
        """Send no more comments."""
        self._streams.discard(self)
        if self.writing is not None:
            self.writing.cancel()

    def tick(self) -> None:
        """Count a part of the interval; start a comment at the end of the last one."""
        self.idle += 1
        if self.idle >= TICKS and (self.writing is None or self.writing.done()):
            self.idle = 0
            self._is_sending = False
            self.writing = asyncio.get_running_loop().create_task(self._write())

    async def settle(self) -> None:
        """Wait until a comment is sent, or cancel it if its first byte is not sent yet."""
        # The next comment can begin before the end of one is noticed here.
        while (task := self.writing) is not None:
            if not self._is_sending:
                task.cancel()
            await asyncio.wait([task])
            if self.writing is task:
                # A task that is cancelled before it starts does not run at all.
                self.writing = None

    async def _write(self) -> None:
        exchange = self._exchange
        try:
            data = await self._next()
            if data:
                self._is_sending = True
                if not exchange.started:
                    exchange.names_engine = False
                    await exchange.start(200, EVENT_STREAM)
                await (exchange.write or exchange.chunk)(data)
        except (LatimerError, OSError):
            # The engine is not available, so the request will fail with its own error. Or the
            # client has disconnected, which ends the request.
            pass
        finally:
            self.writing = None

    async def _next(self) -> bytes:
        """Return the first events or a comment; nothing while the head must not be sent yet."""
        is_started = self._exchange.started
        if not is_started:
            if not self.ticket.admitted:
                return b""
            # A stream that waits for its model may send a comment meanwhile.
            await self._backend.health()
        if self.first is None:
            return self._frames.comment
        self._streams.discard(self)
        return b"" if is_started else self.first()


T = TypeVar("T")


async def commented(exchange: Exchange, arriving: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield what arrives for a stream of events, and send comments while nothing arrives.

    This is for events without frames of text. The first comment sends the head of the response.
    """
    while True:
        waiting = asyncio.ensure_future(anext(arriving, _END))
        try:
            while not (await asyncio.wait([waiting], timeout=exchange.keepalive or None))[0]:
                if not exchange.started:
                    exchange.names_engine = False
                    await exchange.start(200, EVENT_STREAM)
                await exchange.chunk(b": waiting\n\n")
        except BaseException:
            waiting.cancel()
            with suppress(asyncio.CancelledError, LatimerError):
                await waiting
            raise
        one = waiting.result()
        if isinstance(one, _End):
            return
        yield one


class _End:
    """The end of what arrives."""


_END = _End()
_Streams: TypeAlias = set[KeepAlive]

# The running streams of each event loop, by their interval. One timer serves all of them.
_running: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Streams]] = WeakKeyDictionary()


def _streams_of(seconds: float) -> _Streams:
    """Return the streams with an interval, after starting their timer if there is none."""
    loop = asyncio.get_running_loop()
    intervals = _running.get(loop)
    if intervals is None:
        intervals = _running[loop] = {}
    streams = intervals.get(seconds)
    if streams is None:
        streams = intervals[seconds] = set()
        loop.call_later(max(seconds / TICKS, SHORTEST), _tick, intervals, seconds)
    return streams


def _tick(intervals: dict[float, _Streams], seconds: float) -> None:
    """Tick every stream, and start the next timer; without streams there is none."""
    streams = intervals[seconds]
    if not streams:
        del intervals[seconds]
        return
    for stream in streams:
        stream.tick()
    loop = asyncio.get_running_loop()
    loop.call_later(max(seconds / TICKS, SHORTEST), _tick, intervals, seconds)
