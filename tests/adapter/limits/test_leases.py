"""Tests of the arithmetic of limits, at times that the tests choose."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.errors import go_duration
from latimer.adapter.limits.leases import SECONDS, Account, Grant, Rates

Steps = list[tuple[float, int]]
STEPS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60)), max_size=60)


def admitted(account: Account, steps: Steps) -> Steps:
    """Return the times and the tokens of the requests that an account admits."""
    found, time = [], 1_000.0
    for number, (pause, tokens) in enumerate(steps):
        time += pause
        if account.reserve(time, tokens, str(number)) is None:
            found.append((time, tokens))
    return found


@given(STEPS)
def test_no_minute_has_more_than_the_limits(steps: Steps) -> None:
    """There are never more requests or tokens than the limit in any 60 seconds."""
    found = admitted(Account(Rates(5, 100)), steps)
    for end, _ in found:
        within = [tokens for time, tokens in found if end - SECONDS < time <= end]
        assert len(within) <= 5
        assert sum(within) <= 100


@pytest.mark.parametrize("pause", [0.01, 0.13, 0.99])
def test_a_constant_stream_gets_the_limit(pause: float) -> None:
    """Requests that come all the time get at least 98 % of the limit, and never more than it."""
    account, most = Account(Rates(60)), 60
    minutes = 20
    found = admitted(account, [(pause, 1)] * int(minutes * SECONDS / pause))
    assert 0.98 * minutes * most <= len(found) <= minutes * most


@given(STEPS, st.integers(1, 100))
def test_the_wait_is_exact(steps: Steps, tokens: int) -> None:
    """A refused request fits after its wait, and half a second and more before it does not."""
    account, time = Account(Rates(5, 100)), 1_000.0
    for number, (pause, wanted) in enumerate(steps):
        time += pause
        account.reserve(time, wanted, str(number))
    refusal = account.reserve(time, tokens, "x")
    if refusal is None:
        return
    assert 0 < refusal.wait <= SECONDS + 0.5
    early = refusal.wait - 0.501
    if early > 0:
        assert account.reserve(time + early, tokens, "x") is not None
    assert account.reserve(time + refusal.wait + 1e-6, tokens, "x") is None


def test_the_longest_wait_is_named() -> None:
    """Of several limits that a request exceeds, the error names the one with the longest wait."""
    account = Account(Rates(3, 100, 1))
    assert account.reserve(0, 10, "a") is None
    account.settle(0, "a", 0, 10, 10)
    assert account.reserve(30, 80, "b") is None
    refusal = account.reserve(31, 100, "c")
    assert refusal is not None
    assert refusal[:4] == ("tokens", 100, 90, 100)
    assert refusal.wait == pytest.approx(59.5)


def test_a_place_is_free_when_a_lease_ends() -> None:
    """Only so many leases exist at a time, and the end of one makes room."""
    account = Account(Rates(concurrent=2))
    assert account.reserve(0, 0, "a") is None
    assert account.reserve(0, 0, "b") is None
    refusal = account.reserve(0, 0, "c")
    assert refusal is not None
    assert (refusal.kind, refusal.used, refusal.requested) == ("concurrent", 2, 1)
    account.settle(0, "a", 0, 0, 0)
    assert account.reserve(0, 0, "c") is None


def test_a_lease_that_nobody_renews_expires() -> None:
    """A lease ends by itself at its time, unless it is renewed; an ended one does not come back."""
    account = Account(Rates(concurrent=2))
    account.reserve(0, 0, "a", 30)
    account.reserve(0, 0, "b", 30)
    account.renew(["a", "gone"], 60)
    assert account.reserve(29, 0, "c", 60) is not None
    assert account.reserve(31, 0, "c", 60) is None
    assert account.leases == {"a": 60, "c": 60}


def test_unused_tokens_are_free_again() -> None:
    """The end of a request frees what it reserved and did not use; overuse counts from the end."""
    account = Account(Rates(tokens=100))
    account.reserve(0.0, 80, "a")
    account.settle(5.0, "a", 0, 80, 30)
    assert account.tokens.used == 30
    account.reserve(6.0, 20, "b")
    account.settle(50.0, "b", 12, 20, 70)
    assert account.tokens.used == 100
    # The reserved tokens leave the window, and those of the end do not yet.
    assert account.reserve(70.0, 50, "c") is None
    assert account.tokens.used == 100


def test_a_late_end_frees_nothing() -> None:
    """Tokens that have left the window are not freed once more."""
    account = Account(Rates(tokens=100))
    account.reserve(0.0, 80, "a")
    account.reserve(100.0, 10, "b")
    account.settle(101.0, "a", 0, 80, 1)
    assert account.tokens.used == 10


def test_the_clock_may_be_set_back() -> None:
    """A clock that goes back neither frees anything nor breaks the order of the buckets."""
    account = Account(Rates(requests=3))
    for time in (100.0, 90.0, 95.0):
        assert account.reserve(time, 0, str(time)) is None
    assert account.reserve(91.0, 0, "x") is not None
    numbers = [number for number, _ in account.requests.buckets]
    assert numbers == sorted(numbers)


def test_other_limits_apply_at_once() -> None:
    """Limits that change apply to what was used before."""
    account = Account(Rates(requests=1))
    account.reserve(0, 0, "a")
    assert account.reserve(0, 0, "b") is not None
    account.limit(Rates(requests=2))
    assert account.reserve(0, 0, "b") is None


def test_a_window_stays_small() -> None:
    """A window has at most one bucket for each half second."""
    account = Account(Rates())
    draw = random.Random(5)
    time = 0.0
    for number in range(20_000):
        time += draw.expovariate(100)
        account.reserve(time, 1, str(number))
        account.settle(time, str(number), int(time * 2), 1, draw.randrange(3))
    assert len(account.tokens.buckets) <= 122
    assert account.tokens.used == sum(amount for _, amount in account.tokens.buckets)
    assert not account.leases


def test_no_limit_is_infinite() -> None:
    """A key without limits is never refused."""
    account = Account(Rates())
    assert all(account.reserve(0, 10**9, str(number)) is None for number in range(100))
    assert math.isinf(account.requests.limit)


def test_names_of_models() -> None:
    """A key may use exact names, and those that begin as one with a star does."""
    grant = Grant("a", names=frozenset({"one"}), prefixes=("qwen3-",))
    names = {"one": True, "ones": False, "qwen3-8b": True, "qwen3-": True, "Qwen3-8b": False}
    assert {name: grant.allows(name) for name in names} == names
    assert grant.shown == "one, qwen3-*"
    assert Grant("a").allows("any")
    assert not Grant("a", names=frozenset()).allows("any")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0ms"), (0.02, "20ms"), (0.0001, "1ms"), (1, "1s"), (18.642, "18.642s"), (1.5, "1.5s"),
        (60, "1m0s"), (360, "6m0s"), (60.25, "1m0.25s"), (59.9999, "1m0s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, shown: str) -> None:
    """Times are written as Go writes them, rounded up to milliseconds."""
    assert go_duration(seconds) == shown
