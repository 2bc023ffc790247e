"""A probe of a database: it asks an idle one from time to time, so that a loss is noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

# Seconds without use after which a database is asked, and between questions while it is lost.
IDLE_SECONDS, LOST_SECONDS = 5.0, 2.0
# Seconds after which a question without an answer counts as a failure.
PROBE_SECONDS = 3.0


class Probe:
    """Questions to a database that nobody uses, one at a time.

    A question that gets no answer is not repeated before it ends: it holds a thread.

    Args:
        ask: asks a trivial question; raises an error if the database does not answer.
        report: gets the error, or None for an answer, each time.

    Attributes:
        used_at: the time of the last successful use, by `time.monotonic`; the database's users set
            it.
    """

    def __init__(
        self, ask: Callable[[], Awaitable[object]], report: Callable[[Exception | None], None]
    ) -> None:
        self._ask = ask
        self._report = report
        self.used_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[Exception | None] | None = None

    def start(self) -> None:
        """Ask from now on, until `cancel`."""
        loop = asyncio.get_running_loop()
        task = self._task
        # A task of an event loop that ended is never done.
        if task is None or task.done() or task.get_loop() is not loop:
            self._task = loop.create_task(self._run())

    async def now(self) -> Exception | None:
        """Ask, or wait for the question that runs; return the error, or None for an answer."""
        asking = self._question()
        await asyncio.wait([asking])
        return TimeoutError() if asking.cancelled() else asking.result()

    def cancel(self) -> None:
        """Ask nothing any more."""
        for task in (self._task, self._asking):
            if task is not None:
                # The event loop of the task may have ended.
                with suppress(RuntimeError):
                    task.cancel()
        self._task = self._asking = None

    async def _run(self) -> None:
        pause = IDLE_SECONDS
        while True:
            await asyncio.sleep(pause)
            pause = IDLE_SECONDS - (time.monotonic() - self.used_at)
            if pause <= 0:
                is_lost = await self._look() is not None
                pause = LOST_SECONDS if is_lost else IDLE_SECONDS

    async def _look(self) -> Exception | None:
        """Ask and report; return the error."""
        begun = time.monotonic()
        asking = self._question()
        await asyncio.wait([asking], timeout=PROBE_SECONDS)
        # One that answers others is slow, or busy with them.
        if not asking.done() and self.used_at < begun:
            self._report(TimeoutError())
        await asyncio.wait([asking])
        error = asking.result()
        if error is None or self.used_at < begun:
            self._report(error)
        return error

    def _question(self) -> asyncio.Task[Exception | None]:
        loop = asyncio.get_running_loop()
        asking = self._asking
        if asking is None or asking.done() or asking.get_loop() is not loop:
            asking = self._asking = loop.create_task(self._answered())
        return asking

    async def _answered(self) -> Exception | None:
        try:
            await self._ask()
        except Exception as error:
            return error
        self.used_at = time.monotonic()
        return None
