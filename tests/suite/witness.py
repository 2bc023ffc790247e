"""Records of the hooks and flags that the server uses during a check.

A server with a fault differs from the correct server only in the hooks and flags of `Fault`. A
fault may answer every recorded use as the correct server does. The recorded run is then also a
run of the server with the fault, including its random draws, concurrency and timing. The verdict
is the same, and the check need not run again.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from suite.server import Fault

RIGHT = Fault()


@dataclass(frozen=True, slots=True)
class Use:
    """One use of a hook or a flag.

    Args:
        name: the attribute of `Fault`.
        given: a hook's arguments, serialised; None for a flag.
        answer: a hook's arguments after the call and its result, or a flag's value.
    """

    name: str
    given: bytes | None
    answer: bytes


class Witness:
    """A substitute for the correct server's fault that records each use."""

    def __init__(self) -> None:
        self.uses: list[Use] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(RIGHT, name)
        if callable(value):
            return partial(self._call, name, value)
        self.uses.append(Use(name, None, _dump(value)))
        return value

    def _call(self, name: str, hook: Callable[..., Any], *given: Any) -> Any:
        before = _dump(given)
        result = hook(*given)
        self.uses.append(Use(name, before, _dump((given, result))))
        return result


class Uses:
    """The uses of many runs. Most of them are alike."""

    def __init__(self) -> None:
        self._runs: dict[str, dict[Use, set[str]]] = {}

    def add(self, run: str, uses: Iterable[Use]) -> None:
        """Add the uses of a run."""
        for use in uses:
            self._runs.setdefault(use.name, {}).setdefault(use, set()).add(run)

    def runs_of(self, name: str) -> Iterable[tuple[Use, Collection[str]]]:
        """Return the uses of a hook or a flag, each with its runs."""
        return self._runs.get(name, {}).items()

    def noticing(self, fault: Fault) -> set[str]:
        """Return the runs in which a fault answers any use differently from the correct server."""
        found: set[str] = set()
        own = {*vars(fault)} if type(fault) is Fault else {*vars(type(fault)), *vars(fault)}
        for name in own & self._runs.keys():
            for use, runs in self._runs[name].items():
                if not runs <= found and _differs(use, fault):
                    found |= runs
        return found


def _differs(use: Use, fault: Fault) -> bool:
    value = getattr(fault, use.name)
    if use.given is None:
        return _dump(value) != use.answer
    given = marshal.loads(use.given)  # noqa: S302
    try:
        result = value(*given)
        return _dump((given, result)) != use.answer
    except Exception:
        return True


def _dump(value: Any) -> bytes:
    """Serialise JSON, bytes or tuples so that 1, 1.0 and True differ, and the order of keys counts.

    Version 2 of the format has no references. Equal values therefore have equal bytes, even if one
    of them contains the same object twice.
    """
    return marshal.dumps(value, 2)
