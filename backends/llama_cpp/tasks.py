"""What the scheduler works on: jobs, their choices, and what each has come to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..base import Event, Generation, Token, TokenIds
from ..errors import LatimerError
from ..stops import TokenCut
from ..turns import Party
from .cache import Slot
from .grammars import Constraint
from .library import Rows
from .projector import Chunk
from .sampling import Sampler


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
        marks: what tokens of the job's `preserved_tokens` spell.
        mailbox: where its events go, by way of the scheduler's hand-over.
        constraint: the beginning of the job's grammar.
        chunks: embeddings in the prompt, by the place where each begins.
        party: the request that it belongs to.
    """

    job: Generation
    prompt: TokenIds
    prompt_tokens: int
    shown: Sequence[bytes]
    max_tokens: int
    stop_tokens: dict[int, str]
    marks: dict[int, bytes]
    mailbox: Mailbox
    constraint: Constraint | None = None
    chunks: Mapping[int, Chunk] = field(default_factory=dict)
    party: Party = field(default_factory=Party)
    cancelled: bool = False

    @property
    def bos_count(self) -> int:
        """How many tokens stand before the client's own."""
        return len(self.prompt) - self.prompt_tokens


NOWHERE = Rows(-1, -1)


@dataclass(eq=False, slots=True)
class TaskChoice:
    """A choice that waits.

    Args:
        begun: where it was set aside, for want of cells: what goes on when there are some.
        turn: the smaller, the sooner it is its turn; see `Line`.
    """

    task: Task
    index: int
    begun: Run | None = None
    turn: int = 0


@dataclass(eq=False, slots=True)
class Run:
    """A choice that is being generated: what it consists of, and how far that is evaluated.

    Args:
        history: the prompt, and what was drawn.
        wanted: how much of it is to be evaluated.
        scored: the prompt's tokens with their log-probabilities, None where nobody wants them.
        cached: how many of the prompt's tokens were there when it began.
        rows, outputs: where its tokens stand in the batch, and how many of them have logits.
        ready: whether the batch holds its last token, so that another can be drawn.
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
    rows: Rows = NOWHERE
    outputs: int = 0
    ready: bool = False

    @property
    def left(self) -> int:
        """How many tokens are to be evaluated before another can be drawn."""
        return self.wanted - len(self.slot.tokens)
