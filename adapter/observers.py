"""The observers of requests, which get what was measured of several requests together."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from operator import attrgetter
from time import perf_counter
from typing import Any, Protocol, TypeAlias

from .errors import in_log
from .record import GONE, NO_ENGINE, OTHER, PROBES, Record, engine_name
from .request import Exchange

log = logging.getLogger("latimer")

# Seconds after which observers get the requests that have ended, and the number of requests that
# they get at once. Their code is in no cache of the processor, so few requests at once cost more.
OBSERVED_AFTER, MOST_UNSEEN = 0.25, 256
# The times of tokens that wait with them: a millisecond of work.
_MOST_TIMES = 8192
# The same with their responses, which can be large.
_MOST_REPLIES = 8
# The bytes of a body from which on its request does not wait for others, because a part such as its
# end user may be in memory until then.
_LARGE = 65_536


# What a record has of its exchange and of its scope. They themselves would keep all that a request
# has made, so that the next ones find no memory which is in the processor's cache.
_FACTS = attrgetter(
    "status", "begun_at", "request_id", "model", "streams", "wants_stream", "is_left", "key",
    "grant", "end_user",
)  # fmt: skip
_PLACE = ("method", "path", "route", "client")
_CACHED = attrgetter("cached_tokens")
_FOLLOWS = attrgetter("follows")
# A request that has ended: its record, the time, `_FACTS`, and `_PLACE` with None for what is
# missing.
_Ended: TypeAlias = Sequence[Any]


class Observer(Protocol):
    """An observer of requests, which gets what was measured of them: a base class for your own.

    Attributes:
        keeps: see `Record`.
        follows: True to get the start of each request, too.
    """

    keeps: bool = False
    follows: bool = False

    def begin(self, exchange: Exchange) -> None:
        """Take a request that has arrived."""
        return

    def take(self, ended: Sequence[Record]) -> None:
        """Take requests that have ended, but for those of `PROBES`."""
        ...

    def close(self) -> None:
        """Finish what is left; nothing follows."""
        return


class Observers:
    """The observers of an adapter, and the requests that they do not have yet.

    Args:
        label_of: returns the name in metrics of the model that a request asks for.

    Attributes:
        all: the observers.
        running: the requests that run, if anybody observes them; threads change it, so read a copy.
        has_followers: True if some observers need more of a request that begins (`follow`).
        is_fleet: True if an engine can be one of several.
    """

    def __init__(self, observers: Sequence[Observer], label_of: Callable[[Exchange], str]) -> None:
        self._label_of = label_of
        self.is_fleet = False
        self.running: set[Exchange] = set()
        # The requests that have ended, which the observers do not have yet.
        self._unseen: list[_Ended] = []
        self._times = 0
        self._timer: asyncio.TimerHandle | None = None
        # The event loop of the timer.
        self._loop: asyncio.AbstractEventLoop | None = None
        # A request that is garbage can end while a thread has it.
        self._lock = threading.RLock()
        self.replace(observers)

    def replace(self, observers: Sequence[Observer]) -> None:
        """Let these observe the requests that begin from now on, and those that end."""
        self.flush()
        self.all = observers
        self._keeps = any(one.keeps for one in observers)
        self._most_unseen = _MOST_REPLIES if self._keeps else MOST_UNSEEN
        self._find_followers()

    def _find_followers(self) -> None:
        self._followers = [*filter(_FOLLOWS, self.all)]
        self.has_followers = self._keeps or bool(self._followers)

    def recorded(self, exchange: Exchange) -> None:
        """Measure a request, for the observers; `ErrorMiddleware` does it without a call."""
        record = exchange.record = Record()
        record.is_detached, record.trace = exchange.is_detached, exchange.trace
        record.forwarded = exchange.forwarded
        self.running.add(exchange)
        if self.has_followers:
            self.follow(exchange)

    def follow(self, exchange: Exchange) -> None:
        """Prepare what some observers need of a request that has begun."""
        if self._keeps and exchange.record is not None:
            exchange.record.keeps = True
        for one in self._followers:
            one.begin(exchange)

    def ended(self, exchange: Exchange, record: Record) -> None:
        """Note the end of a request that was measured; the observers get it soon.

        All else is done for several requests together. For each of them, it would be code that is
        in no cache of the processor.
        """
        self.running.discard(exchange)
        if not exchange.model and exchange.asked is not None:
            exchange.model = self._label_of(exchange)
        if not exchange.size:
            exchange.note_trace(record)
        row = [record, perf_counter(), *_FACTS(exchange), *map(exchange.scope.get, _PLACE)]
        # No other thread flushes between the look at the list and this.
        self._unseen.append(row)
        if record.arrivals:
            self._times += len(record.arrivals)
        is_full = len(self._unseen) >= self._most_unseen or self._times >= _MOST_TIMES
        if is_full or exchange.size > _LARGE:
            self.flush()
            return
        # A task that is garbage ends without an event loop; the next request has one.
        loop = asyncio._get_running_loop()
        if loop is not None and (self._timer is None or self._loop is not loop):
            self._loop = loop
            self._timer = loop.call_later(OBSERVED_AFTER, self.flush)

    def flush(self) -> None:
        """Pass the requests that have ended to the observers now."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        unseen, self._unseen, self._times = self._unseen, [], 0
        is_fleet, ended = self.is_fleet, list[Record]()
        for one in unseen:
            record = _completed(one, is_fleet)
            if record is not None:
                ended.append(record)
        if not ended:
            return
        # Observers count, and two threads would lose numbers.
        with self._lock:
            for observer in self.all:
                try:
                    observer.take(ended)
                except Exception:
                    # The others do not depend on it.
                    log.exception("An observer of requests has failed.")
            # Spans can be switched on after the start.
            self._find_followers()

    def close(self) -> None:
        """Pass on what has ended, and let the observers finish."""
        self.flush()
        for one in self.all:
            try:
                one.close()
            except Exception:
                # The store and the backends are closed after it.
                log.exception("An observer of requests has failed.")


def _completed(one: _Ended, is_fleet: bool) -> Record | None:
    """Return the record of a request that has ended, with the facts of every request.

    None for a path of operators, and for a request that a route or a middleware of the user has
    answered.
    """
    record: Record = one[0]
    (
        _, record.ended, status, record.begun_at, record.request_id, model, streams, wants_stream,
        record.is_left, key, grant, record.end_user, record.method, record.path, route, client,
    ) = one  # fmt: skip
    status = status or (GONE if record.is_left else record.failed)
    endpoint = getattr(route, "path", OTHER)
    if not status or endpoint in PROBES:
        return None
    record.status, record.endpoint = status, endpoint
    record.client = client[0] if client else ""
    record.model = model or OTHER
    # Work that outlives its request has events also without a reader.
    if wants_stream or (streams and not record.is_detached):
        record.is_stream = True
    record.has_table = grant is not None
    if not key:
        record.key = ""
    else:
        record.key = in_log(key) if grant is None else grant.name
    loading, last, ticket = record.loading, record.last, record.ticket
    record.queued = loading
    if ticket is not None:
        record.queued += ticket.waited
        if ticket.tries:
            record.tries += ticket.tries
    finishes = record.finishes
    if len(finishes) == 1:
        record.cached_tokens = finishes[0].cached_tokens
    elif finishes:
        record.cached_tokens = sum(map(_CACHED, finishes[:: record.choices_per_prompt]))
    else:
        record.cached_tokens = None
    record.overhead = 0.0
    if last:
        record.overhead = record.begun - record.begun_at - loading + record.ended - last
    if ticket is not None and ticket.engine:
        record.engine = ticket.engine
    elif record.engine:
        record.engine = NO_ENGINE if is_fleet else engine_name(record.engine)
    return record
