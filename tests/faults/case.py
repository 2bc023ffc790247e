"""The definition of a case: its request, the engine's faults, and the expected replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faults.client import Reply

if TYPE_CHECKING:
    from faults.stage import Stage

# The engines: a fake llama-server, a fake koboldcpp, a real llama-server, llama.cpp in process.
FAKE_SERVER, FAKE_KOBOLD, REAL, INSIDE = "llama-server", "koboldcpp", "real", "in-process"
ALL = (FAKE_SERVER, FAKE_KOBOLD, REAL, INSIDE)
FAKES = (FAKE_SERVER, FAKE_KOBOLD)

Act = Callable[["Stage", "Case"], Awaitable[list[str]]]
Check = Callable[[Reply], list[str]]

# Statuses for a broken, an unreachable and a silent engine.
BROKEN, GONE, SILENT = frozenset({502}), frozenset({502, 503}), frozenset({503, 504})
RIGHT = frozenset({200})
# Statuses for a request beyond a limit.
REFUSED = frozenset({400, 413})


async def asks(stage: Stage, case: Case) -> list[str]:
    """Send the request and judge the reply."""
    from faults.judge import judged

    return judged(await stage.ask(case, stage.marker()), case)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request, the engine's faults, and the expected replies.

    Args:
        kind: the class of the case.
        body: the request's body, or a function that returns it. An object gets a `model`, and a
            prompt that asks for a marker if it has none.
        fault: the engine's fault for this generation, as named in `mistakes`.
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

    name: str
    kind: str
    engines: tuple[str, ...] = ALL
    body: Mapping[str, Any] | bytes | Callable[[], Mapping[str, Any] | bytes] | None = field(
        default_factory=dict
    )
    path: str = "/v1/completions"
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
