"""A case: what is sent, which faults the engine has, and what may come back."""

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

# What an engine's fault may become: a broken, an unreachable or a silent engine.
BROKEN, GONE, SILENT = frozenset({502}), frozenset({502, 503}), frozenset({503, 504})
RIGHT = frozenset({200})
# What a request beyond a limit becomes.
REFUSED = frozenset({400, 413})


async def asks(stage: Stage, case: Case) -> list[str]:
    """Send the request and judge the reply."""
    from faults.judge import judged

    return judged(await stage.ask(case, stage.marker()), case)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case.

    Args:
        kind: the class that it belongs to.
        body: the request's body, or what makes it. Of an object, `model` is added; where it has no
            prompt, one that asks for a marker is.
        fault: the engine's fault with this generation, as in `mistakes`.
        calls: its faults with other calls, by path.
        expect: the statuses that may come back, an error event counted as one.
        says: a word that an error's message, param or code must have.
        check: what else must be true of a right reply.
        act: what the client does.
        memory: MiB by which the process may grow.
        seconds: how long a reply may take.
        beside: whether small requests are answered in the meantime.
        short: whether it belongs to the short form.
        alone: whether it starts processes of its own.
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
        """The body."""
        return self.body() if callable(self.body) else self.body
