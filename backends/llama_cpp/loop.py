"""The loop of the engine's thread, which owns every context.

Generation and embeddings are workers of one thread. Each step of a worker evaluates one batch, and
the worker that has had less time is next. So each gets half of the time while both have work, and
one that was idle starts after at most one batch of the other.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import EngineError
from .options import SHUT_DOWN

# Seconds that a worker may save while it is idle: a chat client needs some until its next request.
CREDIT = 0.04


class Worker(Protocol):
    """A user of the engine's thread; all its members are used in that thread only.

    Attributes:
        seconds: the duration of its last step, which the loop sets.
    """

    seconds: float

    @property
    def is_busy(self) -> bool:
        """True if there is something to do in `step`."""
        ...

    def submit(self, task: Any) -> None:
        """Queue a task."""
        ...

    def step(self) -> None:
        """Evaluate one batch, and deliver its results."""
        ...

    def abandon(self, error: EngineError) -> None:
        """End all running and waiting tasks with an error."""
        ...


class Loop:
    """A loop over the steps of some workers; other threads may call `submit` and `stop`."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._inbox: queue.SimpleQueue[tuple[Worker, object] | None] = queue.SimpleQueue()
        # Seconds of each worker. One that was idle continues from a little less than the busy one.
        self._spent = dict.fromkeys(map(id, workers), 0.0)
        self._is_stopping = False

    def submit(self, worker: Worker, task: object) -> None:
        """Queue a task of a worker; thread-safe.

        Raises:
            EngineError: the loop has ended, or is about to.
        """
        self._inbox.put((worker, task))
        # `run` ends every task that is queued before this is set.
        if self._is_stopping:
            raise EngineError(SHUT_DOWN)

    def stop(self) -> None:
        """End the loop; unfinished tasks get an error. Thread-safe."""
        self._inbox.put(None)

    def run(self) -> None:
        """Run steps until stopped; sleep while there is nothing to do."""
        workers, inbox = self._workers, self._inbox
        while True:
            busy = [one for one in workers if one.is_busy]
            if not busy or not inbox.empty():
                self._receive(block=not busy)
                if self._is_stopping:
                    break
                continue
            worker = busy[0] if len(busy) == 1 else min(busy, key=self._time_of)
            begun = time.perf_counter()
            try:
                worker.step()
            except Exception as error:
                # After any error, waiting clients need an answer and later requests must work.
                worker.abandon(EngineError(f"The engine failed: {error!r}."))
            worker.seconds = time.perf_counter() - begun
            self._spent[id(worker)] += worker.seconds
        self._receive(block=False)
        for worker in self._workers:
            worker.abandon(EngineError(SHUT_DOWN))

    def _receive(self, block: bool) -> None:
        while True:
            try:
                found = self._inbox.get(block)
            except queue.Empty:
                return
            if found is None:
                self._is_stopping = True
                return
            worker, task = found
            if not worker.is_busy:
                self._catch_up(worker)
            worker.submit(task)
            block = False

    def _catch_up(self, worker: Worker) -> None:
        """Take the time away that a worker did not use while it was idle, except for `CREDIT`."""
        others = [self._spent[id(one)] for one in self._workers if one.is_busy]
        if others:
            self._spent[id(worker)] = max(self._spent[id(worker)], min(others) - CREDIT)
        else:
            self._spent = dict.fromkeys(self._spent, 0.0)

    def _time_of(self, worker: Worker) -> float:
        return self._spent[id(worker)]
