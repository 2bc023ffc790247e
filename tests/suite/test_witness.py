"""Tests of the witness: it records hooks and flags, and notices a fault that differs."""

from __future__ import annotations

from typing import Any, cast

import pytest
from suite.server import Fault
from suite.witness import Uses, Witness


def notices(witness: Witness, fault: Fault) -> bool:
    """Return True if a witness notices a fault."""
    uses = Uses()
    uses.add("run", witness.uses)
    return uses.noticing(fault) == {"run"}


class Adds(Fault):
    """A fault that changes a body in place, but returns an equal one."""

    def reply(self, path: str, body: dict[str, Any], sent: Any) -> Any:
        """Add a key to the body, and return a copy without it."""
        copy = {**body}
        body["extra"] = 1
        return copy


class Fails(Fault):
    """A fault that raises an exception."""

    def reply(self, path: str, body: dict[str, Any], sent: Any) -> Any:
        """Raise an exception."""
        raise KeyError(path)


class Returns(Fault):
    """A fault that returns another body."""

    def __init__(self, body: Any) -> None:
        self.body = body

    def reply(self, path: str, body: dict[str, Any], sent: Any) -> Any:
        """Return the other body."""
        return self.body


class Crowded(Fault):
    """A fault that sets a flag."""

    crowded = 500


BODY = {"count": 1, "items": ["a"]}


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        (Fault(), False),
        (Crowded(), False),
        (Returns({"count": 1, "items": ["a"]}), False),
        (Returns({"count": True, "items": ["a"]}), True),
        (Returns({"count": 1.0, "items": ["a"]}), True),
        (Returns({"items": ["a"], "count": 1}), True),
        (Adds(), True),
        (Fails(), True),
    ],
)
def test_a_hook_is_compared_by_what_it_does(fault: Fault, noticed: bool) -> None:
    """A witness notices changed arguments, exceptions and results that serialise differently."""
    witness = Witness()
    assert cast(Fault, witness).reply("/completions", {**BODY}, {}) == BODY
    assert notices(witness, fault) == noticed


def test_a_flag_is_compared_by_its_value() -> None:
    """A fault that sets a flag is noticed only if the server reads that flag."""
    witness = Witness()
    assert cast(Fault, witness).crowded == 0
    assert notices(witness, Crowded())
    assert not notices(witness, Fails())
