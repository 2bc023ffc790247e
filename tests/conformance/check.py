"""Checks, their levels and their verdicts."""

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
    """A broken promise. The message names the expected and the actual behaviour."""


class Unsupported(Exception):
    """A clean rejection of a valid request, by an error object that names the missing feature."""


class Diverges(Exception):
    """A difference from OpenAI's behaviour where the contract is silent or tolerant."""


class Skip(Exception):
    """An inconclusive run: the model's answer did not reach the behaviour in question."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one promise.

    Args:
        id: `group.name`, stable across versions.
        promise: the promised behaviour, in one sentence.
        level: must: clients break without it; should: OpenAI does it; may: reported only.
        source: the section of the contract, with the mark of its origin, such as `[SPEC]`.
        run: raises `Fail`, `Unsupported`, `Diverges` or `Skip`; returns if the promise holds.
        alone: True if no other check may run at the same time.
        seconds: the time limit.
        chance: for a check that draws samples, or allows exceptions: how often it is wrong in one
            run, about a server that is right, and about one that is not.
    """

    id: str
    promise: str
    level: Level
    source: str
    run: Body
    alone: bool = False
    seconds: float = 20.0
    chance: str = ""

    @property
    def group(self) -> str:
        """The group of the check, which is the first part of its id."""
        return self.id.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.

    Args:
        detail: the expected and the actual behaviour, or the reason for a skip; empty for a pass.
        runs, passes: the number of runs, and of runs that passed; no run if the suite ended before
            the check did.
        seconds: the duration of the last run.
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
        """True if a client that depends on the promise can break."""
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
    chance: str = "",
) -> Callable[[Body], Body]:
    """Register a check; see `Check`."""

    def register(run: Body) -> Body:
        assert id not in _checks, id
        _checks[id] = Check(id, promise, level, source, run, alone, seconds, chance)
        return run

    return register


def all_checks() -> list[Check]:
    """Return all checks, in the order of their groups."""
    from . import checks

    return sorted(_checks.values(), key=lambda one: checks.GROUPS.index(one.group))


def expect(condition: object, message: str) -> None:
    """Raise `Fail` with a message unless a condition is true.

    The message names the expected and the actual behaviour.
    """
    if not condition:
        raise Fail(message)
