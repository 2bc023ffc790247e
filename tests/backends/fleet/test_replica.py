"""Tests of what is measured about one engine."""

from __future__ import annotations

import random

import pytest
from latimer.backends.fleet.replica import Speed


def test_the_speed_is_that_of_one_more_token() -> None:
    """The time that every call takes is not counted as the time of its tokens."""
    speed, chance = Speed(), random.Random(1)
    for _ in range(200):
        tokens = chance.randrange(10, 2000)
        speed.add(tokens, 0.5 + tokens * 0.001 + chance.uniform(0, 0.2))
    assert speed.slope == pytest.approx(0.001, rel=0.1)


def test_the_speed_is_unknown_at_first() -> None:
    """Few calls, or calls of one length, show no speed."""
    speed = Speed()
    for _ in range(5):
        speed.add(1000, 1.0)
    assert speed.slope == 0
    for _ in range(100):
        speed.add(1000, 1.0)
    assert speed.slope == 0


def test_a_speed_is_never_negative() -> None:
    """Noise never makes more tokens faster."""
    speed = Speed()
    for tokens in (10, 1000) * 20:
        speed.add(tokens, 1000 / tokens)
    assert speed.slope == 0
