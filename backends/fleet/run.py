"""A job on one engine of several, or on another one if that fails before its first event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from ..base import Batch, Finish, Generation, Pushed, Stream
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
    """The batches of a job, of which the first has arrived when its context is entered.

    A class rather than a generator for speed: the event loop keeps a list of all generators.

    Attributes:
        pool: the model.
        job: what it runs.
    """

    _inner: Stream | None = None
    _batches: AsyncIterator[Batch]
    # The first batch, until it is taken.
    _next: Batch | None = None
    _lost: LatimerError | None = None
    # The task that waits for the first event.
    _task: asyncio.Task[object] | None = None

    def __init__(self, pool: Places, job: Generation, name: str, affinity: Affinity) -> None:
        super().__init__(job, name, affinity)
        self.pool, self.job = pool, job

    async def __aenter__(self) -> AsyncIterator[Batch]:
        """Enter the job's context on an engine; try others while they fail before an event."""
        pool, job = self.pool, self.job
        while True:
            replica = await pool.begin(self, job)
            if self.blocks or self.session is not None:
                pool.keep(self, replica)
            inner = replica.backend.open(job)
            self.begun, self._task = time.monotonic(), asyncio.current_task()
            replica.waiting_first.add(self)
            try:
                batches = self._batches = aiter(await inner.__aenter__())
                self._inner = inner
                self._next = await anext(batches)
            except StopAsyncIteration:
                pass
            except BaseException as error:
                await self._go_on(error, replica)
                continue
            self.first, self._task = time.monotonic(), None
            replica.waiting_first.discard(self)
            return self

    def lose(self, error: LatimerError) -> None:
        """Cancel the step that waits for a lost engine."""
        if self._lost is None and self._task is not None:
            self._lost = error
            self._task.cancel()

    async def _go_on(self, error: BaseException, replica: Replica) -> None:
        """Leave the context of an engine that has failed; raise the error if no other is left."""
        replica.waiting_first.discard(self)
        task, lost, self._task, self._lost = self._task, self._lost, None, None
        if lost and task and isinstance(error, asyncio.CancelledError) and not task.uncancel():
            error = lost
        inner, self._inner = self._inner, None
        try:
            if inner is not None:
                await inner.__aexit__(type(error), error, error.__traceback__)
        except BaseException:
            self.pool.release(self)
            raise
        await self.pool.after(self, error)

    @property
    def is_over(self) -> bool:
        """True if no batch follows, as far as the engine's own batches say that."""
        return getattr(self._batches, "is_over", False)

    def push_to(self, receive: Callable[[Any], bool], as_text: bool) -> Pushed | None:
        """Push what the engine's own batches push, which needs nothing of this object."""
        push_to = getattr(self._batches, "push_to", None)
        return None if push_to is None else push_to(receive, as_text)

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Batch:
        batch, self._next = self._next, None
        if batch is None:
            try:
                batch = await self._batches.__anext__()
            except EngineError as error:
                assert self.replica is not None
                self.pool.blame(self.replica, error)
                raise
        last = batch[-1]
        if isinstance(last, Finish):
            if self.width == 1:
                self.finishes = (last,)
            else:
                ends = [event for event in batch if isinstance(event, Finish)]
                self.finishes = (*self.finishes, *ends)
        return batch

    async def __aexit__(self, *error: object) -> None:
        assert self._inner is not None
        try:
            await self._inner.__aexit__(*error)  # type: ignore[arg-type]
        finally:
            self.pool.release(self)
