"""The order in which calls wait for a place: tier, then key, then request, then arrival."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from ..queue import FairOrder, Ticket, Tier

# The cost of a prompt token and of a generated token, for the shares of keys.
PROMPT, COMPLETION = 1.0, 2.0


class Waiting(Protocol):
    """A call that waits; `ticket` is its request."""

    ticket: Ticket


W = TypeVar("W", bound=Waiting)


class Shares:
    """The use of each key: virtual token counters (arXiv 2401.00588).

    The key with the lowest counter is next. A key that returns after it had nothing to run is
    lifted to the lowest counter of the others, so that nobody saves up.
    """

    def __init__(self) -> None:
        self._used: dict[str, float] = {}
        # The calls of each key that wait or run.
        self._calls: dict[str, int] = {}

    def used(self, key: str) -> float:
        """Return the counter of a key."""
        return self._used.get(key, 0.0)

    def enter(self, key: str, cost: float = 0.0, weight: float = 1.0) -> None:
        """Count a call of a key that waits or runs from now on, with what it costs so far."""
        running = self._calls
        if not running:
            # Nobody competes, so all start from zero.
            running[key], self._used = 1, {key: cost / weight}
            return
        calls = running.get(key, 0)
        if not calls:
            least = min(map(self._used.__getitem__, running))
            self._used[key] = max(self._used.get(key, 0.0), least)
        running[key] = calls + 1
        self._used[key] += cost / weight

    def leave(self, key: str, cost: float = 0.0, weight: float = 1.0) -> None:
        """Count the end of a call; a cost corrects what it was charged."""
        self._used[key] += cost / weight
        running = self._calls
        if running[key] > 1:
            running[key] -= 1
        else:
            del running[key]

    def charge(self, key: str, cost: float, weight: float) -> None:
        """Add the cost of tokens to a key's counter; a negative one corrects an estimate."""
        self._used[key] = self._used.get(key, 0.0) + cost / weight


class Line(Generic[W]):
    """Calls that wait; its length is the number of waiting requests.

    Attributes:
        requests: the same number.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._order = FairOrder()
        # The calls of each request, the requests of each key, and the keys of each tier.
        self._tiers: dict[Tier, dict[str, OrderedDict[Ticket, deque[W]]]] = {}
        self.requests = 0

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[W]:
        for keys in self._tiers.values():
            for requests in keys.values():
                for calls in requests.values():
                    yield from calls

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tiers.get(ticket.tier, {}).get(ticket.key, ())

    def push(self, call: W) -> None:
        """Add a call after the others of its request."""
        ticket = call.ticket
        keys = self._tiers.setdefault(ticket.tier, {})
        requests = keys.setdefault(ticket.key, OrderedDict())
        calls = requests.get(ticket)
        if calls is None:
            calls = requests[ticket] = deque()
            self.requests += 1
        calls.append(call)

    def pop(self) -> W | None:
        """Remove and return the call whose turn is next; None if none waits."""
        if not self._tiers:
            return None
        tier = self._order.next(self._tiers)
        keys = self._tiers[tier]
        key = min(keys, key=self._shares.used) if len(keys) > 1 else next(iter(keys))
        ticket, calls = next(iter(keys[key].items()))
        call = calls.popleft()
        if calls:
            keys[key].move_to_end(ticket)
        else:
            self._drop(ticket)
        self._order.count(tier, self._tiers)
        return call

    def remove(self, call: W) -> bool:
        """Remove a call that waits no longer; return False if it does not wait here."""
        ticket = call.ticket
        if ticket not in self or call not in (
            calls := self._tiers[ticket.tier][ticket.key][ticket]
        ):
            return False
        calls.remove(call)
        if not calls:
            self._drop(ticket)
        return True

    def _drop(self, ticket: Ticket) -> None:
        keys = self._tiers[ticket.tier]
        del keys[ticket.key][ticket]
        self.requests -= 1
        if not keys[ticket.key]:
            del keys[ticket.key]
            if not keys:
                del self._tiers[ticket.tier]
