"""Threads for a database or a download that may never answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from typing_extensions import override

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """Threads like those of `ThreadPoolExecutor`, but the end of the process waits for none.

    Args:
        most: the largest number of threads.
        name: the name of a single thread; several have a number at its end.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._started = 0
        self._has_ended = False

    @override
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call a function in a thread; a future that is cancelled before prevents it.

        Raises:
            RuntimeError: the threads have ended.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._has_ended:
                raise RuntimeError("The threads have ended.")
            self._calls.put((future, partial(fn, *args, **kwargs)))
            if self._started < self._most:
                self._started += 1
                name = self._name if self._most == 1 else f"{self._name}_{self._started}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        return future

    @override
    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Take no more calls, and end each thread after those that wait; return at once."""
        with self._lock:
            self._has_ended = True
            for _ in range(self._started):
                self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            _finish(*item)
            # A thread that waits keeps no result.
            del item


def _finish(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
