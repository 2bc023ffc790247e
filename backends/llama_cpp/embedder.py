"""Embeddings in the engine's thread: each step evaluates one batch of the inputs of all tasks."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..base import TokenIds
from ..errors import EngineError
from .embedding_context import EmbeddingContext
from .library import DecodeFailed
from .loop import Worker
from .options import ENGINE

# Seconds of a batch while the thread also generates: at most, since it delays a first token, and at
# least. In between, it takes as long as this number of the generator's steps.
MOST_SECONDS, LEAST_SECONDS, STEPS = 0.04, 0.005, 20
# Tokens of the first batch, before the speed is known, and of the smallest one.
FIRST, LEAST = 16, 8

Vector: TypeAlias = "array[float]"


@dataclass(eq=False, slots=True)
class EmbeddingTask:
    """The inputs of a job, and a future for their vectors.

    For pooling `rank`, each vector has one element: the score. Cancelling the future drops the
    inputs that are not evaluated yet.
    """

    inputs: Sequence[TokenIds]
    future: Future[list[Vector]] = field(default_factory=Future)
    begun: int = 0
    found: dict[int, Vector] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Input:
    """An input in the context; `done` of its tokens are evaluated."""

    task: EmbeddingTask
    index: int
    sequence: int
    done: int = 0

    @property
    def ids(self) -> TokenIds:
        """The tokens of the input."""
        return self.task.inputs[self.index]


class Embedder:
    """A scheduler of inputs over an embedding context; tasks take turns, input by input.

    Args:
        generator: the worker that generates in the same thread, so that a batch must be short.
    """

    def __init__(self, context: EmbeddingContext, generator: Worker | None) -> None:
        self.context = context
        self._most = context.usual
        self._generator = generator
        self.seconds = 0.0
        self._wanted = self._most if generator is None else min(FIRST, self._most)
        self._tasks: deque[EmbeddingTask] = deque()
        self._running: list[Input] = []
        self._free = list(range(context.sequences))

    @property
    def is_busy(self) -> bool:
        """True if inputs are evaluated or wait."""
        return bool(self._tasks or self._running)

    def submit(self, task: EmbeddingTask) -> None:
        """Queue a task."""
        self._tasks.append(task)

    def abandon(self, error: EngineError) -> None:
        """End all tasks with an error."""
        for task in {id(task): task for task in self._all()}.values():
            _fail(task, error)
        self._tasks.clear()
        self._running.clear()
        self._free = list(range(self.context.sequences))
        self.context.clear()

    def step(self) -> None:
        """Evaluate one batch, and complete the tasks whose inputs are all evaluated."""
        self._drop_cancelled()
        batch = self._fill()
        if not batch:
            return
        count, begun = self.context.used, time.perf_counter()
        try:
            self.context.decode()
        except DecodeFailed as error:
            self._drop(batch, EngineError(f"{ENGINE} failed: {error}."))
            return
        self._collect([one for one in batch if one.done == len(one.ids)])
        if self._generator is not None:
            speed = count / (time.perf_counter() - begun)
            seconds = min(max(STEPS * self._generator.seconds, LEAST_SECONDS), MOST_SECONDS)
            wanted = min(int(speed * seconds), 2 * self._wanted, self._most)
            self._wanted = max(wanted, LEAST)

    def _all(self) -> list[EmbeddingTask]:
        return [*self._tasks, *(one.task for one in self._running)]

    def _fill(self) -> list[Input]:
        """Add tokens to the batch: those of inputs that have begun, then whole inputs in turn."""
        batch = [one for one in self._running if self._add(one)]
        while self._free and self._tasks and self.context.used < self._wanted:
            task = self._tasks[0]
            one = Input(task, task.begun, self._free[-1])
            if not self._add(one):
                break
            self._free.pop()
            self._running.append(one)
            batch.append(one)
            task.begun += 1
            self._tasks.popleft()
            if task.begun < len(task.inputs):
                self._tasks.append(task)
        return batch

    def _add(self, one: Input) -> bool:
        """Add as many tokens of an input as fit; all of them if it cannot be split."""
        context = self.context
        left, room = len(one.ids) - one.done, self._wanted - context.used
        count = min(left, max(room, 0))
        if count < left and not context.splits:
            # A long input has a batch of its own.
            count = 0 if context.used else left
        if count:
            context.add(one.sequence, one.done, one.ids[one.done : one.done + count])
            one.done += count
        return count > 0

    def _collect(self, done: Sequence[Input]) -> None:
        if not done:
            return
        rows = np.stack([self.context.vector(one.sequence) for one in done])
        ranks = self.context.pooling == "rank"
        vectors = [array("f", row.tobytes()) for row in (rows if ranks else _normalised(rows))]
        for one, vector, row in zip(done, vectors, rows, strict=True):
            self._leave(one)
            if not np.isfinite(row).all() or not (ranks or row.any()):
                message = f"{ENGINE} computed an embedding without a direction."
                _fail(one.task, EngineError(message))
                continue
            one.task.found[one.index] = vector
            if len(one.task.found) == len(one.task.inputs) and not one.task.future.done():
                found = [one.task.found[index] for index in range(len(one.task.inputs))]
                if one.task.future.set_running_or_notify_cancel():
                    one.task.future.set_result(found)

    def _leave(self, one: Input) -> None:
        self._running.remove(one)
        self._free.append(one.sequence)
        self.context.remove(one.sequence)

    def _drop(self, batch: Sequence[Input], error: EngineError) -> None:
        """End the tasks of a batch that could not be evaluated; the others continue."""
        for one in batch:
            _fail(one.task, error)
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        if any(task.future.done() for task in self._all()):
            self._tasks = deque(task for task in self._tasks if not task.future.done())
            for one in [one for one in self._running if one.task.future.done()]:
                self._leave(one)


def _fail(task: EmbeddingTask, error: EngineError) -> None:
    if not task.future.done() and task.future.set_running_or_notify_cancel():
        task.future.set_exception(error)


def _normalised(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors of unit length; a zero vector stays as it is."""
    wide = rows.astype(np.float64)
    norms = np.sqrt((wide * wide).sum(axis=1, keepdims=True))
    norms[norms == 0] = 1.0
    result: NDArray[np.float32] = (wide / norms).astype(np.float32)
    return result
