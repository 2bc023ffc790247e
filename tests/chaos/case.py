"""The definition of a case: its request, the engine's faults, and the expected replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chaos.client import Reply
from chaos.judge import error_of, judge

if TYPE_CHECKING:
    from chaos.stage import Stage

# The engines: doubles, real ones, and ones whose responses are edited on their way.
FAKE_SERVER, FAKE_KOBOLD = "fake-llama-server", "fake-koboldcpp"
REAL, INSIDE = "llama-server", "in-process"
EDITED_SERVER, EDITED_KOBOLD = "edited-llama-server", "edited-koboldcpp"
FAKES = (FAKE_SERVER, FAKE_KOBOLD)
ALL = (*FAKES, REAL, INSIDE)

Act = Callable[["Stage", "Case"], Awaitable[list[str]]]
Check = Callable[[Reply], list[str]]

# Statuses for a broken, an unreachable and a silent engine.
BROKEN, GONE, SILENT = frozenset({502}), frozenset({502, 503}), frozenset({503, 504})
RIGHT = frozenset({200})
# Statuses for a broken engine whose fault can have no effect.
MAYBE = RIGHT | BROKEN
# Statuses for a request beyond a limit.
REFUSED = frozenset({400, 413})
ANSWERED = REFUSED | RIGHT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The ways in which most requests can be sent, with the end of the case's name.
PLAIN_AND_STREAMED: dict[str, dict[str, Any]] = {"": {}, " streamed": {"stream": True}}


async def asks(stage: Stage, case: Case) -> list[str]:
    """Send the request and judge the reply."""
    return judged(await stage.ask(case), case)


def judged(reply: Reply, case: Case) -> list[str]:
    """Return a sentence for each violation in a reply to a case's request."""
    found = judge(reply, case.expect, case.says)
    if case.check is not None and not found and error_of(reply) is None:
        found = case.check(reply)
    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request, the engine's faults, and the expected replies.

    Args:
        kind: the class of the case.
        body: the request's body, or a function that returns it. An object gets a `model`, and a
            prompt that asks for a marker if it has none.
        fault: the engine's fault for this generation, as named in `support.engines.mistakes`.
        calls: its faults for other calls, by path.
        expect: the allowed statuses; an error event of a stream counts as one.
        says: a word that an error's message, param or code must contain.
        check: a further check of a successful reply.
        act: the actions of the client.
        memory: MiB by which the process can grow.
        seconds: how long a reply can take.
        beside: True to send small requests at the same time.
        short: True if the case is part of the short form.
        alone: True if the case starts processes of its own.
    """

    name: str = ""
    kind: str = ""
    engines: tuple[str, ...] = ALL
    body: Mapping[str, Any] | bytes | Callable[[], Mapping[str, Any] | bytes] | None = field(
        default_factory=dict
    )
    path: str = COMPLETIONS
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""
    calls: Mapping[str, str] = field(default_factory=dict)
    expect: frozenset[int] = RIGHT
    says: str = ""
    check: Check | None = None
    act: Act = asks
    memory: float = 64.0
    seconds: float = 10.0
    beside: bool = True
    short: bool = False
    alone: bool = False

    @property
    def made(self) -> Mapping[str, Any] | bytes | None:
        """The request's body."""
        return self.body() if callable(self.body) else self.body
