"""Tests of ejections and of the budget of retries, with a clock of the test's own."""

from __future__ import annotations

from latimer.backends.fleet.breaker import EJECTION, FAILURES, LONGEST, Breaker, RetryBudget


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_consecutive_failures_eject() -> None:
    """Only failures without a success between them eject an engine."""
    breaker = Breaker(Clock())
    for _ in range(3):
        assert not any(breaker.fail() for _ in range(FAILURES - 1))
        breaker.succeed()
    assert [breaker.fail() for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]


def test_ejections_become_longer() -> None:
    """Each ejection is longer by 30 s up to 300 s, and short again after a good time."""
    clock = Clock()
    breaker = Breaker(clock)
    found = []
    for _ in range(12):
        found.append(breaker.eject())
        assert not breaker.is_over()
        clock.now += found[-1]
        assert breaker.is_over()
        assert breaker.is_trying
        # One failure of the trial is enough.
        assert breaker.fail()
    assert found == [min(EJECTION * (step + 1), LONGEST) for step in range(12)]
    clock.now += LONGEST + 1
    assert breaker.eject() == EJECTION


def test_the_budget_follows_the_calls() -> None:
    """A fifth of the calls may be sent again, and ten more in a second, of ten seconds."""
    clock = Clock()
    budget = RetryBudget(clock=clock)
    assert sum(budget.take() for _ in range(1000)) == 100
    for _ in range(50):
        budget.calls += 1
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    clock.now += 1
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    clock.now += 3600
    assert sum(budget.take() for _ in range(1000)) == 100
