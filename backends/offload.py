"""Work that would hold the event loop: done in a thread, ended when nobody waits for it.

Python code in a thread is ended by raising `Abandoned` in it, which is what
`PyThreadState_SetAsyncExc` is for: grammars, templates and validation need no checks of their own.
A call into C is left to its end, so what is given to one is bounded before.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ..schemas import limits
from .errors import TooComplex

# Bytes or characters that every piece of work here handles within about a millisecond.
SMALL = 16_384
# Beyond this many, work waits in a line of its own, so that small work never waits for it.
LARGE = 262_144
MOST_SECONDS = float(limits.SECONDS.most)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

# Seconds after which work that goes on all the same is ended once more.
AGAIN = 0.1

_STACK = threading.Lock()


class DeepThreads(ThreadPoolExecutor):
    """Threads with a stack of half a gigabyte, of which only what is used takes memory.

    With the usual 8 MiB a chain of rules of 60 KB ends the process in llguidance, and a word of
    100,000 letters in llama.cpp, which cuts words with recursive expressions for many vocabularies.
    """

    SIZE = 512 << 20

    def _adjust_thread_count(self) -> None:
        with _STACK:
            usual = threading.stack_size(self.SIZE)
            try:
                super()._adjust_thread_count()
            finally:
                threading.stack_size(usual)


# As few as can be: each thread that computes makes the event loop wait for the interpreter.
_threads = DeepThreads(2, "latimer-work")
_large = DeepThreads(1, "latimer-large")


class Abandoned(BaseException):
    """Raised inside work that nobody waits for any more; never leaves this module."""


class _Work(Generic[T]):
    """A call in a thread, which can be ended from outside."""

    def __init__(self, call: Callable[..., T], arguments: tuple[object, ...] = ()) -> None:
        self._call = call
        self._arguments = arguments
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_left = False

    def __call__(self) -> T:
        with self._lock:
            if self._is_left:
                raise Abandoned
            self._thread = threading.get_ident()
        try:
            return self._call(*self._arguments)
        finally:
            # Behind this lock no exception can come any more; one that came before is raised here.
            with self._lock:
                self._thread = None

    def leave(self) -> None:
        """End the call, now or before it begins; to be called in an event loop.

        An exception that comes while Python frees something is lost: so it is raised until the call
        has ended.
        """
        with self._lock:
            self._is_left = True
            if self._thread is None:
                return
            thread = ctypes.c_ulong(self._thread)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Abandoned))
        asyncio.get_running_loop().call_later(AGAIN, self.leave)


async def run(size: int, work: Callable[..., T], *arguments: object) -> T:
    """Return what a function returns; large input is handled in a thread.

    Who is cancelled while it waits ends the work. The road of every small request asks for the size
    itself: a coroutine less for each step.

    Args:
        size: bytes or characters of the input; up to `SMALL` the function is called here, since
            a thread would cost more than it brings.

    Raises:
        TooComplex: it took more than `MOST_SECONDS`.
    """
    if size <= SMALL:
        return work(*arguments)
    piece = _Work(work, arguments)
    threads = _threads if size <= LARGE else _large
    waiting = asyncio.get_running_loop().run_in_executor(threads, piece)
    try:
        async with asyncio.timeout(MOST_SECONDS):
            return await waiting
    except TimeoutError:
        if not waiting.cancelled():
            # The work's own.
            raise
        piece.leave()
        raise TooComplex(MOST_SECONDS) from None
    except asyncio.CancelledError:
        piece.leave()
        raise


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Look at the error of work whose asker has left: nobody else does."""
    if not future.cancelled():
        future.exception()


class _Shared(Generic[V]):
    """Work that several wait for."""

    def __init__(self, work: Callable[[], V], threads: Executor) -> None:
        self.waiting = 0
        self._work = _Work(work)
        self.future: Future[V] = threads.submit(self._work)

    def leave(self) -> None:
        self.future.cancel()
        self._work.leave()


class Memo(Generic[K, V]):
    """Results of a slow pure function by its argument, within a bound in bytes.

    Equal arguments that come at once are worked out once. Errors are raised to everybody who
    waits, and are not kept. Work ends when the last of those who wait for it leaves.

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
        self._running: dict[K, _Shared[V]] = {}
        self._bytes = 0
        # The same object as before needs no hash.
        self._last: tuple[K, V] | None = None

    async def get(self, key: K, work: Callable[[], V]) -> V:
        """Return the result for an argument; `work` makes it where it is not known yet.

        Raises:
            TooComplex: it took more than `MOST_SECONDS`.
        """
        found = self.known(key)
        if found is not None:
            return found
        with self._lock:
            shared = self._running.get(key)
            if shared is None:
                shared = self._running[key] = _Shared(work, self._threads)
            shared.waiting += 1
        waiting = asyncio.wrap_future(shared.future)
        waiting.add_done_callback(_retrieved)
        try:
            async with asyncio.timeout(MOST_SECONDS):
                # Whoever leaves does not end what others wait for.
                value = await asyncio.shield(waiting)
        except TimeoutError:
            raise TooComplex(MOST_SECONDS) from None
        finally:
            self._left(key, shared)
        self._keep(key, value)
        return value

    def known(self, key: K) -> V | None:
        """The result for an argument, None where it is not kept."""
        last = self._last
        if last is not None and last[0] is key:
            return last[1]
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            self._last = (key, kept[0])
            return kept[0]

    def clear(self) -> None:
        """Forget every result."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0
            self._last = None

    def _left(self, key: K, shared: _Shared[V]) -> None:
        """One fewer waits; the last one ends the work, if it is not done."""
        with self._lock:
            shared.waiting -= 1
            if (shared.future.done() or not shared.waiting) and self._running.get(key) is shared:
                del self._running[key]
        if not shared.waiting and not shared.future.done():
            shared.leave()

    def _keep(self, key: K, value: V) -> None:
        size = self._size(key, value)
        with self._lock:
            if size > self._most_bytes or key in self._kept:
                return
            self._kept[key] = (value, size)
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, (_, gone) = self._kept.popitem(last=False)
                self._bytes -= gone
                self._last = None
