"""A job on one engine of several, or on another one if that fails before its first event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ..base import Batch, Finish, Generation, Stream
from ..errors import EngineError, LatimerError
from .config import Affinity
from .place import Job, Place
from .replica import Replica


class Places(Protocol):
    """A model of several engines (`Pool`), as its calls know it."""

    async def begin(self, place: Place, job: Job | None) -> Replica:
        """Take a place for a job, and return its engine.

        Raises:
            Busy: too many requests wait.
            EngineUnavailable: no engine can run the call.
        """
        ...

    def keep(self, place: Place, replica: Replica) -> None:
        """Note that an engine evaluates the prompt of a call, and runs its session."""
        ...

    async def after(self, place: Place, error: BaseException) -> None:
        """Decide what follows an error before the first event; raise it if it is the client's."""
        ...

    def blame(self, replica: Replica, error: LatimerError) -> None:
        """Count an engine's failure."""
        ...

    def release(self, place: Place) -> None:
        """Give a place back."""
        ...


class Run(Place, AbstractAsyncContextManager[AsyncIterator[Batch]], AsyncIterator[Batch]):
    """The batches of a job.

    A class rather than a generator for speed: the event loop keeps a list of all generators.

    Attributes:
        pool: the model.
        job: what it runs.
    """

    finishes: list[Finish]
    _inner: Stream | None = None
    _batches: AsyncIterator[Batch]
    _lost: LatimerError | None = None
    _task: asyncio.Task[object] | None = None
    # True while the task waits for the first event.
    _is_waiting = False

    def __init__(self, pool: Places, job: Generation, name: str, affinity: Affinity) -> None:
        super().__init__(job, name, affinity)
        self.pool, self.job, self.finishes = pool, job, []

    async def __aenter__(self) -> AsyncIterator[Batch]:
        """Enter the job's context on an engine; try others while they fail."""
        pool, job = self.pool, self.job
        while True:
            replica = await pool.begin(self, job)
            if self.blocks or self.session is not None:
                pool.keep(self, replica)
            inner = replica.backend.open(job)
            self.begun = time.monotonic()
            self._task, self._lost, self._is_waiting = asyncio.current_task(), None, True
            replica.waiting_first.add(self)
            try:
                batches = await inner.__aenter__()
            except BaseException as error:
                await pool.after(self, self._cause(error, replica))
                continue
            self._is_waiting = False
            self._inner, self._batches = inner, aiter(batches)
            return self

    def lose(self, error: LatimerError) -> None:
        """Cancel the step that waits for a lost engine."""
        if self._lost is None:
            self._lost = error
            if self._is_waiting and self._task is not None:
                self._task.cancel()

    def _cause(self, error: BaseException, replica: Replica) -> BaseException:
        """Return the loss of the engine, if that has cancelled a step, or else the error."""
        replica.waiting_first.discard(self)
        was_waiting, self._is_waiting = self._is_waiting, False
        lost, task = self._lost, self._task
        if not (was_waiting and lost and task and isinstance(error, asyncio.CancelledError)):
            return error
        return error if task.uncancel() > 0 else lost

    @property
    def is_over(self) -> bool:
        """True if no batch follows, as far as the engine's own batches say that."""
        return getattr(self._batches, "is_over", False)

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Batch:
        is_first = not self.first
        while True:
            try:
                if is_first and self._lost is not None:
                    raise self._lost
                self._is_waiting = is_first
                batch = await self._batches.__anext__()
                break
            except StopAsyncIteration:
                raise
            except BaseException as error:
                assert self.replica is not None
                if not is_first:
                    if isinstance(error, EngineError):
                        self.pool.blame(self.replica, error)
                    raise
                await self._go_on(error, self.replica)
        if is_first:
            assert self.replica is not None
            self._is_waiting, self.first = False, time.monotonic()
            self.replica.waiting_first.discard(self)
        last = batch[-1]
        if isinstance(last, Finish):
            if self.width == 1:
                self.finishes.append(last)
            else:
                self.finishes += [event for event in batch if isinstance(event, Finish)]
        return batch

    async def _go_on(self, error: BaseException, replica: Replica) -> None:
        """Enter the context on the next engine; raise the error if there is none."""
        cause = self._cause(error, replica)
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.__aexit__(type(cause), cause, cause.__traceback__)
        await self.pool.after(self, cause)
        await self.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        inner, self._inner = self._inner, None
        replica, self._is_waiting = self.replica, False
        try:
            if inner is not None:
                await inner.__aexit__(*error)  # type: ignore[arg-type]
        finally:
            if replica is not None:
                if not self.first:
                    replica.waiting_first.discard(self)
                self.pool.release(self)
