"""A clock for tests of timeouts, which runs ahead while nothing happens."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")
# Seconds in which what was sent over the loopback arrives, also on a busy machine.
_PATIENCE = 0.01


class _Selector(selectors.DefaultSelector):
    """A selector that waits for files, and not until a timer is due.

    Attributes:
        now: the clock, which only waits set ahead.
        threads: the calls in threads that run; their end is waited for.
    """

    now = 0.0
    threads = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector.select`."""
        if timeout is None:
            return super().select(timeout)
        found = super().select(timeout if self.threads else min(timeout, _PATIENCE))
        if not found:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose timers are due when nothing else happens."""

    def __init__(self) -> None:
        self._files = _Selector()
        super().__init__(self._files)

    def time(self) -> float:
        """Return the seconds of the clock."""
        return self._files.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Any, *arguments: Any
    ) -> asyncio.Future[Any]:
        """Run a function in a thread, in real time."""
        running = super().run_in_executor(executor, func, *arguments)
        self._files.threads += 1
        running.add_done_callback(self._has_run)
        return running

    def _has_run(self, _: asyncio.Future[Any]) -> None:
        self._files.threads -= 1


def hurried(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test whose clients and servers are in its event loop, on a clock that runs ahead.

    Timers end in their order, and seconds without an event take no time. What is computed takes no
    time on that clock, so a busy machine changes nothing.
    """

    @functools.wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(test(*arguments, **named))

    return run


def now() -> float:
    """Return the seconds of the clock of the running event loop."""
    return asyncio.get_running_loop().time()
