"""Merged streams of batches, and the stream of a job without tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Generic, TypeVar

from .base import Batch, Event, Finish, Generation, Piece, Stream
from .queue import Ticket

T = TypeVar("T")
S = TypeVar("S", bound=Stream)

# Concurrent streams of one request; the limit keeps one request from filling an engine's queue.
AT_ONCE = 32
# Approximate bytes of events that wait for a reader; beyond it the engines wait as well.
MOST_WAITING = 2**18
# The largest number of events per batch; a reader handles them in about two milliseconds.
MOST_EVENTS = 256
# The approximate size of an event without its text, and of a token, in bytes.
EVENT, TOKEN = 128, 512


@asynccontextmanager
async def merge_streams(
    streams: Iterable[S],
    ticket: Ticket,
    at_once: int = AT_ONCE,
    accepted: int | None = None,
    ended: Callable[[S], None] | None = None,
) -> AsyncIterator[AsyncIterator[Batch]]:
    """Run streams concurrently; the reader gets all waiting events as one batch.

    At most `at_once` streams are open; the others open later, in order.

    Entering the context waits until the open streams are accepted, and raises the first error until
    then. A stream that waits for a place may be refused later. Then the reader raises the first
    error of any stream. Leaving the context cancels the streams that are still open. If the reader
    is more than `MOST_WAITING` bytes behind, the streams pause.

    Args:
        ticket: the request of all streams.
        accepted: the number of streams to wait for; by default all that are open.
        ended: called with each stream that was read to its end.
    """
    merge = _Merge(iter(streams), ticket, ended)
    merge.begin(at_once)
    try:
        await merge.accepted(accepted)
        yield merge.read()
    finally:
        for task in merge.tasks:
            task.cancel()
        await asyncio.gather(*merge.tasks, return_exceptions=True)


class _Merge(Generic[S]):
    """A buffer of the events that several tasks read from streams, for one reader.

    Args:
        sources: the streams that no task has opened yet.
        ticket: the request of all streams.
        ended: called with each stream that was read to its end.

    Attributes:
        tasks: the tasks that read streams.
    """

    def __init__(
        self, sources: Iterator[S], ticket: Ticket, ended: Callable[[S], None] | None
    ) -> None:
        self.sources = sources
        self.tasks: list[asyncio.Task[None]] = []
        self._ticket = ticket
        # The calls of the request that had to wait for a place before.
        self._queued = ticket.queued
        self._ended = ended
        self._accepted = self._done = 0
        self._wake = asyncio.Event()
        self._waiting: deque[Event] = deque()
        self._size = 0
        self._errors: list[BaseException] = []
        self._room = asyncio.Event()
        self._room.set()

    def begin(self, count: int) -> None:
        """Start tasks, of which each reads one stream after the other."""
        for stream in islice(self.sources, count):
            self.tasks.append(asyncio.create_task(self._work(stream)))

    async def accepted(self, most: int | None) -> None:
        """Wait until streams are accepted or wait for a place, or until the buffer is full.

        Args:
            most: the number of streams; None for one of each task.
        """
        while not self._errors and self._room.is_set() and self._done < len(self.tasks):
            settled = self._accepted + self._ticket.queued - self._queued
            if settled >= (len(self.tasks) if most is None else most):
                return
            await self._wake.wait()
            self._wake.clear()
        if self._errors:
            raise self._errors[0]

    async def _work(self, stream: S | None) -> None:
        """Read a stream to its end, then others that no task has opened."""
        try:
            while stream is not None:
                await self._pump(stream)
                stream = next(self.sources, None)
                # A stream that never waits must not block the event loop.
                await asyncio.sleep(0)
        except Exception as error:
            self._errors.append(error)
        finally:
            self._done += 1
            self._wake.set()

    async def _pump(self, stream: S) -> None:
        async with stream as batches:
            self._accepted += 1
            self._wake.set()
            async for batch in batches:
                self._waiting.extend(batch)
                self._size += sum(map(_size, batch))
                self._wake.set()
                if self._size > MOST_WAITING:
                    self._room.clear()
                    await self._room.wait()
        if self._ended is not None:
            self._ended(stream)

    async def read(self) -> AsyncIterator[Batch]:
        """Yield the events that the tasks read, until the last task is done."""
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                count = min(len(self._waiting), MOST_EVENTS)
                batch = tuple([self._waiting.popleft() for _ in range(count)])
                if not self._waiting:
                    self._size = 0
                    self._room.set()
                yield batch
                if count == MOST_EVENTS:
                    await asyncio.sleep(0)
            if self._errors:
                raise self._errors[0]
            if not self._waiting and self._done == len(self.tasks):
                return


def _size(event: Event) -> int:
    """Return the approximate size of an event in bytes."""
    if isinstance(event, Finish):
        return EVENT
    tokens = TOKEN * len(event.tokens)
    return EVENT + tokens + (len(event.data) if isinstance(event, Piece) else 0)


async def gather(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results; the first error cancels the others."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def map_concurrently(
    work: Iterable[Coroutine[Any, Any, T]], at_once: int = AT_ONCE
) -> list[T]:
    """Run many coroutines, few at a time, and return their results in order.

    They are taken from `work` when they start, so that thousands do not block the event loop. The
    first error cancels the others.
    """
    found: dict[int, T] = {}
    numbered = enumerate(work)

    async def take() -> None:
        for index, one in numbered:
            found[index] = await one

    await gather(take() for _ in range(at_once))
    return [found[index] for index in range(len(found))]


async def end_at_once(job: Generation, prompt_tokens: int) -> AsyncIterator[Batch]:
    """Yield the batch of a job that wants no tokens: every choice ends at its limit."""
    yield [Finish(choice, "length", None, prompt_tokens, 0) for choice in range(len(job.seeds))]
