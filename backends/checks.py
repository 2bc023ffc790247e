"""Whether it is still the same model that answers at an engine's address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from .base import Model
from .errors import EngineUnavailable, LatimerError


class Checks:
    """One check for everybody who asks at once; each gets one that began after they asked.

    Args:
        check: asks the engine; what it raises is raised to everybody whom the check was for.
    """

    def __init__(self, check: Callable[[], Awaitable[None]]) -> None:
        self._check = check
        self._lock = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._error: LatimerError | None = None

    async def run(self) -> None:
        """Return when a check has found nothing wrong.

        Raises:
            LatimerError: what the check raised.
        """
        asked = self._begun
        async with self._lock:
            if self._ended > asked:
                if self._error is not None:
                    raise self._error
                return
            self._begun += 1
            try:
                await self._check()
            except LatimerError as error:
                self._ended, self._error = self._begun, error
                raise
            # Who leaves in the middle has found nothing out: the next one asks.
            self._ended, self._error = self._begun, None


class Fresh:
    """One check for everybody who asks at once, and for those who ask a moment later.

    Args:
        check: asks the engine; what it raises is raised to everybody.
        seconds: how long an answer holds.
    """

    def __init__(self, check: Callable[[], Awaitable[None]], seconds: float = 0.5) -> None:
        self._check = check
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._ended = 0.0

    async def run(self) -> None:
        """Return, or raise, what the last check found, or one that runs or begins now."""
        task = self._task
        if task is None or not self._holds(task):
            task = self._task = asyncio.create_task(self._run())
            # Whoever wanted to know may have left.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Who leaves does not end what others wait for.
        await asyncio.shield(task)

    def _holds(self, task: asyncio.Task[None]) -> bool:
        if not task.done():
            return task.get_loop() is asyncio.get_running_loop()
        return not task.cancelled() and time.monotonic() - self._ended < self._seconds

    async def _run(self) -> None:
        try:
            await self._check()
        finally:
            self._ended = time.monotonic()


class Watched(Protocol):
    """What looks after an engine's model."""

    async def check(self) -> None:
        """Ask the engine; raises `EngineUnavailable` where it is gone, or serves another model."""
        ...


async def still(watch: Watched, known: Callable[[], Model | None]) -> Model | None:
    """The model that is known, once the engine was asked; None where another is there now.

    Raises:
        EngineUnavailable: the engine is not there.
    """
    try:
        await watch.check()
    except EngineUnavailable:
        if known() is not None:
            raise
    return known()


def changed(address: str, now: str, before: str) -> EngineUnavailable:
    """The error for a request that was made for a model that is served no more."""
    return EngineUnavailable(
        f"The engine at {address} serves another model now ({now}, was {before}); ask again."
    )
