"""Checks and verdicts: what a promise is, and what became of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from .target import Api, Exchange

Level: TypeAlias = Literal["must", "should", "may"]
Outcome: TypeAlias = Literal["pass", "fail", "unsupported", "diverges", "skip", "flaky", "timeout"]
Body: TypeAlias = "Callable[[Api], Awaitable[None]]"


class Fail(Exception):
    """The promise is broken; the message says what was expected and what came."""


class Unsupported(Exception):
    """The server refused a valid request cleanly: by an error object that names what it lacks."""


class Diverges(Exception):
    """The server does otherwise than OpenAI, where the contract is silent or tolerant."""


class Skip(Exception):
    """Nothing could be found out: the model's answer did not come to the point in question."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise.

    Args:
        id: `group.name`, stable over versions.
        promise: what holds, in one sentence.
        level: must: clients break without it; should: OpenAI does it; may: told, never blamed.
        source: the contract's section, and the mark of where that has it from.
        run: raises `Fail`, `Unsupported`, `Diverges` or `Skip`; returns where the promise holds.
        alone: whether it must not run beside others.
        seconds: how long it may take.
    """

    id: str
    promise: str
    level: Level
    source: str
    run: Body
    alone: bool = False
    seconds: float = 20.0

    @property
    def group(self) -> str:
        """The first part of its id."""
        return self.id.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a check.

    Args:
        detail: what was expected and what came, or why nothing was found out; empty for a pass.
        runs, passes: how often it was tried, and how often it held.
        seconds: how long the last run took.
        exchanges: the requests of the last run and their replies.
    """

    check: Check
    outcome: Outcome
    detail: str = ""
    runs: int = 1
    passes: int = 0
    seconds: float = 0.0
    exchanges: Sequence[Exchange] = field(default=())

    @property
    def broken(self) -> bool:
        """Whether a client that depends on the promise would suffer."""
        return self.outcome in ("fail", "flaky", "timeout")


_checks: dict[str, Check] = {}


def check(
    id: str,  # noqa: A002
    promise: str,
    level: Level,
    source: str,
    *,
    alone: bool = False,
    seconds: float = 20.0,
) -> Callable[[Body], Body]:
    """Register a check; see `Check`."""

    def register(run: Body) -> Body:
        assert id not in _checks, id
        _checks[id] = Check(id, promise, level, source, run, alone, seconds)
        return run

    return register


def all_checks() -> list[Check]:
    """Every check, in the order in which the groups are told."""
    from . import checks

    return sorted(_checks.values(), key=lambda one: checks.GROUPS.index(one.group))


def expect(condition: object, message: str) -> None:
    """Raise `Fail` unless a condition holds; the message says what was expected and what came."""
    if not condition:
        raise Fail(message)
