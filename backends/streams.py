"""Streams of batches that are made of others, or of nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any, TypeVar

from .base import Batch, Event, Finish, Generation, Piece, Stream

T = TypeVar("T")

# Streams of one request that are open at once, so that no request takes all of an engine's queue.
AT_ONCE = 32
# Bytes of events that wait for a reader, about; beyond it the engines wait, too.
MOST_WAITING = 2**18
# Events that a reader gets at once: it handles them in about two milliseconds.
MOST_EVENTS = 256
# What an event takes beside its text, and what a token does.
EVENT, TOKEN = 128, 512


@asynccontextmanager
async def merged(
    streams: Iterable[Stream], at_once: int = AT_ONCE
) -> AsyncIterator[AsyncIterator[Batch]]:
    """Run streams side by side; what waits when the reader comes is handed over as one batch.

    No more than `at_once` are open: the others are made when it is their turn, in their order.

    The first error of any of them is raised at the reader, and all others are cancelled, as they
    are when the context is left. A reader that is more than `MOST_WAITING` bytes behind holds the
    engines back.
    """
    merge = _Merge(iter(streams))
    tasks = [asyncio.create_task(merge.work(stream)) for stream in islice(merge.sources, at_once)]
    for task in tasks:
        task.add_done_callback(lambda _task: merge.wake.set())
    try:
        yield merge.read(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Merge:
    """What several tasks have read from streams, for one reader.

    Args:
        sources: the streams that no task has begun.
    """

    def __init__(self, sources: Iterator[Stream]) -> None:
        self.sources = sources
        self.wake = asyncio.Event()
        self._waiting: deque[Event] = deque()
        self._size = 0
        self._errors: list[BaseException] = []
        self._room = asyncio.Event()
        self._room.set()

    async def work(self, stream: Stream | None) -> None:
        """Read a stream to its end, and then those that nobody reads."""
        try:
            while stream is not None:
                await self._pump(stream)
                stream = next(self.sources, None)
                # One that has nothing to wait for must not keep the loop from others.
                await asyncio.sleep(0)
        except Exception as error:
            self._errors.append(error)
        finally:
            self.wake.set()

    async def _pump(self, stream: Stream) -> None:
        async with stream as batches:
            async for batch in batches:
                self._waiting.extend(batch)
                self._size += sum(map(_size, batch))
                self.wake.set()
                if self._size > MOST_WAITING:
                    self._room.clear()
                    await self._room.wait()

    async def read(self, tasks: Sequence[asyncio.Task[None]]) -> AsyncIterator[Batch]:
        """Everything that tasks read, until the last of them is done."""
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
    """Bytes that an event takes, about."""
    if isinstance(event, Finish):
        return EVENT
    tokens = TOKEN * len(event.tokens)
    return EVENT + tokens + (len(event.data) if isinstance(event, Piece) else 0)


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of coroutines that run side by side; the first error cancels the others."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def ended(job: Generation, prompt_tokens: int) -> AsyncIterator[Batch]:
    """The batches of a job that wants no tokens: every choice at its limit."""
    yield [Finish(choice, "length", None, prompt_tokens, 0) for choice in range(len(job.seeds))]
