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
from ..errors import EngineError, InvalidGrammar, LatimerError
from ..stops import StopMatcher
from .cache import Cache, Slot
from .grammars import Candidates, Constraint, TooComplex
from .library import Context, DecodeFailed, Rows
from .sampling import DeadEnd, Sampler
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
        constraint: the beginning of the job's grammar.
    """

    job: Generation
    prompt: TokenIds
    prompt_tokens: int
    shown: Sequence[bytes]
    max_tokens: int
    stop_tokens: dict[int, str]
    mailbox: Mailbox
    constraint: Constraint | None = None
    cancelled: bool = False

    @property
    def hidden(self) -> int:
        """How many tokens stand before the client's own."""
        return len(self.prompt) - self.prompt_tokens


_NOWHERE = Rows(-1, -1)


@dataclass(eq=False, slots=True)
class _Choice:
    """A choice that waits.

    Args:
        begun: where it was set aside, for want of cells: what goes on when there are some.
    """

    task: Task
    index: int
    begun: _Sequence | None = None


@dataclass(eq=False, slots=True)
class _Sequence:
    """A choice that is being generated: what it consists of, and how far that is evaluated.

    Args:
        history: the prompt, and what was drawn.
        wanted: how much of it is to be evaluated.
        scored: the prompt's tokens with their log-probabilities, None where nobody wants them.
        cached: how many of the prompt's tokens were there when it began.
        rows, outputs: where its tokens stand in the batch, and how many of them have logits.
        ready: whether the batch holds its last token, so that another can be drawn.
    """

    choice: _Choice
    slot: Slot
    sampler: Sampler
    matcher: StopMatcher
    history: list[int]
    wanted: int
    scored: list[Token] | None = None
    cached: int = 0
    drawn: int = 0
    text_size: int = 0
    released: int = 0
    starts: list[int] = field(default_factory=list)
    rows: Rows = _NOWHERE
    outputs: int = 0
    ready: bool = False

    @property
    def left(self) -> int:
        """How many tokens are to be evaluated before another can be drawn."""
        return self.wanted - len(self.slot.tokens)


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
        cache: Cache,
        candidates: Candidates,
        limit: int,
        post: Callable[[list[Delivery]], None],
    ) -> None:
        self._context = context
        self._vocabulary = vocabulary
        self._cache = cache
        self._candidates = candidates
        self._limit = limit
        self._post = post
        self._inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._waiting: deque[_Choice] = deque()
        self._running: list[_Sequence] = []
        # Nothing is admitted before something has ended where the first did not fit.
        self._full = False
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
            if self._stopping:
                break
            try:
                self.step()
            except Exception as error:
                # Whatever it is, those who wait must hear of it, and the next must be answered.
                self._abandon(EngineError(f"The engine failed: {error!r}."))
        self._receive(block=False)
        self._abandon(EngineError("The engine was shut down."))

    def _abandon(self, error: EngineError) -> None:
        """End everything that runs or waits with an error."""
        begun = [choice.begun for choice in self._waiting if choice.begun is not None]
        tasks = {c.task: None for c in [*self._waiting, *(s.choice for s in self._running)]}
        for sequence in [*begun, *self._running]:
            sequence.sampler.close()
        for sequence in self._running:
            self._cache.drop(sequence.slot)
        self._waiting.clear()
        self._running.clear()
        self._context.clear()
        self._full = False
        self._outbox = [(task, error) for task in tasks]
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
                        for one in self._forked(sequence):
                            self._draw(one)
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
            # The first choice evaluates the prompt for all; the others follow then.
            self._waiting.append(_Choice(task, 0))
            block = False

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self._running if s.choice.task.cancelled]:
            self._release(sequence)
        if any(choice.task.cancelled for choice in self._waiting):
            for choice in self._waiting:
                if choice.task.cancelled and choice.begun is not None:
                    choice.begun.sampler.close()
            self._waiting = deque(c for c in self._waiting if not c.task.cancelled)
            self._full = False

    def _admit(self) -> None:
        """Begin what waits, or go on with it, while there are a sequence and cells for it."""
        while self._waiting and not self._full and len(self._running) < self._limit:
            choice = self._waiting[0]
            begun, task = choice.begun, choice.task
            scoring = task.job.prompt_logprobs is not None and choice.index == 0
            history = [*task.prompt] if begun is None else begun.history
            wanted = len(history)
            if scoring and task.max_tokens == 0:
                # The last token's logits would only score a token that nobody wants.
                wanted = len(history) - 1
            # Those that run need a cell each to go on.
            spare = len(self._running)
            slot = self._cache.take(history[:wanted], task.job.owner, not scoring, spare)
            if slot is None:
                self._full = True
                return
            self._waiting.popleft()
            if begun is None:
                sequence = self._begun(choice, slot, history, wanted)
            else:
                sequence, begun.slot, choice.begun = begun, slot, None
            self._running.append(sequence)
            if scoring and sequence.drawn == 0:
                self._begin_scoring(sequence)

    def _begun(self, choice: _Choice, slot: Slot, history: list[int], wanted: int) -> _Sequence:
        task = choice.task
        job = task.job
        seed = job.seeds[choice.index]
        constraint = None if task.constraint is None else task.constraint.copy()
        sampler = Sampler(
            job.sampling,
            seed,
            self._vocabulary,
            task.prompt,
            task.max_tokens,
            self._cache.size,
            constraint,
        )
        matcher = StopMatcher(job.stops)
        cached = max(slot.reused - task.hidden, 0)
        return _Sequence(choice, slot, sampler, matcher, history, wanted, cached=cached)

    def _begin_scoring(self, sequence: _Sequence) -> None:
        task = sequence.choice.task
        spelling, control = self._vocabulary.token(task.prompt[task.hidden])
        first = task.shown[0]
        spelling = spelling if control else first
        token = Token(task.prompt[task.hidden], first, spelling, control, None)
        sequence.scored = [token]
        if not sequence.wanted or (task.max_tokens == 0 and task.prompt_tokens == 1):
            self._end_scoring(sequence)

    def _fill(self) -> list[_Sequence]:
        """Put each sequence's next tokens into the batch: single ones first, then prompts."""
        batch: list[_Sequence] = []
        for sequence in sorted(self._running, key=lambda s: s.left > 1):
            room = self._context.room
            if not room or not self._context.output_room:
                break
            if sequence not in self._running:
                continue
            scoring = sequence.scored is not None
            count = min(sequence.left, room, self._context.output_room if scoring else room)
            count = self._make_room(sequence, count, batch)
            if not count:
                continue
            position = len(sequence.slot.tokens)
            tokens = sequence.history[position : position + count]
            self._cache.extend(sequence.slot, tokens)
            sequence.ready = sequence.left == 0
            sequence.outputs = count if scoring else int(sequence.ready)
            sequence.rows = self._context.add(sequence.slot.id, position, tokens, sequence.outputs)
            batch.append(sequence)
        return batch

    def _make_room(self, sequence: _Sequence, count: int, batch: Sequence[_Sequence]) -> int:
        """How many of a sequence's tokens there are cells for, 0 where it has to wait.

        What rests is forgotten first; then the sequences that began last are set aside.
        """
        while not self._cache.make_room(count):
            if self._cache.free:
                return self._cache.free
            others = [one for one in self._running if one not in batch]
            self._set_aside(others[-1])
            if others[-1] is sequence:
                return 0
        return count

    def _set_aside(self, sequence: _Sequence) -> None:
        """Free a sequence's cells; it waits, first of all, to go on."""
        self._running.remove(sequence)
        self._cache.stow(sequence.slot)
        sequence.scored = None
        sequence.choice.begun = sequence
        self._waiting.appendleft(sequence.choice)

    def _score(self, sequence: _Sequence) -> None:
        """Score the prompt's tokens that follow those of the batch."""
        task, scored = sequence.choice.task, sequence.scored
        assert scored is not None
        position = len(sequence.slot.tokens)
        start = position - sequence.outputs
        # What comes before the first of the client's own tokens scores nothing that is shown.
        skipped = max(task.hidden - start, 0)
        followers = range(start + skipped + 1, min(position + 1, len(task.prompt)))
        if followers:
            tokens = []
            for at in followers:
                spelling, control = self._vocabulary.token(task.prompt[at])
                data = task.shown[at - task.hidden]
                tokens.append((task.prompt[at], data, spelling if control else data, control))
            logits = self._context.logits(sequence.rows.output + skipped, len(tokens))
            scored += score(logits, tokens, task.job.prompt_logprobs or 0, self._vocabulary)
        if not sequence.left:
            self._end_scoring(sequence)

    def _end_scoring(self, sequence: _Sequence) -> None:
        """Tell the prompt's tokens."""
        task, scored = sequence.choice.task, sequence.scored
        assert scored is not None
        sequence.scored = None
        self._outbox.append((task, (PromptTokens(0, scored),)))
        if task.max_tokens:
            return
        sequence.ready = False
        others = range(1, len(task.job.seeds))
        finishes = [Finish(index, "length", None, task.prompt_tokens, 0) for index in others]
        self._outbox.append((task, finishes))
        self._finish(sequence, "length", None, 0)

    def _forked(self, sequence: _Sequence) -> list[_Sequence]:
        """A sequence that is ready, and with a prompt's first choice all others of its task.

        They draw from the same logits. Those for which there is no sequence wait, first of all.
        """
        choice, task = sequence.choice, sequence.choice.task
        if sequence.drawn or choice.index or len(task.job.seeds) == 1:
            return [sequence]
        found = [sequence]
        others = deque(_Choice(task, index) for index in range(1, len(task.job.seeds)))
        while others and len(self._running) < self._limit:
            slot = self._cache.fork(sequence.slot)
            if slot is None:
                break
            fork = self._begun(others.popleft(), slot, [*task.prompt], len(task.prompt))
            fork.rows, fork.outputs = sequence.rows, sequence.outputs
            self._running.append(fork)
            found.append(fork)
        self._waiting.extendleft(reversed(others))
        return found

    def _draw(self, sequence: _Sequence) -> None:
        task = sequence.choice.task
        try:
            token = sequence.sampler.sample(self._context, sequence.rows, self._candidates)
        except (DeadEnd, TooComplex) as error:
            param = task.job.grammar.param if task.job.grammar is not None else ""
            self._end(task, InvalidGrammar(param, f"it left nothing to go on with: {error}"))
            return
        sequence.drawn += 1
        sequence.history.append(token)
        sequence.wanted += 1
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
        finish = Finish(choice.index, reason, stop, prompt_tokens, completion, sequence.cached, end)
        self._outbox.append((choice.task, (finish,)))
        self._release(sequence)

    def _fail(self, batch: list[_Sequence], error: DecodeFailed) -> None:
        """End the jobs of a batch that could not be evaluated; the others go on."""
        failed = {sequence.choice.task: None for sequence in batch}
        for task in failed:
            self._end(task, EngineError(f"llama.cpp failed: {error}."))
        for sequence in batch:
            self._running.remove(sequence)
            sequence.sampler.close()
            self._cache.drop(sequence.slot)
        self._drop_cancelled()
        self._full = False

    def _end(self, task: Task, error: LatimerError) -> None:
        """Tell a task of an error; what runs or waits of it is dropped with the next step."""
        task.cancelled = True
        self._outbox.append((task, error))

    def _release(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        sequence.sampler.close()
        self._cache.rest(sequence.slot, alone=not self._running)
        self._full = False

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._post(outbox)
