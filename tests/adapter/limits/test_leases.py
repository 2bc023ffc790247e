"""Tests of the arithmetic of limits, at times that the tests choose."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.errors import go_duration
from latimer.adapter.limits.leases import (
    SECONDS,
    Account,
    Grant,
    Lease,
    Rates,
    Refusal,
    SharedAccount,
    Window,
)

Steps = list[tuple[float, int]]
STEPS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 60)), max_size=60)


class Clock:
    """A clock that tests set."""

    def __init__(self, time: float = 0.0) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


def lease_of(found: Lease | Refusal) -> Lease:
    """Return the lease that an account has given."""
    assert isinstance(found, Lease), found
    return found


def refusal_of(found: Lease | Refusal) -> Refusal:
    """Return the limit for which an account has given nothing."""
    assert isinstance(found, Refusal)
    return found


def admitted(account: Account, clock: Clock, steps: Steps) -> Steps:
    """Return the times and the tokens of the requests that an account admits."""
    found = []
    for pause, tokens in steps:
        clock.time += pause
        if isinstance(account.reserve(tokens), Lease):
            found.append((clock.time, tokens))
    return found


@given(STEPS)
def test_no_minute_has_more_than_the_limits(steps: Steps) -> None:
    """There are never more requests or tokens than the limit in any 60 seconds."""
    clock = Clock(1_000.0)
    found = admitted(Account(Rates(5, 100), clock), clock, steps)
    for end, _ in found:
        within = [tokens for time, tokens in found if end - SECONDS < time <= end]
        assert len(within) <= 5
        assert sum(within) <= 100


@pytest.mark.parametrize("pause", [0.01, 0.13, 0.99])
def test_a_constant_stream_gets_the_limit(pause: float) -> None:
    """Requests that come all the time get at least 98 % of the limit, and never more than it."""
    clock, most = Clock(1_000.0), 60
    minutes = 20
    steps = [(pause, 1)] * int(minutes * SECONDS / pause)
    found = admitted(Account(Rates(60), clock), clock, steps)
    assert 0.98 * minutes * most <= len(found) <= minutes * most


@given(STEPS, st.integers(1, 100))
def test_the_wait_is_exact(steps: Steps, tokens: int) -> None:
    """A refused request fits after its wait, and half a second and more before it does not."""
    clock = Clock(1_000.0)
    account = Account(Rates(5, 100), clock)
    admitted(account, clock, steps)
    refusal, time = account.reserve(tokens), clock.time
    if isinstance(refusal, Lease):
        return
    assert 0 < refusal.wait <= SECONDS + 0.5
    early = refusal.wait - 0.501
    if early > 0:
        clock.time = time + early
        refusal_of(account.reserve(tokens))
    clock.time = time + refusal.wait + 1e-6
    lease_of(account.reserve(tokens))


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 60), st.integers(0, 80)), max_size=60))
def test_the_buckets_are_what_is_used(steps: list[tuple[float, int, int]]) -> None:
    """At any time, the sum of a window is that of its buckets, from which it can be made again."""
    clock = Clock(1_000.0)
    account, leases = Account(Rates(), clock), []
    for pause, tokens, used in steps:
        clock.time += pause
        leases.append(lease_of(account.reserve(tokens)))
        leases[(tokens + used) % len(leases)].settle(used)
        for window in (account.requests, account.tokens):
            again = Window(window.limit, [[*bucket] for bucket in window.buckets])
            assert window.used == again.used == sum(amount for _, amount in window.buckets)
            assert all(amount >= 0 for _, amount in window.buckets)


def test_the_longest_wait_is_named() -> None:
    """Of several limits that a request exceeds, the error names the one with the longest wait."""
    clock = Clock()
    account = Account(Rates(3, 100, 1), clock)
    lease_of(account.reserve(10)).settle(10)
    clock.time = 30
    lease_of(account.reserve(80))
    clock.time = 31
    refusal = refusal_of(account.reserve(100))
    assert refusal[:4] == ("tokens", 100, 90, 100)
    assert refusal.wait == pytest.approx(59.5)


def test_a_place_is_free_when_a_lease_ends() -> None:
    """Only so many leases exist at a time, and the end of one makes room."""
    account = Account(Rates(concurrent=2), Clock())
    first = lease_of(account.reserve(0))
    lease_of(account.reserve(0))
    refusal = refusal_of(account.reserve(0))
    assert (refusal.kind, refusal.used, refusal.requested) == ("concurrent", 2, 1)
    first.settle(0)
    lease_of(account.reserve(0))
    first.settle(0)
    assert account.running == 2


def test_a_lease_that_nobody_renews_expires() -> None:
    """A lease ends by itself at its time, unless it is renewed; an ended one does not come back."""
    clock = Clock()
    account = SharedAccount(Rates(concurrent=2), clock)
    account.reserve_as("a", 0, 30)
    late = lease_of(account.reserve_as("b", 0, 30))
    account.renew(["a", "gone"], 60)
    clock.time = 29
    refusal_of(account.reserve_as("c", 0, 30))
    clock.time = 31
    lease_of(account.reserve_as("c", 0, 29))
    assert account.leases == {"a": 60, "c": 60}
    account.settle_as("b", late, 0)
    assert refusal_of(account.reserve_as("d", 0, 30)).used == 2


def test_unused_tokens_are_free_again() -> None:
    """The end of a request frees what it reserved and did not use; overuse counts from the end."""
    clock = Clock()
    account = Account(Rates(tokens=100), clock)
    first = lease_of(account.reserve(80))
    clock.time = 5.0
    first.settle(30)
    assert account.tokens.used == 30
    clock.time = 6.0
    second = lease_of(account.reserve(20))
    clock.time = 50.0
    second.settle(70)
    assert account.tokens.used == 100
    # The reserved tokens leave the window, and those of the end do not yet.
    clock.time = 70.0
    lease_of(account.reserve(50))
    assert account.tokens.used == 100


def test_a_late_end_frees_nothing() -> None:
    """Tokens that have left the window are not freed once more."""
    clock = Clock()
    account = Account(Rates(tokens=100), clock)
    late = lease_of(account.reserve(80))
    clock.time = 100.0
    lease_of(account.reserve(10))
    clock.time = 101.0
    late.settle(1)
    assert account.tokens.used == 10


def test_the_clock_may_be_set_back() -> None:
    """A clock that goes back neither frees anything nor breaks the order of the buckets."""
    clock = Clock()
    account = Account(Rates(requests=3, tokens=100), clock)
    for clock.time in (100.0, 90.0, 95.0):
        lease = lease_of(account.reserve(10))
    clock.time = 91.0
    refusal_of(account.reserve(0))
    numbers = [number for number, _ in account.requests.buckets]
    assert numbers == sorted(numbers)
    # So it is for an account that another process has counted.
    windows = account.requests.buckets, account.tokens.buckets
    again = SharedAccount(Rates(tokens=100), clock, *windows)
    lease = lease_of(again.reserve_as("a", 10, 30))
    again.settle_as("a", lease, 3)
    assert again.tokens.used == 33


def test_a_stored_window_may_have_a_long_pause() -> None:
    """Buckets that are too old when a window is read take nothing from the newest one."""
    account = Account(Rates(None, 1000), Clock(100.0), [[0, 1]], [[0, 900], [200, 50]])
    assert account.tokens.used == 50
    assert [*account.tokens.buckets] == [[200, 50]]


def test_other_limits_apply_at_once() -> None:
    """Limits that change apply to what was used before."""
    account = Account(Rates(requests=1), Clock())
    lease_of(account.reserve(0))
    refusal_of(account.reserve(0))
    account.limit(Rates(requests=2))
    lease_of(account.reserve(0))


def test_a_window_stays_small() -> None:
    """A window has at most one bucket for each half second."""
    clock = Clock()
    account = Account(Rates(), clock)
    draw = random.Random(5)
    for _ in range(20_000):
        clock.time += draw.expovariate(100)
        lease_of(account.reserve(1)).settle(draw.randrange(3))
    assert len(account.tokens.buckets) <= 122
    assert account.tokens.used == sum(amount for _, amount in account.tokens.buckets)
    assert not account.running


def test_no_limit_is_infinite() -> None:
    """A key without limits is never refused."""
    account = Account(Rates())
    assert all(isinstance(account.reserve(10**9), Lease) for _ in range(100))
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
