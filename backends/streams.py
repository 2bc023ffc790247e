"""Merged streams of batches, and the stream of a job without tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, Generic, TypeVar

from .base import Batch, Event, Finish, Generation, Piece, Stream

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
    streams: Iterable[S], at_once: int = AT_ONCE, ended: Callable[[S], None] | None = None
) -> AsyncIterator[AsyncIterator[Batch]]:
    """Run streams concurrently; the reader gets all waiting events as one batch.

    At most `at_once` streams are open; the others open later, in order.

    The reader raises the first error of any stream. Leaving the context cancels the streams that
    are still open. If the reader is more than `MOST_WAITING` bytes behind, the streams pause.

    Args:
        ended: called with each stream that was read to its end.
    """
    merge = _Merge(iter(streams), ended)
    tasks = [asyncio.create_task(merge.work(stream)) for stream in islice(merge.sources, at_once)]
    for task in tasks:
        task.add_done_callback(lambda _task: merge.wake.set())
    try:
        yield merge.read(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Merge(Generic[S]):
    """A buffer of the events that several tasks read from streams, for one reader.

    Args:
        sources: the streams that no task has opened yet.
        ended: called with each stream that was read to its end.
    """

    def __init__(self, sources: Iterator[S], ended: Callable[[S], None] | None) -> None:
        self.sources = sources
        self._ended = ended
        self.wake = asyncio.Event()
        self._waiting: deque[Event] = deque()
        self._size = 0
        self._errors: list[BaseException] = []
        self._room = asyncio.Event()
        self._room.set()

    async def work(self, stream: S | None) -> None:
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
            self.wake.set()

    async def _pump(self, stream: S) -> None:
        async with stream as batches:
            async for batch in batches:
                self._waiting.extend(batch)
                self._size += sum(map(_size, batch))
                self.wake.set()
                if self._size > MOST_WAITING:
                    self._room.clear()
                    await self._room.wait()
        if self._ended is not None:
            self._ended(stream)

    async def read(self, tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[Batch]:
        """Yield the events that the tasks read, until the last task is done."""
        while True:
            await self.wake.wait()
            self.wake.clear()
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
            if not self._waiting and all(task.done() for task in tasks):
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
