"""A question to an engine whether it is ready, and the state of the engine that it finds."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from ..backends.errors import LatimerError, ModelLoading

if TYPE_CHECKING:
    from ..backends.fleet.replica import State

# The reason if the app is closed before an engine has answered.
ENDS = "The server ends."


@dataclass(eq=False, slots=True)
class Question:
    """A question to an engine whether it is ready.

    Args:
        task: the question.
        since: the time at which it was asked (`time.monotonic`).
        patience: the seconds after which an engine without an answer is unavailable.
        before: the state of the engine until then, and the reason.
        holds: the seconds for which that state holds; the engine is loading afterwards.

    Attributes:
        took: the seconds until its end.
    """

    task: asyncio.Task[None]
    since: float
    patience: float
    before: tuple[State, str]
    holds: float = math.inf
    took: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        self.task.add_done_callback(self._note_end)

    def _note_end(self, _: object) -> None:
        self.took = monotonic() - self.since

    @property
    def found(self) -> tuple[State, str]:
        """The state of the engine, and the reason."""
        if not self.task.done():
            waited = monotonic() - self.since
            if waited >= self.patience:
                return "unavailable", f"The engine has not answered for {waited:.0f} s."
            state, reason = self.before if waited <= self.holds else ("loading", "")
            if reason or state == "ready":
                return state, reason
            return state, f"The engine has not answered within {waited:.2g} s."
        if self.task.cancelled():
            return "unavailable", ENDS
        if self.error is None:
            return "ready", ""
        if self.reason:
            return _state_by(self.error), self.reason
        raise self.error

    @property
    def error(self) -> BaseException | None:
        """The error of a question that has ended."""
        return None if self.task.cancelled() else self.task.exception()

    @property
    def reason(self) -> str:
        """The reason of a question that has ended with the engine unavailable; or empty."""
        error = self.error
        return error.message if isinstance(error, LatimerError) else ""


def _state_by(error: BaseException) -> State:
    """Return the state of an engine that has answered with an error, or not at all."""
    return "loading" if isinstance(error, ModelLoading) else "unavailable"
