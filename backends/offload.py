"""Threads for work that would block the event loop, and turns of the loop.

Work in a thread that nobody awaits is cancelled.

`PyThreadState_SetAsyncExc` raises `Abandoned` in the thread, so grammars, templates and validation
need no checks for cancellation. It does not interrupt a call into C, so the input of such a call
must be bounded.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from math import inf
from queue import Empty
from time import monotonic, perf_counter, sleep
from types import coroutine
from typing import Any, Generic, TypeVar

from ..schemas import limits
from .errors import Busy, TooComplex

# Bytes or characters that all work here handles within about a millisecond.
SMALL = 16_384
# The size to name for an input of unknown size: the work runs in a thread.
UNKNOWN = SMALL + 1
# Larger inputs have a separate thread, so that smaller work never waits for them.
LARGE = 262_144
MOST_SECONDS = float(limits.SECONDS.maximum)
# Seconds that work waits for a thread, and after which a client may send its request again.
MOST_WAIT = 60.0
_RETRY = 5.0

# The owner of the current request's work, and of the tasks that it starts.
OWNER: ContextVar[str] = ContextVar("latimer_owner", default="")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
T = TypeVar("T")

# Seconds of a turn of the event loop which has run next to nothing, and the largest number of turns
# that a request waits for others.
_IDLE = 20e-6
MOST_TURNS = 12

# Seconds between attempts to end abandoned work.
AGAIN = 0.1

_STACK = threading.Lock()


# Seconds after which a thread that imports lets the event loop run; Python's default is 5 ms.
_TURN = 0.0005


class _Importing:
    """A context of threads that import modules while the event loop serves requests.

    Imports are Python code, which runs until another thread has waited for the switch interval. The
    event loop waits at each of its steps. A shorter interval costs the imports a few percent.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_TURN, self._before))
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                sys.setswitchinterval(self._before)


_importing = _Importing()


async def importing(load: Callable[..., T], *arguments: str) -> T:
    """Run a function that imports modules in a thread, so that the event loop stays free."""

    def run() -> T:
        with _importing:
            return load(*arguments)

    return await asyncio.to_thread(run)


@coroutine
def give_way() -> Generator[None, None, None]:
    """Let the other tasks that are ready run first, as `asyncio.sleep(0)` in one call less.

    A request that gives way at a few points does each part of its work right after the same part of
    others. Its code is then in the processor's caches. With `wait_for_others`, one of 32 chat
    requests takes 0.74 of the CPU time (docs/measurements.md). One without others does neither.
    """
    yield


# The requests of each event loop that wait for others.
_waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}


def wait_for_others() -> asyncio.Future[None]:
    """Wait until the event loop has nothing else to do, but for `MOST_TURNS` of its turns at most.

    Requests that arrive in small groups are a large one then, and `give_way` gains more.
    """
    loop = asyncio.get_running_loop()
    waiting = _waiting.get(loop)
    if waiting is None:
        waiting = _waiting[loop] = []
        loop.call_soon(_look, loop, perf_counter(), MOST_TURNS)
    future = loop.create_future()
    waiting.append(future)
    return future


def _look(loop: asyncio.AbstractEventLoop, since: float, turns: int) -> None:
    """Let the requests go on that wait for others, unless the last turn had work.

    Args:
        since: the time of the last turn.
        turns: the number of turns that are left.
    """
    now = perf_counter()
    if turns and now - since > _IDLE:
        loop.call_soon(_look, loop, now, turns - 1)
        return
    for future in _waiting.pop(loop):
        if not future.done():
            future.set_result(None)


class _Turns:
    """The queue of work for threads, in which each owner's next piece has its turn.

    Args:
        most: the threads that may work for one owner at the same time.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[Any]] = OrderedDict()
        # The owners that threads work for, by the ids of the threads; and the threads to end.
        self._served: dict[int, str] = {}
        self._ends = 0

    def put(self, item: Any) -> None:
        """Add a piece of work, or the end of a thread, which is None."""
        with self._changed:
            if item is None:
                self._ends += 1
            else:
                self._waiting.setdefault(OWNER.get(), deque()).append(item)
            self._changed.notify()

    def get(self, block: bool = True) -> Any:
        """Return what a thread does next; what it did before has ended."""
        with self._changed:
            self._served.pop(threading.get_ident(), None)
            while True:
                busy = [*self._served.values()]
                owner = next((one for one in self._waiting if busy.count(one) < self._most), None)
                if owner is not None:
                    return self._taken(owner)
                if self._ends and not self._waiting:
                    self._ends -= 1
                    return None
                if not block:
                    raise Empty
                self._changed.wait()

    def get_nowait(self) -> Any:
        """Return what a thread does next, or raise `queue.Empty`."""
        return self.get(False)

    def _taken(self, owner: str) -> Any:
        its = self._waiting.pop(owner)
        item = its.popleft()
        if its:
            self._waiting[owner] = its
        self._served[threading.get_ident()] = owner
        return item


class FairThreads(ThreadPoolExecutor):
    """Threads for which the owners of work take turns, also if one of them has much waiting.

    Args:
        most: the threads that may work for one owner at the same time; by default all.
    """

    def __init__(self, count: int, name: str, most: float = inf) -> None:
        super().__init__(count, name)
        self._work_queue: Any = _Turns(most)


class DeepThreads(FairThreads):
    """Threads with a stack of half a gigabyte, of which only the used part takes memory.

    With the usual 8 MiB, two inputs overflow the stack and end the process: a 60 KB chain of rules
    in llguidance, and a word of 100,000 letters in llama.cpp. For many vocabularies llama.cpp
    splits words with recursive regular expressions.
    """

    SIZE = 512 << 20

    def _adjust_thread_count(self) -> None:
        with _STACK:
            usual = threading.stack_size(self.SIZE)
            try:
                super()._adjust_thread_count()
            finally:
                threading.stack_size(usual)


# Few threads, because each busy thread makes the event loop wait for the interpreter lock.
_threads = DeepThreads(2, "latimer-work")
_large = DeepThreads(1, "latimer-large")


class Abandoned(BaseException):
    """The exception that ends abandoned work; it never leaves this module."""


def hide_ends_of_work() -> None:
    """Hide the `Abandoned` exceptions that Python loses and reports while it frees an object."""
    usual = sys.unraisablehook

    def hook(found: sys.UnraisableHookArgs) -> None:
        if not issubclass(found.exc_type, Abandoned):
            usual(found)

    sys.unraisablehook = hook


# Set the exception that a thread, of this number, raises at its next call.
_set_exception = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.py_object)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class _Work(Generic[T]):
    """A call in a thread that another thread can end.

    Its thread takes no lock. From Python 3.14 on, an exception of another thread can be raised
    after `with` has taken a lock and before it would release it.

    Attributes:
        begun: the time (`monotonic`) at which a thread began it; None while it waits for one.
    """

    begun: float | None = None

    def __init__(self, call: Callable[..., T], arguments: tuple[object, ...] = ()) -> None:
        self._call = call
        self._arguments = arguments
        # Taken while an exception is set.
        self._leaving = threading.Lock()
        self._thread: int | None = None
        self._is_left = False
        self._is_shielded = False

    def __call__(self) -> T:
        try:
            # Set before the check, as `leave` sets its own before it looks at this.
            self._thread = threading.get_ident()
            self.check()
            self.begun = monotonic()
            _here.work = self
            return self._call(*self._arguments)
        finally:
            self._thread = None
            _here.work = None
            self._settle()

    def check(self) -> None:
        """Raise `Abandoned` if nobody waits for the call."""
        if self._is_left:
            raise Abandoned

    @contextmanager
    def shielded(self) -> Iterator[Callable[[], None]]:
        """See the function `shielded`."""
        try:
            self._is_shielded = True
            self._settle()
            self.check()
            yield self.check
        finally:
            self._is_shielded = False

    def _settle(self) -> None:
        """Wait until no exception can be set any more; one that was set before is raised here."""
        # Python raises it at the end of the call that finds the lock free.
        while self._leaving.locked():
            sleep(0)

    def leave(self) -> None:
        """End the call, or prevent it if it has not begun; must run in an event loop.

        Python loses an exception that is raised while it frees an object. So the exception is
        raised repeatedly until the call has ended. A shield only delays it.
        """
        with self._leaving:
            self._is_left = True
            if self._thread is None:
                return
            if not self._is_shielded:
                _set_exception(self._thread, Abandoned)
        asyncio.get_running_loop().call_later(AGAIN, self.leave)


# The work of this thread.
_here = threading.local()


def shielded() -> AbstractContextManager[Callable[[], None]]:
    """Return a context in which `Abandoned` is not raised at any place of this thread's work.

    It is for what must be ended, such as a process: neither its start nor its end is interrupted.
    The function that the context returns raises `Abandoned` if nobody waits; call it often.
    """
    # Outside of such work, nobody leaves.
    return (getattr(_here, "work", None) or _Work(shielded)).shielded()


async def _ended(future: asyncio.Future[T], work: _Work[T], seconds: float) -> None:
    """Wait for the end of work; the time that it waits for a thread is not a part of its own.

    Raises:
        Busy: it waited for a thread for more than `MOST_WAIT`.
        TooComplex: it took more than `seconds`.
    """
    since = monotonic()
    # Another caller may have had it begun long ago.
    left = seconds if work.begun is None else work.begun + seconds - since
    # It may begin during the wait.
    while not (await asyncio.wait([future], timeout=min(left, seconds, MOST_WAIT)))[0]:
        begun = work.begun
        start, most = (since, MOST_WAIT) if begun is None else (begun, seconds)
        left = start + most - monotonic()
        if left <= 0 and begun is None:
            raise Busy(
                f"The server prepares other requests, for which this one waited {MOST_WAIT:g} s. "
                "Send it again later.",
                _RETRY,
            )
        if left <= 0:
            raise TooComplex(seconds)


async def run(
    size: int,
    work: Callable[..., T],
    *arguments: object,
    threads: Executor | None = None,
    seconds: float = MOST_SECONDS,
) -> T:
    """Call a function, in a thread if its input is large, and return its result.

    Cancelling the caller ends the work. Owners take turns (`FairThreads`). Code that runs for every
    small request checks the size itself, which saves a coroutine.

    Args:
        size: bytes or characters of the input. Up to `SMALL` the function is called directly,
            since a thread would take longer.
        threads: the executor of work that only waits; by default that of its size.

    Raises:
        Busy, TooComplex: see `_ended`.
    """
    if size <= SMALL:
        return work(*arguments)
    piece = _Work(work, arguments)
    if threads is None:
        threads = _threads if size <= LARGE else _large
    waiting = asyncio.get_running_loop().run_in_executor(threads, piece)
    try:
        await _ended(waiting, piece, seconds)
    except BaseException:
        waiting.cancel()
        piece.leave()
        raise
    try:
        return waiting.result()
    finally:
        # The error of the work refers to this frame: without this, its input would stay in memory
        # until the next collection of garbage.
        del waiting, piece


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of work whose caller was cancelled, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


class _Shared(Generic[V]):
    """Work with several waiting callers."""

    def __init__(self, work: Callable[[], V], threads: Executor) -> None:
        self.waiting = 0
        self.work = _Work(work)
        self.future: Future[V] = threads.submit(self.work)

    def leave(self) -> None:
        self.future.cancel()
        self.work.leave()


class Memo(Generic[K, V]):
    """A cache of a slow pure function's results, bounded in bytes.

    Concurrent calls with equal arguments share one computation. Its error is raised to all of them
    and is not cached. The work ends when the last waiting caller is cancelled.

    Args:
        most_bytes: the largest sum of sizes; the least recently used result is evicted first.
        size: returns the bytes that an argument and its result take.
        threads: the executor of the function.
        seconds: the time that the function may take.
    """

    def __init__(
        self,
        most_bytes: int,
        size: Callable[[K, V], int],
        threads: Executor = _threads,
        seconds: float = MOST_SECONDS,
    ) -> None:
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._size = size
        self._threads = threads
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._running: dict[K, _Shared[V]] = {}
        self._bytes = 0
        # The last entry: looking up the same object again needs no hash.
        self._last: tuple[K, V] | None = None

    async def get(self, key: K, work: Callable[[], V]) -> V:
        """Return the result for an argument; `work` computes it if it is not cached.

        Raises:
            Busy, TooComplex: see `_ended`.
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
            # A cancelled caller does not cancel the work for the others.
            await _ended(waiting, shared.work, self._seconds)
        finally:
            self._left(key, shared)
        try:
            value = waiting.result()
        finally:
            # As in `run`: an error and this frame would be a reference cycle.
            del waiting, shared
        self._keep(key, value)
        return value

    def known(self, key: K) -> V | None:
        """Return the cached result for an argument, or None."""
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
        """Remove every result."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0
            self._last = None

    def _left(self, key: K, shared: _Shared[V]) -> None:
        """Remove a waiting caller; the last one ends unfinished work."""
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
