"""Work that would hold the event loop: done in a thread, and kept where it repeats."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

# Bytes or characters that every piece of work here handles within about a millisecond.
SMALL = 16_384

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

# As few as can be: each thread that computes makes the event loop wait for the interpreter.
_threads = ThreadPoolExecutor(2, "latimer-work")


async def run(size: int, work: Callable[..., T], *arguments: object) -> T:
    """Return what a function returns; large input is handled in a thread.

    Args:
        size: bytes or characters of the input; up to `SMALL` the function is called here, since
            a thread would cost more than it brings.
    """
    if size <= SMALL:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *arguments)


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Look at the error of work whose asker has left: nobody else does."""
    if not future.cancelled():
        future.exception()


class Memo(Generic[K, V]):
    """Results of a slow pure function by its argument, within a bound in bytes.

    Equal arguments that come at once are worked out once. Errors are raised to everybody who
    waits, and are not kept.

    Args:
        most_bytes: the largest sum of sizes kept; what was used least recently goes first.
        size: the bytes that an argument and its result take.
        threads: where the function runs.
    """

    def __init__(
        self, most_bytes: int, size: Callable[[K, V], int], threads: Executor = _threads
    ) -> None:
        self._most_bytes = most_bytes
        self._size = size
        self._threads = threads
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._running: dict[K, Future[V]] = {}
        self._bytes = 0

    async def get(self, key: K, work: Callable[[], V]) -> V:
        """Return the result for an argument; `work` makes it where it is not known yet."""
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known[0]
            future = self._running.get(key)
            if future is None:
                future = self._running[key] = self._threads.submit(self._work, key, work)
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(_retrieved)
        # Whoever leaves does not end what others wait for.
        return await asyncio.shield(waiting)

    def clear(self) -> None:
        """Forget every result."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _work(self, key: K, work: Callable[[], V]) -> V:
        try:
            value = work()
            size = self._size(key, value)
        except BaseException:
            with self._lock:
                self._running.pop(key, None)
            raise
        with self._lock:
            self._running.pop(key, None)
            if size > self._most_bytes:
                return value
            self._kept[key] = (value, size)
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, (_, gone) = self._kept.popitem(last=False)
                self._bytes -= gone
        return value
