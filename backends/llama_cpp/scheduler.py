"""The engine's loop: running sequences, one decode a step, one hand-over of events a step.

It owns the context, and lives in one thread; only `submit`, `cancel` and `stop` may be called
from others.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..base import Event, Finish, Generation, Piece, Reason, TokenIds
from ..errors import EngineError, LatimerError
from ..stops import StopMatcher
from .library import Context, DecodeFailed
from .sampling import Sampler
from .vocabulary import Vocabulary


class Mailbox(Protocol):
    """Takes a job's events in the event loop that asked for them."""

    loop: asyncio.AbstractEventLoop

    def deliver(self, events: Sequence[Event] | LatimerError) -> None:
        """Take some events, or the error that ended the job."""
        ...


@dataclass(eq=False, slots=True)
class Task:
    """A job in the engine's hands, and where its events go.

    Args:
        mailbox: where its events go, by way of the scheduler's hand-over.
        max_tokens: tokens to generate at most, the context's end included.
        stop_tokens: control tokens that a stop string spells.
    """

    job: Generation
    prompt: TokenIds
    prompt_tokens: int
    max_tokens: int
    stop_tokens: dict[int, str]
    mailbox: Mailbox
    cancelled: bool = False


@dataclass(eq=False, slots=True)
class _Choice:
    task: Task
    index: int


@dataclass(eq=False, slots=True)
class _Sequence:
    """A choice that is being generated: how far it is evaluated, and what was drawn."""

    id: int
    choice: _Choice
    sampler: Sampler
    matcher: StopMatcher
    pending: TokenIds
    position: int = 0
    drawn: int = 0
    text_size: int = 0
    released: int = 0
    starts: list[int] = field(default_factory=list)
    row: int = -1


Delivery = tuple[Task, "Sequence[Event] | LatimerError"]


class Scheduler:
    """Runs tasks over the sequences of one context.

    Args:
        limit: how many sequences run side by side; the rest wait in the order they came.
        post: takes everything that a step has to deliver, in one call.
    """

    def __init__(
        self,
        context: Context,
        vocabulary: Vocabulary,
        limit: int,
        post: Callable[[list[Delivery]], None],
    ) -> None:
        self._context = context
        self._vocabulary = vocabulary
        self._free = list(range(limit))[::-1]
        self._post = post
        self._inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._waiting: deque[_Choice] = deque()
        self._running: list[_Sequence] = []
        self._outbox: list[Delivery] = []
        self._stopping = False

    def submit(self, task: Task) -> None:
        """Queue a task; thread-safe."""
        self._inbox.put(task)

    def stop(self) -> None:
        """End the loop; tasks that have not finished get an error. Thread-safe."""
        self._inbox.put(None)

    def run(self) -> None:
        """Step until stopped, sleeping while there is nothing to do."""
        while not self._stopping:
            self._receive(block=not self._running and not self._waiting)
            if not self._stopping:
                self.step()
        self._receive(block=False)
        tasks = {c.task: None for c in [*self._waiting, *(s.choice for s in self._running)]}
        for sequence in list(self._running):
            self._release(sequence)
        for task in tasks:
            self._outbox.append((task, EngineError("The engine was shut down.")))
        self._flush()

    def step(self) -> None:
        """Admit, decode once, draw a token for each sequence that is ready, hand over."""
        self._receive(block=False)
        self._drop_cancelled()
        self._admit()
        batch = self._fill()
        if batch:
            try:
                self._context.decode()
            except DecodeFailed as error:
                self._fail(batch, error)
            else:
                for sequence in batch:
                    if sequence.row >= 0:
                        self._draw(sequence)
        self._flush()

    def _receive(self, block: bool) -> None:
        while True:
            try:
                task = self._inbox.get(block)
            except queue.Empty:
                return
            if task is None:
                self._stopping = True
                return
            self._waiting.extend(_Choice(task, index) for index in range(len(task.job.seeds)))
            block = False

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self._running if s.choice.task.cancelled]:
            self._release(sequence)
        if any(choice.task.cancelled for choice in self._waiting):
            self._waiting = deque(c for c in self._waiting if not c.task.cancelled)

    def _admit(self) -> None:
        while self._free and self._waiting:
            choice = self._waiting.popleft()
            task = choice.task
            sampler = Sampler(
                task.job.sampling,
                task.job.seeds[choice.index],
                self._vocabulary,
                task.prompt,
                task.max_tokens,
            )
            matcher = StopMatcher(task.job.stops)
            self._running.append(_Sequence(self._free.pop(), choice, sampler, matcher, task.prompt))

    def _fill(self) -> list[_Sequence]:
        """Put each sequence's next tokens into the batch: single ones first, then prompts."""
        batch: list[_Sequence] = []
        for sequence in sorted(self._running, key=lambda s: len(s.pending) > 1):
            room = self._context.room
            if not room:
                break
            tokens, rest = sequence.pending[:room], sequence.pending[room:]
            row = self._context.add(sequence.id, sequence.position, tokens, not rest)
            sequence.row = -1 if rest else row
            sequence.pending = rest
            sequence.position += len(tokens)
            batch.append(sequence)
        return batch

    def _draw(self, sequence: _Sequence) -> None:
        token = sequence.sampler.sample(self._context, sequence.row)
        sequence.drawn += 1
        sequence.pending = (token,)
        task = sequence.choice.task
        if token in task.stop_tokens:
            self._finish(sequence, "stop", task.stop_tokens[token], sequence.drawn - 1)
            return
        if token in self._vocabulary.ends:
            self._finish(sequence, "end", None, sequence.drawn - 1)
            return
        data = self._vocabulary.pieces[token]
        if data:
            self._outbox.append((task, (Piece(sequence.choice.index, data),)))
        if task.job.stops:
            sequence.starts.append(sequence.text_size)
            sequence.text_size += len(data)
            sequence.released += len(sequence.matcher.feed(data))
            stop = sequence.matcher.stop
            if stop is not None:
                before = sum(start < sequence.released for start in sequence.starts)
                self._finish(sequence, "stop", stop, before)
                return
        if sequence.drawn >= task.max_tokens:
            self._finish(sequence, "length", None, sequence.drawn)

    def _finish(
        self, sequence: _Sequence, reason: Reason, stop: str | None, completion: int
    ) -> None:
        choice = sequence.choice
        finish = Finish(choice.index, reason, stop, choice.task.prompt_tokens, completion)
        self._outbox.append((choice.task, (finish,)))
        self._release(sequence)

    def _fail(self, batch: list[_Sequence], error: DecodeFailed) -> None:
        """End the jobs of a batch that could not be evaluated; the others go on."""
        failed = {sequence.choice.task: None for sequence in batch}
        for task in failed:
            task.cancelled = True
            self._outbox.append((task, EngineError(f"llama.cpp failed: {error}.")))
        self._drop_cancelled()

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        sequence.sampler.close()
        self._context.remove(sequence.id)
        self._free.append(sequence.id)

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._post(outbox)
