"""The queue in front of an engine: requests in turn, and no more of them than may wait.

An engine works on few calls at a time, and one request may come to thousands: prompts times
choices. So a place that is free goes to the next *request* that waits, not to the next call: who
asks for one short answer waits for one call of each other request, never for all calls of a large
one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque

from .errors import Busy

# Requests that may wait. Evaluation harnesses keep hundreds on their way at once, against four
# slots, and each costs a few kilobytes here; who stops waiting leaves the queue at once.
QUEUE = 1_024


class Party:
    """The calls of one request: they wait in one place, and none is refused once one was let in.

    Args:
        turn: how far its calls have come, for an engine that keeps the order itself.
        jobs: how many of them an engine works on, or is to.
    """

    __slots__ = ("admitted", "jobs", "turn")

    def __init__(self) -> None:
        self.admitted = False
        self.jobs = 0
        self.turn = 0


class Turns:
    """A bounded queue in front of an engine.

    Args:
        limit: how many requests may wait; one more is refused. None is no limit.
        places: how many calls the engine gets at a time.
    """

    def __init__(self, limit: int | None, places: int = 1) -> None:
        self._limit = limit
        self._places = places
        self._taken = 0
        # The request whose turn is next comes first.
        self._waiting: OrderedDict[Party, deque[asyncio.Future[None]]] = OrderedDict()
        self._moved = 0.0
        self._seconds = 1.0

    def resize(self, places: int) -> None:
        """Have another number of places; more of them let in who waits."""
        self._places = places
        while self._waiting and self._taken < places:
            self._taken += 1
            self._pass_on()

    def check(self, party: Party | None = None) -> None:
        """Raise `Busy` while the queue is full; a request that was let in stays in."""
        waiting = len(self._waiting)
        if self._limit is None or waiting < self._limit or self._taken < self._places:
            return
        if party is not None and party.admitted:
            return
        # Past two minutes OpenAI's clients would not retry at all (contract 1.5).
        wait = min(max(self._seconds * waiting / 2, 0.1), 60.0)
        raise Busy(f"{waiting} requests are waiting for the engine already; ask again later.", wait)

    def try_take(self) -> bool:
        """Take a place if one is free and nobody waits."""
        if self._taken >= self._places or self._waiting:
            return False
        self._taken += 1
        return True

    async def take(self, party: Party | None = None) -> None:
        """Wait for a place; `release` gives it back.

        Args:
            party: the request whose call it is; by default it is a request of its own.

        Raises:
            Busy: the request was not let in before, and the queue is full.
        """
        if self.try_take():
            if party is not None:
                party.admitted = True
            return
        self.check(party)
        party = party or Party()
        party.admitted = True
        place = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._moved = time.monotonic()
        self._waiting.setdefault(party, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._leave(party, place)
            else:
                # The place was given already.
                self.release()
            raise

    def release(self) -> None:
        """Give a place back: the next request gets it."""
        if self._waiting and self._taken <= self._places:
            self._pass_on()
        else:
            self._taken -= 1

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(self, *error: object) -> None:
        self.release()

    def _pass_on(self) -> None:
        """Hand a place that is taken to the next call of the next request."""
        while self._waiting:
            party, calls = next(iter(self._waiting.items()))
            place = calls.popleft()
            if calls:
                self._waiting.move_to_end(party)
            else:
                del self._waiting[party]
            if not place.done():
                now = time.monotonic()
                self._seconds = 0.8 * self._seconds + 0.2 * (now - self._moved)
                self._moved = now
                place.set_result(None)
                return
        self._taken -= 1

    def _leave(self, party: Party, place: asyncio.Future[None]) -> None:
        calls = self._waiting.get(party)
        if calls is not None and place in calls:
            calls.remove(place)
            if not calls:
                del self._waiting[party]
