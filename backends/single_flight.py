"""Work that concurrent callers share: one of them does it, and the others wait for its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Fact = TypeVar("Fact")


class SingleFlight:
    """A check shared by concurrent callers; they go on in the same turn of the event loop.

    The callers in another event loop run a check of their own.
    """

    def __init__(self) -> None:
        # The event loop of the running check, and what is set at its end. A lock would wake one
        # caller in each turn of the event loop; the last of a hundred callers would wait for a
        # hundred turns.
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._begun = 0
        self._ended = 0
        self._error: Exception | None = None

    async def run(self, check: Callable[[], Awaitable[None]], fresh: bool = True) -> None:
        """Return when a check has succeeded; raise its error to every caller that shares it.

        Args:
            check: asks the engine, unless a check of another caller serves.
            fresh: True for a check that begins after the call; False for the running one.
        """
        asked = self._begun
        if not fresh and self._running is not None:
            asked -= 1
        loop = asyncio.get_running_loop()
        while self._ended <= asked:
            running = self._running
            if running is None or running[0] is not loop:
                await self._run(check, loop)
                return
            await running[1].wait()
        if self._error is not None:
            # Otherwise its traceback has the frames of all callers.
            raise self._error.with_traceback(None)

    async def _run(
        self, check: Callable[[], Awaitable[None]], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Check, and wake the callers that wait for the end."""
        number = self._begun = self._begun + 1
        running = self._running = loop, asyncio.Event()
        try:
            await check()
        except Exception as error:
            self._ended, self._error = number, error
            raise
        else:
            self._ended, self._error = number, None
        finally:
            # After a cancelled check, the first caller that wakes runs one.
            if self._running is running:
                self._running = None
            running[1].set()


class OnceCell(Generic[Fact]):
    """A fact that the first caller learns, for all callers after it.

    Attributes:
        value: the fact; None until it is known. Reading it costs no call, and setting it to None
            has the next caller learn it again.
    """

    def __init__(self) -> None:
        self.value: Fact | None = None
        self._flight = SingleFlight()

    async def get(self, learn: Callable[[], Awaitable[Fact]]) -> Fact:
        """Return the fact; learn it, or wait for the caller that does, if it is not known.

        Raises:
            Exception: an error of `learn`, which every caller gets that waited for it.
        """

        async def check() -> None:
            if self.value is None:
                value = await learn()
                # Callers in another event loop may have learned it meanwhile.
                if self.value is None:
                    self.value = value

        while self.value is None:
            await self._flight.run(check)
        return self.value


# Seconds for which all calls raise the last failure, so that many calls cost one connection.
MOMENT = 0.1


class Throttled:
    """A check shared by concurrent callers and by callers shortly after it.

    Args:
        check: asks the engine; its error is raised to every caller. It is cancelled with its last
            caller.
        seconds: how long a result is valid. An error is valid for `MOMENT` at most, so that an
            engine which starts is found soon.
    """

    def __init__(self, check: Callable[[], Awaitable[None]], seconds: float = 0.5) -> None:
        self._check = check
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._callers = 0
        self._ended = 0.0

    async def run(self) -> None:
        """Wait for a recent, running or new check; raise its error if it failed."""
        task = self._task
        if task is None or not self._holds(task):
            task = self._task = asyncio.create_task(self._run())
            # Retrieves the error, since every caller may have been cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._callers += 1
        try:
            # A cancelled caller must not cancel the check for the others.
            await asyncio.shield(task)
        finally:
            self._callers -= 1
            if not self._callers:
                task.cancel()

    def _holds(self, task: asyncio.Task[None]) -> bool:
        if not task.done():
            # One that its last caller has cancelled may take a while to end.
            return task.get_loop() is asyncio.get_running_loop() and not task.cancelling()
        if task.cancelled():
            return False
        seconds = self._seconds if task.exception() is None else min(self._seconds, MOMENT)
        return time.monotonic() - self._ended < seconds

    async def _run(self) -> None:
        try:
            await self._check()
        finally:
            self._ended = time.monotonic()
