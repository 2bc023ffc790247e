"""The scheduler's tasks: jobs, their choices, and the progress of each choice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base import Batch, Event, Finish, Generation, Piece, Pushed, Token, TokenIds
from ..errors import LatimerError
from ..queue import Ticket
from ..stops import TokenCut
from .cache import Slot
from .drafts import Acceptance, Lookup
from .grammars import Constraint
from .projector import Chunk
from .sampling import Sampler


class Mailbox:
    """The events of one job, and its batches: all events that wait when the reader asks.

    Args:
        choices: the choices of the job, of which each has an end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, choices: int = 1) -> None:
        self.loop = loop
        self._choices = choices
        self._events: list[Event] = []
        self._error: LatimerError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._receive: Callable[[Any], bool] | None = None

    def deliver(self, events: Sequence[Event] | LatimerError) -> None:
        """Receive events, or the error that ended the job; called in the event loop."""
        waiter = self._waiter
        if isinstance(events, LatimerError):
            self._error = events
        elif (
            self._receive is not None
            and waiter is not None
            and not waiter.done()
            and events
            and not isinstance(events[-1], Finish)
        ):
            try:
                if self._receive(events):
                    return
                self._events += events
            except Exception as error:
                waiter.set_exception(error)
                # The error refers to this frame.
                waiter = self._waiter = None
        else:
            self._events += events
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def push_to(self, receive: Callable[[Any], bool], as_text: bool) -> Pushed | None:
        """Push the events of the only choice before its end; see `base.Pushing`.

        They are events also for a receiver of texts, since a character may be incomplete.
        """
        if self._choices != 1:
            return None
        self._receive = receive
        return Pushed(tuple)

    @property
    def is_over(self) -> bool:
        """True if no batch follows."""
        return not self._choices

    def __aiter__(self) -> Mailbox:
        return self

    async def __anext__(self) -> Batch:
        while not self._events:
            if not self._choices:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            await self._waiter
        batch, self._events = self._events, []
        self._choices -= sum(isinstance(event, Finish) for event in batch)
        return batch


@dataclass(eq=False, slots=True)
class Task:
    """A job that was submitted to the engine, and the receiver of its events.

    Args:
        prompt: the tokens to evaluate; a BOS that was added is the first of them.
        prompt_tokens: the number of the client's own tokens in `prompt`.
        shown: the bytes of each of the client's own tokens, if the job asks for them.
        max_tokens: the maximum number of tokens to generate, bounded by the context length.
        stop_tokens: the control tokens that spell a stop sequence, and that sequence.
        preserved: the tokens of the job's `preserved_tokens`, and their spellings.
        mailbox: the receiver of the events that the scheduler delivers.
        constraint: a constraint at the start of the job's grammar.
        chunks: the chunks of embeddings in the prompt, by the position where each begins.
        ticket: the request that the task belongs to.
        is_whole: True if nobody needs the events of a choice before its end. The scheduler then
            delivers them together, and does not wake the event loop for each token.
        prediction: the tokens that the answer is expected to repeat.
        since: the time at which it was made (`time.monotonic`).
        runs: its choices that are being generated, or were.
    """

    job: Generation
    prompt: TokenIds
    prompt_tokens: int
    shown: Sequence[bytes]
    max_tokens: int
    stop_tokens: dict[int, str]
    preserved: dict[int, bytes]
    mailbox: Mailbox
    constraint: Constraint | None = None
    chunks: Mapping[int, Chunk] = field(default_factory=dict)
    ticket: Ticket = field(default_factory=Ticket)
    is_whole: bool = False
    prediction: TokenIds = ()
    cancelled: bool = False
    since: float = field(default_factory=time.monotonic)
    runs: list[Run] = field(default_factory=list)

    def note_tokens(self) -> None:
        """Note the tokens that were evaluated and generated for a task that has no end.

        Of a task that has not begun, note the wait.
        """
        ticket, runs, own = self.ticket, self.runs, self.prompt_tokens
        if not runs:
            ticket.note_wait(self.since)
        # A sequence that was preempted or has ended may have left the KV cache.
        tokens = (own if run.sampled else len(run.slot.tokens) for run in runs)
        evaluated = min(max(tokens, default=0), own)
        ticket.prompt += evaluated
        ticket.looked_up += evaluated
        # The choices of a prompt share what the first one has evaluated.
        ticket.cached += min(runs[0].cached, evaluated) if runs else 0
        ticket.generated += sum(
            run.sampled if run.completion is None else run.completion for run in runs
        )

    @property
    def bos_count(self) -> int:
        """The number of tokens before the client's own."""
        return len(self.prompt) - self.prompt_tokens


@dataclass(eq=False, slots=True)
class TaskChoice:
    """A choice that waits.

    Args:
        preempted: the run to resume, if it was preempted for lack of cells.
        turn: its number in the queue, smallest first; see `FairQueue`.
    """

    task: Task
    index: int
    preempted: Run | None = None
    turn: int = 0

    @property
    def ticket(self) -> Ticket:
        """The request that it belongs to."""
        return self.task.ticket


@dataclass(eq=False, slots=True)
class Run:
    """A choice that is being generated.

    Args:
        history: the prompt's tokens and the sampled ones.
        wanted: the number of these tokens to evaluate.
        scored: the prompt's tokens that are scored so far; None unless the prompt is being scored.
        cached: the number of the prompt's tokens that were reused from the prompt cache.
        sampled: the number of sampled tokens.
        completion: those that count, without a token that ends it; None until it has ended.
        row, outputs: the first row of its logits in the batch, and the number of rows.
        ready: True if the batch has its last token, so that the next can be sampled.
        held: the pieces that are delivered at its end.
        lookup: the index from which it gets drafts; None if it gets none.
        guesses: the acceptance of the draft model's tokens; None if it gets none.
        proposal: a draft that is not evaluated yet.
        draft: the tokens of its draft that were evaluated, but not yet sampled.
        source: the acceptance of the source of this draft.
        drafted, accepted: the numbers of tokens in all drafts, and of those that were accepted.
        is_due: True if a round of batches with a part of all sequences has left it for later.
        marks: the lengths at which its sequence gets checkpoints; None if it gets none.
    """

    choice: TaskChoice
    slot: Slot
    sampler: Sampler
    cut: TokenCut
    history: list[int]
    wanted: int
    scored: list[Token] | None = None
    cached: int = 0
    sampled: int = 0
    completion: int | None = None
    row: int = -1
    outputs: int = 0
    ready: bool = False
    held: list[Piece] = field(default_factory=list)
    lookup: Lookup | None = None
    guesses: Acceptance | None = None
    proposal: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    source: Acceptance | None = None
    drafted: int = 0
    accepted: int = 0
    is_due: bool = False
    marks: list[int] | None = None

    @property
    def left(self) -> int:
        """The number of tokens to evaluate before the next can be sampled."""
        return self.wanted - len(self.slot.tokens)
