"""Tests of the order in which tiers have their turns."""

from __future__ import annotations

import random

import pytest
from latimer.backends.tiers import MOST_PASSED, Order, Tier


def test_the_highest_tier_is_next() -> None:
    """The highest tier that waits is next, in every set of waiting tiers."""
    order = Order()
    assert order.next([Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY]) is Tier.PRIORITY
    assert order.next([Tier.FLEX, Tier.DEFAULT]) is Tier.DEFAULT
    assert order.next([Tier.FLEX]) is Tier.FLEX


def test_a_tier_is_passed_over_a_number_of_times() -> None:
    """A waiting tier has its turn after that number of turns of another, and then waits again."""
    order, served = Order(), []
    both = (Tier.DEFAULT, Tier.FLEX)
    for _ in range(3 * MOST_PASSED):
        served.append(order.next(both))
        order.count(served[-1], both)
    once = [Tier.DEFAULT] * (MOST_PASSED - 1) + [Tier.FLEX]
    assert served == once * 3


def test_an_empty_tier_does_not_save_turns() -> None:
    """A tier that had no waiting requests has waited for no turn."""
    order = Order()
    for _ in range(MOST_PASSED - 1):
        order.count(Tier.PRIORITY, [Tier.FLEX])
    order.count(Tier.PRIORITY, [])
    assert order.next([Tier.PRIORITY, Tier.FLEX]) is Tier.PRIORITY


@pytest.mark.parametrize("seed", range(20))
def test_no_tier_waits_longer_than_the_bound(seed: int) -> None:
    """In random traffic, the first request of a tier waits for at most `MOST_PASSED` turns."""
    chance = random.Random(seed)
    weights = [chance.random() for _ in Tier]
    order, most = Order(), 0
    waiting = dict.fromkeys(Tier, 0)
    since = dict.fromkeys(Tier, 0)
    for _ in range(5_000):
        for tier in chance.choices([*Tier], weights, k=chance.randrange(3)):
            waiting[tier] += 1
        left = [tier for tier in Tier if waiting[tier]]
        if not left:
            continue
        served = order.next(left)
        waiting[served] -= 1
        order.count(served, [tier for tier in left if waiting[tier]])
        for tier in Tier:
            since[tier] = since[tier] + 1 if waiting[tier] and tier is not served else 0
        most = max(most, *since.values())
    assert most <= MOST_PASSED
