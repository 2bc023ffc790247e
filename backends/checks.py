"""Whether it is still the same model that answers at an engine's address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from .base import Generation, Model
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

    @property
    def is_sure(self) -> bool:
        """Whether the engine need not be asked: it is the one that it was a moment ago."""
        ...

    async def check(self) -> None:
        """Ask the engine; raises `EngineUnavailable` where it is gone, or serves another model."""
        ...


class Known:
    """The model that the engine at an address serves, as long as it is known to.

    Args:
        watch: notices another one.
        read: asks for all that is to be known of it.
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
        """The model; the engine is asked again where that was not done a moment ago.

        Raises:
            EngineUnavailable: it is not there.
        """
        if self.model is not None and not self._watch.is_sure:
            try:
                await self._watch.check()
            except EngineUnavailable:
                # Where another one was found it is read now.
                if self.model is not None:
                    raise
        if self.model is None:
            async with self._reading:
                if self.model is None:
                    self.model = await self._read()
        return self.model

    async def get_for(self, job: Generation) -> Model:
        """The model, if it is the one that a job was made for.

        Raises:
            EngineUnavailable: it is another one by now.
        """
        model = self.model
        if model is None or not self._watch.is_sure:
            model = await self.get()
        if job.fingerprint and job.fingerprint != model.fingerprint:
            raise self.changed()
        return model

    def check_is(self, model: Model | None) -> None:
        """Raise `EngineUnavailable` where another model was found since: nothing is sent then."""
        if self.model is not model:
            raise self.changed()

    def changed(self) -> EngineUnavailable:
        """The error for a request that was made for the model before."""
        return EngineUnavailable(
            f"The engine at {self._address} serves another model now; ask again."
        )


def changed(address: str, now: str, before: str) -> EngineUnavailable:
    """The error for a request that was made for a model that is served no more."""
    return EngineUnavailable(
        f"The engine at {address} serves another model now ({now}, was {before}); ask again."
    )
