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

from ..base import Event, Finish, Generation, Piece, PromptTokens, Reason, Token, TokenIds
from ..errors import EngineError, LatimerError
from ..stops import StopMatcher
from .library import Context, DecodeFailed, Rows
from .sampling import Sampler
from .scoring import score
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
        prompt: what is evaluated; a BOS that was added to it is its first token.
        prompt_tokens: how many of them are the client's own.
        shown: the bytes that each of the client's own tokens shows, where they are asked for.
        max_tokens: tokens to generate at most, the context's end included.
        stop_tokens: control tokens that a stop string spells.
        mailbox: where its events go, by way of the scheduler's hand-over.
    """

    job: Generation
    prompt: TokenIds
    prompt_tokens: int
    shown: Sequence[bytes]
    max_tokens: int
    stop_tokens: dict[int, str]
    mailbox: Mailbox
    cancelled: bool = False

    @property
    def hidden(self) -> int:
        """How many tokens stand before the client's own."""
        return len(self.prompt) - self.prompt_tokens


_NOWHERE = Rows(-1, -1)


@dataclass(eq=False, slots=True)
class _Choice:
    task: Task
    index: int


@dataclass(eq=False, slots=True)
class _Sequence:
    """A choice that is being generated: how far it is evaluated, and what was drawn.

    Args:
        scored: the prompt's tokens with their log-probabilities, None where nobody wants them.
        rows, outputs: where its tokens stand in the batch, and how many of them have logits.
        ready: whether the batch holds its last token, so that another can be drawn.
    """

    id: int
    choice: _Choice
    sampler: Sampler
    matcher: StopMatcher
    pending: TokenIds
    scored: list[Token] | None = None
    position: int = 0
    drawn: int = 0
    text_size: int = 0
    released: int = 0
    starts: list[int] = field(default_factory=list)
    rows: Rows = _NOWHERE
    outputs: int = 0
    ready: bool = False


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
                    if sequence.scored is not None and sequence.outputs:
                        self._score(sequence)
                    if sequence.ready:
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
            # The first choice scores the prompt for all of them; the others follow then.
            first = task.job.prompt_logprobs is not None
            choices = range(1 if first else len(task.job.seeds))
            self._waiting.extend(_Choice(task, index) for index in choices)
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
            sequence = _Sequence(self._free.pop(), choice, sampler, matcher, task.prompt)
            self._running.append(sequence)
            if task.job.prompt_logprobs is not None and choice.index == 0:
                self._begin_scoring(sequence)

    def _begin_scoring(self, sequence: _Sequence) -> None:
        task = sequence.choice.task
        spelling, control = self._vocabulary.token(task.prompt[task.hidden])
        first = task.shown[0]
        spelling = spelling if control else first
        token = Token(task.prompt[task.hidden], first, spelling, control, None)
        sequence.scored = [token]
        if task.max_tokens == 0:
            # The last token's logits would only score a token that nobody wants.
            sequence.pending = task.prompt[:-1]
            if not sequence.pending or task.prompt_tokens == 1:
                self._end_scoring(sequence)

    def _fill(self) -> list[_Sequence]:
        """Put each sequence's next tokens into the batch: single ones first, then prompts."""
        batch: list[_Sequence] = []
        for sequence in sorted(self._running, key=lambda s: len(s.pending) > 1):
            room = self._context.room
            if not room or not self._context.output_room:
                break
            scoring = sequence.scored is not None
            tokens = sequence.pending[: min(room, self._context.output_room) if scoring else room]
            sequence.pending = sequence.pending[len(tokens) :]
            sequence.ready = not sequence.pending
            sequence.outputs = len(tokens) if scoring else int(sequence.ready)
            sequence.rows = self._context.add(
                sequence.id, sequence.position, tokens, sequence.outputs
            )
            sequence.position += len(tokens)
            batch.append(sequence)
        return batch

    def _score(self, sequence: _Sequence) -> None:
        """Score the prompt's tokens that follow those of the batch."""
        task, scored = sequence.choice.task, sequence.scored
        assert scored is not None
        start = sequence.position - sequence.outputs
        # What comes before the first of the client's own tokens scores nothing that is shown.
        skipped = max(task.hidden - start, 0)
        followers = range(start + skipped + 1, min(sequence.position + 1, len(task.prompt)))
        if followers:
            tokens = []
            for at in followers:
                spelling, control = self._vocabulary.token(task.prompt[at])
                data = task.shown[at - task.hidden]
                tokens.append((task.prompt[at], data, spelling if control else data, control))
            logits = self._context.logits(sequence.rows.output + skipped, len(tokens))
            scored += score(logits, tokens, task.job.prompt_logprobs or 0, self._vocabulary)
        if not sequence.pending:
            self._end_scoring(sequence)

    def _end_scoring(self, sequence: _Sequence) -> None:
        """Tell the prompt's tokens; the other choices may follow."""
        task, scored = sequence.choice.task, sequence.scored
        assert scored is not None
        sequence.scored = None
        self._outbox.append((task, (PromptTokens(0, scored),)))
        others = range(1, len(task.job.seeds))
        if task.max_tokens:
            self._waiting.extendleft(_Choice(task, index) for index in reversed(others))
            return
        sequence.ready = False
        finishes = [Finish(index, "length", None, task.prompt_tokens, 0) for index in others]
        self._outbox.append((task, finishes))
        self._finish(sequence, "length", None, 0)

    def _draw(self, sequence: _Sequence) -> None:
        token = sequence.sampler.sample(self._context, sequence.rows.last)
        sequence.drawn += 1
        sequence.pending = (token,)
        task = sequence.choice.task
        if token in task.stop_tokens:
            self._finish(sequence, "stop", task.stop_tokens[token], sequence.drawn - 1)
            return
        told = self._told(sequence, token) if task.job.logprobs is not None else ()
        if token in self._vocabulary.ends:
            self._finish(sequence, "end", None, sequence.drawn - 1, *told)
            return
        data = self._vocabulary.pieces[token]
        if data or told:
            self._outbox.append((task, (Piece(sequence.choice.index, data, told),)))
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

    def _told(self, sequence: _Sequence, token: int) -> list[Token]:
        """The token that was drawn, with the log-probabilities of its place."""
        logits = self._context.logits(sequence.rows.output + sequence.outputs - 1, 1)
        spelling, control = self._vocabulary.token(token)
        data = b"" if token in self._vocabulary.ends else self._vocabulary.pieces[token]
        drawn = (token, data, spelling, control)
        return score(logits, [drawn], sequence.choice.task.job.logprobs or 0, self._vocabulary)

    def _finish(
        self,
        sequence: _Sequence,
        reason: Reason,
        stop: str | None,
        completion: int,
        end: Token | None = None,
    ) -> None:
        choice = sequence.choice
        prompt_tokens = choice.task.prompt_tokens
        finish = Finish(choice.index, reason, stop, prompt_tokens, completion, end=end)
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
