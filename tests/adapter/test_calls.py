"""Tests of the number of Python calls that a request and a token take."""

from __future__ import annotations

import pytest
from benchmarks import calls

# More calls than these make every request or every token slower.
MOST = {
    "chat": 100,
    "chat, token": 5,
    "chat, token in a burst": 0,
    "completion": 81,
    "completion, token": 5,
    "completion, token in a burst": 0,
    "over llama-server: chat": 138,
    "over llama-server: chat, token": 17,
    "over llama-server: chat, token in a burst": 0,
    "over llama-server: completion": 126,
    "over llama-server: completion, token": 17,
    "over llama-server: completion, token in a burst": 0,
    "over a pool of one: chat": 150,
    "over a pool of one: chat, token": 19,
    "over a pool of one: chat, token in a burst": 0,
    "over a pool of one: completion": 138,
    "over a pool of one: completion, token": 19,
    "over a pool of one: completion, token in a burst": 0,
    "over a pool of four, with limits: chat": 162,
    "over a pool of four, with limits: chat, token": 19,
    "over a pool of four, with limits: chat, token in a burst": 0,
    "over a pool of four, with limits: completion": 151,
    "over a pool of four, with limits: completion, token": 19,
    "over a pool of four, with limits: completion, token in a burst": 0,
}


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """Return the number of calls for each kind of request."""
    return calls.numbers(calls.measure())


@pytest.mark.parametrize("name", MOST)
def test_calls_have_a_limit(counted: dict[str, int], name: str) -> None:
    """A request, and each token of its stream, takes at most as many Python calls as before."""
    assert counted[name] <= MOST[name]


def test_every_kind_has_a_limit(counted: dict[str, int]) -> None:
    """Each number that the benchmark prints has a limit."""
    assert counted.keys() == MOST.keys()
