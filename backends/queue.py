"""The bounded queue in front of an engine, which takes turns between requests.

An engine runs few calls at a time, and one request may need thousands: prompts times choices. So a
free place goes to the next waiting *request*, not to the next call. A short request then waits for
one call of each other request, never for all calls of a large one. Requests of a higher tier go
first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import insort
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from enum import IntEnum
from itertools import chain
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeGuard, TypeVar

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


class Try(NamedTuple):
    """An engine that has not served a call, which was sent again then.

    Args:
        engine: its name.
        reason: why it has not (`errors.reason_of`).
        begun, ended: the times (`time.monotonic`) at which it got the call, 0 if unknown, and at
            which it failed.
    """

    engine: str
    reason: str
    begun: float
    ended: float


class Ticket:
    """The calls of one request; once one of them was admitted, none is rejected as busy.

    Args:
        jobs: the number of its jobs that an engine runs or has queued.
        queued: the number of its calls that had to wait for a place.
        tier: its place among other requests that wait.
        key: the digest of its API key; keys that wait for the same model share it fairly.
        weight: the share of its key, compared with other keys.
        session: the conversation that it belongs to, as its client names it; empty if unknown.
        engine: the name of the engine that runs its last call, if its model has several; known
            before the first event of the call.
        affinity: `hit`, `miss` or `none`, for what that engine had in its prompt cache.
        waited: the seconds that the call waited for a place which waited longest.
        input: the tokens of the last call's prompt, as `Finish` counts them; 0 until the engine has
            said it, or before the first event of its stream.
        prompt, generated: the tokens of calls that were cancelled or have failed, as far as their
            engines have said, and of others of the same request that had ended.
        looked_up, cached: the tokens of their prompts for which an engine says what its cache had,
            and those that it had.
        tries: the engines that have not served a call which was sent again then, in their order.
    """

    # Most requests leave most of these values as they are.
    admitted = False
    jobs = queued = prompt = generated = input = looked_up = cached = 0
    key = session = engine = affinity = ""
    weight = 1.0
    waited = 0.0
    tries: tuple[Try, ...] = ()
    tier = Tier.DEFAULT

    def note_wait(self, since: float) -> None:
        """Note that a call has waited for a place since a time (`time.monotonic`)."""
        self.waited = max(self.waited, time.monotonic() - since)

    @classmethod
    def of(cls, tier: Tier) -> Ticket:
        """Return a request of a tier."""
        ticket = cls()
        ticket.tier = tier
        return ticket


class Waiting(Protocol):
    """A call or a choice that waits for its turn; `FairQueue` sets `turn`."""

    turn: int

    @property
    def ticket(self) -> Ticket:
        """The request that it belongs to."""
        ...


_TURN = attrgetter("turn")
W = TypeVar("W", bound=Waiting)
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class FairQueue(Generic[W]):
    """The waiting calls of an engine, in the order of their turns.

    A call gets the number after its request's last waiting one, or after the number that its tier
    served last if that is larger. The smallest number is the next of its tier. So one call of every
    request of a tier comes before the second call of any. `FairOrder` chooses the tier.

    Attributes:
        requests: the waiting calls of each request that has any.
    """

    def __init__(self) -> None:
        self.requests: dict[Ticket, list[W]] = {}
        # The calls of each tier by their numbers; only tiers with calls.
        self._waiting: dict[Tier, list[W]] = {}
        self._served = dict.fromkeys(Tier, 0)
        self._order = FairOrder()

    def __bool__(self) -> bool:
        return bool(self.requests)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[W]:
        return chain(*self._waiting.values())

    def add(self, call: W) -> None:
        """Queue a call for its request's next turn."""
        tier = call.ticket.tier
        calls = self.requests.setdefault(call.ticket, [])
        call.turn = max(calls[-1].turn if calls else 0, self._served[tier]) + 1
        calls.append(call)
        insort(self._waiting.setdefault(tier, []), call, key=_TURN)

    def in_turn(self) -> Iterator[W]:
        """Yield the calls in the order of their turns.

        The caller may take or remove each call before it asks for the next. A call that it leaves
        keeps its turn, and those behind it follow.
        """
        skipped = dict.fromkeys(Tier, 0)
        while left := [tier for tier, its in self._waiting.items() if skipped[tier] < len(its)]:
            tier = self._order.next(left)
            calls = self._waiting[tier]
            before = len(calls)
            yield calls[skipped[tier]]
            if len(calls) == before:
                skipped[tier] += 1

    def take(self, call: W) -> None:
        """Remove a call from the queue and count its turn as served."""
        tier = call.ticket.tier
        self.remove(call)
        self._served[tier] = max(self._served[tier], call.turn)
        self._order.count(tier, self._waiting)

    def remove(self, call: W) -> None:
        """Remove a call from the queue."""
        _remove(self.requests, call.ticket, call)
        _remove(self._waiting, call.ticket.tier, call)

    def clear(self) -> None:
        """Remove all calls from the queue."""
        self.requests.clear()
        self._waiting.clear()


def _remove(lists: dict[K, list[W]], key: K, call: W) -> None:
    """Remove a call from a list, and the list if it is empty."""
    lists[key].remove(call)
    if not lists[key]:
        del lists[key]


def check_room(waiting: int, limit: int, ticket: Ticket | None, wait: float) -> None:
    """Raise `Busy` if as many requests wait as may, unless the request was admitted before.

    Args:
        wait: the seconds after which a client should send the request again.
    """
    if waiting >= limit and not (ticket is not None and ticket.admitted):
        raise Busy(
            f"{waiting} requests are already waiting for the engine. Send the request again later.",
            wait,
        )


def settle(future: asyncio.Future[T], result: T | Exception) -> bool:
    """Set the result or the error of a future that may belong to another event loop.

    Returns:
        False if that event loop is closed, so that nobody waits any more.
    """
    loop = future.get_loop()
    # A task that is garbage may release a place without an event loop.
    if loop is asyncio._get_running_loop():
        _settle(future, result)
        return True
    try:
        loop.call_soon_threadsafe(_settle, future, result)
    except RuntimeError:
        return False
    return True


def _settle(future: asyncio.Future[T], result: T | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def is_running(task: asyncio.Task[None] | None) -> TypeGuard[asyncio.Task[None]]:
    """Return True if a task runs in this event loop; one of a loop that ended is never done."""
    loop = asyncio.get_running_loop()
    return task is not None and not task.done() and task.get_loop() is loop


class _Call:
    """A call that waits for a place.

    Attributes:
        has_place: True if a place was given to it, which its task may not know yet.
    """

    __slots__ = ("has_place", "place", "since", "ticket", "turn")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.turn = 0
        self.since = time.monotonic()
        self.has_place = False


class AdmissionQueue:
    """A bounded queue in front of an engine, for calls of any event loops and threads.

    Args:
        limit: the largest number of waiting requests; others are rejected. None means no limit.
        places: the number of calls that the engine runs at a time.
        forget: forgets the calls of event loops that are closed, which then release their places;
            called before a call waits or is rejected.

    Attributes:
        taken: the number of places that are taken.
    """

    def __init__(
        self, limit: int | None, places: int = 1, forget: Callable[[], None] | None = None
    ) -> None:
        self._limit = limit
        self._places = places
        self._forget = forget
        self.taken = 0
        self._waiting: FairQueue[_Call] = FairQueue()
        # Of the queue. The number of places needs none: no thread stops between a test of it and
        # its change, because no function is called there.
        self._lock = threading.RLock()
        self._moved = 0.0
        self._seconds = 1.0

    def resize(self, places: int) -> None:
        """Change the number of places; new places go to waiting requests."""
        self._places = places
        with self._lock:
            while self._waiting.requests and self.taken < places:
                self.taken += 1
                self._pass_on()

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting.requests)

    @property
    def is_full(self) -> bool:
        """True if a call has to wait for a place."""
        return self.taken >= self._places or bool(self._waiting.requests)

    def check(self, ticket: Ticket | None = None) -> None:
        """Raise `Busy` if the queue is full, unless the request was admitted before."""
        if self._limit is None or self.taken < self._places:
            return
        if self._forget is not None and len(self._waiting.requests) >= self._limit:
            self._forget()
            if self.taken < self._places:
                return
        waiting = len(self._waiting.requests)
        # OpenAI's clients do not retry after a delay of more than two minutes (contract 1.5).
        check_room(waiting, self._limit, ticket, min(max(self._seconds * waiting / 2, 0.1), 60.0))

    def try_take(self, ticket: Ticket | None = None) -> bool:
        """Take a place if one is free and no request waits; return True if taken."""
        if self.taken >= self._places or self._waiting.requests:
            return False
        self.taken += 1
        if ticket is not None:
            ticket.admitted = True
        return True

    async def take(self, ticket: Ticket | None = None) -> None:
        """Wait for a place; `release` gives it back.

        Args:
            ticket: the request of the call; by default the call is a separate request.

        Raises:
            Busy: the queue is full and the request was not admitted before.
        """
        if self.try_take(ticket):
            return
        if self._forget is not None:
            self._forget()
        self.check(ticket)
        call = _Call(ticket or Ticket())
        call.ticket.admitted = True
        call.ticket.queued += 1
        with self._lock:
            if not self._waiting.requests:
                self._moved = call.since
            self._waiting.add(call)
            # Another thread may have released a place since.
            self.resize(self._places)
        try:
            await call.place
        except BaseException:
            # Also the end of a task whose event loop was closed.
            call.ticket.note_wait(call.since)
            with self._lock:
                if call.has_place:
                    self.release()
                elif call in self._waiting.requests.get(call.ticket, ()):
                    self._waiting.remove(call)
            raise

    def release(self) -> None:
        """Give a place back; it goes to the next request."""
        if self._waiting.requests and self.taken <= self._places:
            self._pass_on()
        else:
            self.taken -= 1

    async def __aenter__(self) -> None:
        await self.take()

    async def __aexit__(self, *error: object) -> None:
        self.release()

    def _pass_on(self) -> None:
        """Give a taken place to the next call of the next request."""
        with self._lock:
            for call in self._waiting.in_turn():
                if call.place.done() or not settle(call.place, None):
                    self._waiting.remove(call)
                    continue
                call.has_place = True
                self._waiting.take(call)
                now = time.monotonic()
                self._seconds = 0.8 * self._seconds + 0.2 * (now - self._moved)
                self._moved = now
                call.ticket.note_wait(call.since)
                return
            self.taken -= 1
