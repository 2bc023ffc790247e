"""The bounded queue in front of an engine, which takes turns between requests.

An engine runs few calls at a time, and one request may need thousands: prompts times choices. So a
free place goes to the next waiting *request*, not to the next call. A short request then waits for
one call of each other request, never for all calls of a large one. Requests of a higher tier go
first.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum

from .errors import Busy

# The largest number of turns of others before the first waiting request of a tier has its turn.
MOST_PASSED = 16


class Tier(IntEnum):
    """A class of requests; a smaller number goes first."""

    PRIORITY = 0
    DEFAULT = 1
    FLEX = 2


class FairOrder:
    """The order in which waiting tiers have their turns.

    The first waiting tier is next. A tier that waits while others have their turns is next after at
    most `MOST_PASSED` of them, so that no tier waits forever.
    """

    def __init__(self) -> None:
        # The number of turns that each tier has waited for.
        self._passed: dict[Tier, int] = {}

    def next(self, waiting: Collection[Tier]) -> Tier:
        """Return the tier whose turn is next; at least one must be waiting."""
        first = min(waiting)
        if len(waiting) > 1:
            longest = max(sorted(waiting), key=self._waited)
            # Two tiers can be due at the same time, and one of them then waits for the other.
            if self._waited(longest) >= MOST_PASSED - 1:
                return longest
        return first

    def count(self, served: Tier, waiting: Iterable[Tier]) -> None:
        """Count a turn of a tier, while others are still waiting."""
        self._passed = {tier: self._waited(tier) + 1 for tier in waiting if tier is not served}

    def _waited(self, tier: Tier) -> int:
        return self._passed.get(tier, 0)


# The default number of requests that may wait. Evaluation harnesses send hundreds at a time to four
# slots, and each takes a few kilobytes here. A cancelled request leaves the queue immediately.
QUEUE = 1_024


class Ticket:
    """The calls of one request; once one of them was admitted, none is rejected as busy.

    Args:
        turn: the progress of its calls, for an engine that orders them itself.
        jobs: the number of its jobs that an engine runs or has queued.
        tier: its place among other requests that wait.
        key: the digest of its API key; keys that wait for the same model share it fairly.
        weight: the share of its key, compared with other keys.
        session: the conversation that it belongs to, as its client names it; empty if unknown.
        routed: gets the name of the engine that runs a call, and `hit`, `miss` or `none` for what
            the engine has in its prompt cache; before the first event of the call.
    """

    __slots__ = ("admitted", "jobs", "key", "routed", "session", "tier", "turn", "weight")

    def __init__(self, tier: Tier = Tier.DEFAULT) -> None:
        self.admitted = False
        self.jobs = 0
        self.tier = tier
        self.turn = 0
        self.key = self.session = ""
        self.weight = 1.0
        self.routed: Callable[[str, str], None] | None = None


class AdmissionQueue:
    """A bounded queue in front of an engine.

    Args:
        limit: the largest number of waiting requests; others are rejected. None means no limit.
        places: the number of calls that the engine runs at a time.
    """

    def __init__(self, limit: int | None, places: int = 1) -> None:
        self._limit = limit
        self._places = places
        self._taken = 0
        # The requests of each tier in order of their turns; only tiers with requests.
        self._waiting: dict[Tier, OrderedDict[Ticket, deque[asyncio.Future[None]]]] = {}
        self._order = FairOrder()
        self._moved = 0.0
        self._seconds = 1.0

    def resize(self, places: int) -> None:
        """Change the number of places; new places go to waiting requests."""
        self._places = places
        while self._waiting and self._taken < places:
            self._taken += 1
            self._pass_on()

    @property
    def taken(self) -> int:
        """The number of places that are taken."""
        return self._taken

    @property
    def is_full(self) -> bool:
        """True if a call has to wait for a place."""
        return self._taken >= self._places or bool(self._waiting)

    def check(self, party: Ticket | None = None) -> None:
        """Raise `Busy` if the queue is full, unless the request was admitted before."""
        if self._limit is None or self._taken < self._places:
            return
        waiting = sum(map(len, self._waiting.values()))
        if waiting < self._limit or (party is not None and party.admitted):
            return
        # OpenAI's clients do not retry after a delay of more than two minutes (contract 1.5).
        wait = min(max(self._seconds * waiting / 2, 0.1), 60.0)
        raise Busy(
            f"{waiting} requests are already waiting for the engine. Send the request again later.",
            wait,
        )

    def try_take(self, party: Ticket | None = None) -> bool:
        """Take a place if one is free and no request waits; return True if taken."""
        if self._taken >= self._places or self._waiting:
            return False
        self._taken += 1
        if party is not None:
            party.admitted = True
        return True

    async def take(self, party: Ticket | None = None) -> None:
        """Wait for a place; `release` gives it back.

        Args:
            party: the request of the call; by default the call is a separate request.

        Raises:
            Busy: the queue is full and the request was not admitted before.
        """
        if self.try_take(party):
            return
        self.check(party)
        party = party or Ticket()
        party.admitted = True
        place = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._moved = time.monotonic()
        parties = self._waiting.setdefault(party.tier, OrderedDict())
        parties.setdefault(party, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(party, place)
            else:
                # The place was already given to this call.
                self.release()
            raise

    def release(self) -> None:
        """Give a place back; it goes to the next request."""
        if self._waiting and self._taken <= self._places:
            self._pass_on()
        else:
            self._taken -= 1

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(self, *error: object) -> None:
        self.release()

    def _pass_on(self) -> None:
        """Give a taken place to the next call of the next request."""
        while self._waiting:
            tier = self._order.next(self._waiting)
            parties = self._waiting[tier]
            party, calls = next(iter(parties.items()))
            place = calls.popleft()
            if calls:
                parties.move_to_end(party)
            else:
                self._remove(party)
            if not place.done():
                self._order.count(tier, self._waiting)
                now = time.monotonic()
                self._seconds = 0.8 * self._seconds + 0.2 * (now - self._moved)
                self._moved = now
                place.set_result(None)
                return
        self._taken -= 1

    def _leave(self, party: Ticket, place: asyncio.Future[None]) -> None:
        parties = self._waiting.get(party.tier)
        calls = None if parties is None else parties.get(party)
        if calls is not None and place in calls:
            calls.remove(place)
            if not calls:
                self._remove(party)

    def _remove(self, party: Ticket) -> None:
        """Remove a request without calls from the queue."""
        parties = self._waiting[party.tier]
        del parties[party]
        if not parties:
            del self._waiting[party.tier]
