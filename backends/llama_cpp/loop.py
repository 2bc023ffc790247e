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


class Worker(Protocol):
    """A user of the engine's thread; all its members are used in that thread only."""

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
        # Seconds of each worker. One that was idle continues from those of the busy one.
        self._seconds = dict.fromkeys(map(id, workers), 0.0)
        self._is_stopping = False

    def submit(self, worker: Worker, task: object) -> None:
        """Queue a task of a worker; thread-safe."""
        self._inbox.put((worker, task))

    def stop(self) -> None:
        """End the loop; unfinished tasks get an error. Thread-safe."""
        self._inbox.put(None)

    def run(self) -> None:
        """Run steps until stopped; sleep while there is nothing to do."""
        while True:
            self._receive(block=not any(worker.is_busy for worker in self._workers))
            if self._is_stopping:
                break
            worker = self._next()
            begun = time.perf_counter()
            try:
                worker.step()
            except Exception as error:
                # After any error, waiting clients need an answer and later requests must work.
                worker.abandon(EngineError(f"The engine failed: {error!r}."))
            self._seconds[id(worker)] += time.perf_counter() - begun
        self._receive(block=False)
        for worker in self._workers:
            worker.abandon(EngineError("The engine was shut down."))

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
        """Take the time away that a worker did not use while it was idle."""
        others = [self._seconds[id(one)] for one in self._workers if one.is_busy]
        if others:
            self._seconds[id(worker)] = max(self._seconds[id(worker)], min(others))
        else:
            self._seconds = dict.fromkeys(self._seconds, 0.0)

    def _next(self) -> Worker:
        workers = self._workers
        if len(workers) == 1:
            return workers[0]
        busy = [worker for worker in workers if worker.is_busy]
        return min(busy, key=lambda worker: self._seconds[id(worker)])
