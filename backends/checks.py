"""Checks that the engine at an address still serves the same model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from .base import Model
from .errors import EngineUnavailable, LatimerError


class Checks:
    """A check shared by concurrent callers; each gets a check that began after its call.

    Args:
        check: asks the engine; its error is raised to every caller that shares the check.
    """

    def __init__(self, check: Callable[[], Awaitable[None]]) -> None:
        self._check = check
        self._lock = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._error: LatimerError | None = None

    async def run(self) -> None:
        """Return when a check has succeeded.

        Raises:
            LatimerError: the error of the check.
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
            # A cancelled check skips this line, so the next caller runs one.
            self._ended, self._error = self._begun, None


class Fresh:
    """A check shared by concurrent callers and by callers shortly after it.

    Args:
        check: asks the engine; its error is raised to every caller.
        seconds: how long a result is valid.
    """

    def __init__(self, check: Callable[[], Awaitable[None]], seconds: float = 0.5) -> None:
        self._check = check
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None
        self._ended = 0.0

    async def run(self) -> None:
        """Wait for a recent, running or new check; raise its error if it failed."""
        task = self._task
        if task is None or not self._holds(task):
            task = self._task = asyncio.create_task(self._run())
            # Retrieves the error, since every caller may have been cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # A cancelled caller must not cancel the check for the others.
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
    """A watch for changes of an engine's model."""

    @property
    def is_sure(self) -> bool:
        """True if the engine was verified a moment ago and need not be asked."""
        ...

    async def check(self) -> None:
        """Ask the engine; raise `EngineUnavailable` if it is gone or serves another model."""
        ...


class Job(Protocol):
    """A job for one model; an empty fingerprint means any model."""

    fingerprint: str


class Known:
    """The cached model of the engine at an address.

    Args:
        watch: detects a change of the model.
        read: asks the engine for everything about its model.
    """

    def __init__(
        self, address: str, watch: Watched, read: Callable[[], Coroutine[Any, Any, Model]]
    ) -> None:
        self._address = address
        self._watch = watch
        self._read = read
        self._reading = asyncio.Lock()
        self.model: Model | None = None

    async def get(self) -> Model:
        """Return the model; ask the engine again unless it was verified a moment ago.

        Raises:
            EngineUnavailable: the engine is unavailable.
        """
        if self.model is not None and not self._watch.is_sure:
            try:
                await self._watch.check()
            except EngineUnavailable:
                # If the check found another model, that one is read below.
                if self.model is not None:
                    raise
        if self.model is None:
            async with self._reading:
                if self.model is None:
                    self.model = await self._read()
        return self.model

    async def get_for(self, job: Job) -> Model:
        """Return the model, if it is the one that a job was made for.

        Raises:
            EngineUnavailable: the engine serves another model now.
        """
        model = self.model
        if model is None or not self._watch.is_sure:
            model = await self.get()
        if job.fingerprint and job.fingerprint != model.fingerprint:
            raise self.changed()
        return model

    def check_is(self, model: Model | None) -> None:
        """Raise `EngineUnavailable` if another model was found since, before anything is sent."""
        if self.model is not model:
            raise self.changed()

    def changed(self) -> EngineUnavailable:
        """Return the error for a request that was made for the previous model."""
        return EngineUnavailable(
            f"The engine at {self._address} has loaded another model. Send the request again."
        )


def changed(address: str, now: str, before: str) -> EngineUnavailable:
    """Return the error for a request that was made for the model `before`."""
    return EngineUnavailable(
        f"The engine at {address} has loaded another model ({now} instead of {before}). Send the "
        "request again."
    )
