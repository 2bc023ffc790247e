"""Tests of the order of waiting calls: tiers, shares of keys, requests, arrival."""

from __future__ import annotations

from collections import Counter

from latimer.backends.fleet.queue import Line, Shares
from latimer.backends.queue import MOST_PASSED, Ticket, Tier


class Call:
    """A call of a request."""

    def __init__(self, ticket: Ticket, name: str = "") -> None:
        self.ticket = ticket
        self.name = name


def ticket_of(key: str = "", weight: float = 1.0, tier: Tier = Tier.DEFAULT) -> Ticket:
    """Return a request of a key."""
    ticket = Ticket.of(tier)
    ticket.key, ticket.weight = key, weight
    return ticket


def served(line: Line[Call], shares: Shares, count: int, cost: float = 10.0) -> Counter[str]:
    """Return how many calls of each key are served, each of the same cost."""
    found: Counter[str] = Counter()
    for _ in range(count):
        call = line.pop()
        assert call is not None
        shares.charge(call.ticket.key, cost, call.ticket.weight)
        found[call.ticket.key] += 1
    return found


def test_keys_get_their_shares() -> None:
    """Keys that wait are served in proportion to their weights, not to their calls."""
    shares = Shares()
    line: Line[Call] = Line(shares)
    for key, weight, count in (("greedy", 1.0, 300), ("polite", 1.0, 50), ("heavy", 2.0, 100)):
        for _ in range(count):
            shares.enter(key)
            line.push(Call(ticket_of(key, weight)))
    assert len(line) == 450
    found = served(line, shares, 120)
    assert abs(found["greedy"] - 30) <= 1
    assert abs(found["polite"] - 30) <= 1
    assert abs(found["heavy"] - 60) <= 1


def test_a_key_that_returns_has_saved_nothing() -> None:
    """A key that was away is lifted to the others, so it does not have the engine to itself."""
    shares = Shares()
    line: Line[Call] = Line(shares)
    for _ in range(100):
        shares.enter("busy")
        line.push(Call(ticket_of("busy")))
    served(line, shares, 50)
    for _ in range(50):
        shares.enter("late")
        line.push(Call(ticket_of("late")))
    found = served(line, shares, 40)
    assert abs(found["late"] - found["busy"]) <= 1


def test_a_cheap_key_is_served_more_often() -> None:
    """Shares count tokens, not calls."""
    shares = Shares()
    line: Line[Call] = Line(shares)
    for key in ("long", "short"):
        for _ in range(100):
            shares.enter(key)
            line.push(Call(ticket_of(key)))
    found: Counter[str] = Counter()
    for _ in range(50):
        call = line.pop()
        assert call is not None
        shares.charge(call.ticket.key, 90 if call.ticket.key == "long" else 10, 1.0)
        found[call.ticket.key] += 1
    assert 8 <= found["short"] / found["long"] <= 10


def test_tiers_go_first_but_not_for_ever() -> None:
    """A higher tier is served first, and a lower one after `MOST_PASSED` turns at most."""
    shares = Shares()
    line: Line[Call] = Line(shares)
    for tier in (Tier.PRIORITY, Tier.FLEX):
        for _ in range(100):
            line.push(Call(ticket_of(tier=tier)))
    tiers = [call.ticket.tier for call in iter(line.pop, None)][:100]
    assert tiers[: MOST_PASSED - 1] == [Tier.PRIORITY] * (MOST_PASSED - 1)
    assert tiers.count(Tier.FLEX) == 100 // MOST_PASSED


def test_requests_take_turns() -> None:
    """A request of one call waits for one call of each other request of its key."""
    shares = Shares()
    line: Line[Call] = Line(shares)
    large, small = ticket_of(), ticket_of()
    for _ in range(10):
        line.push(Call(large, "large"))
    line.push(Call(small, "small"))
    names = [call.name for call in iter(line.pop, None)]
    assert names[:3] == ["large", "small", "large"]
    assert len(names) == 11


def test_calls_leave() -> None:
    """A call that leaves is not served, and the line forgets its request."""
    shares = Shares()
    line: Line[Call] = Line(shares)
    calls = [Call(ticket_of(key)) for key in "aabbc"]
    for call in calls:
        line.push(call)
    assert line.remove(calls[0])
    assert not line.remove(calls[0])
    assert calls[0].ticket not in line
    assert calls[1].ticket in line
    assert {*line} == {*calls[1:]}
    assert {*iter(line.pop, None)} == {*calls[1:]}
    assert len(line) == 0
    assert not line._tiers
