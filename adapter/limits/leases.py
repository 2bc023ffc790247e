"""The limits of a key, as pure arithmetic: windows of a minute, and leases.

A window counts what happened in the last minute, in buckets of half a second. A bucket is dropped
when all of it is older than a minute, so there are never more than the limit in any 60 seconds.
The clock is an argument, so that a database can count by its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Literal, NamedTuple, Protocol, TypeAlias

# The length of a window in seconds, and its buckets: those of a minute, and the current one.
SECONDS, PER_SECOND = 60, 2
BUCKETS = SECONDS * PER_SECOND + 1
# Seconds after which a request may be sent again if too many of its key run.
BUSY_SECONDS = 1.0

Kind: TypeAlias = Literal["requests", "tokens", "concurrent"]
KINDS: Sequence[Kind] = ("requests", "tokens", "concurrent")


class Rates(NamedTuple):
    """The limits of a key; None where there is none.

    Args:
        requests, tokens: in any 60 seconds.
        concurrent: at the same time.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None


NO_RATES = Rates()


class Grant(NamedTuple):
    """The permissions of a key.

    Args:
        name: the name of its table.
        weight: its share of a busy engine.
        names: the names of models that it may use; None for all.
        prefixes: the beginnings of such names.
    """

    name: str
    rates: Rates = NO_RATES
    weight: float = 1.0
    names: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()

    def allows(self, model: str) -> bool:
        """Return True if the key may use a model with this name."""
        return self.names is None or model in self.names or model.startswith(self.prefixes)

    @property
    def shown(self) -> str:
        """The names of models that it may use, for errors."""
        return ", ".join([*sorted(self.names or ()), *(f"{one}*" for one in self.prefixes)])


class Refusal(NamedTuple):
    """A limit that a request exceeds.

    Args:
        wait: the seconds after which the request fits, if no other one comes first.
        left: the requests and tokens that are left; infinite without a limit.
    """

    kind: Kind
    limit: int
    used: int
    requested: int
    wait: float
    left: tuple[float, float]


class Window:
    """The amounts of the last minute.

    Args:
        limit: the largest sum; infinite if there is no limit.
        buckets: the number of each bucket, which is its time in half seconds, and its amount.

    Attributes:
        used: the sum. What is added to it is in the newest bucket.
    """

    __slots__ = ("_before", "_buckets", "limit", "used")

    def __init__(self, limit: float, buckets: Iterable[list[int]] = ()) -> None:
        self.limit = limit
        self._buckets = deque(buckets)
        self.used = sum(amount for _, amount in self._buckets)
        # The sum of all buckets before the newest one.
        self._before = self.used - (self._buckets[-1][1] if self._buckets else 0)

    @property
    def buckets(self) -> deque[list[int]]:
        """The number of each bucket, and its amount."""
        buckets = self._buckets
        if buckets:
            buckets[-1][1] = self.used - self._before
        return buckets

    def turn(self, now: int) -> None:
        """Begin a bucket, if the newest one is older, and drop those that end a minute before."""
        buckets = self.buckets
        while buckets and buckets[0][0] <= now - BUCKETS:
            self.used -= buckets.popleft()[1]
        if not buckets or buckets[-1][0] < now:
            buckets.append([now, 0])
        self._before = self.used - buckets[-1][1]

    def refund(self, at: int, amount: int) -> None:
        """Take an amount from the bucket that it was added to, if that is still there."""
        buckets = self.buckets
        for bucket in reversed(buckets):
            if bucket[0] <= at:
                if bucket[0] == at:
                    bucket[1] -= amount
                    self.used -= amount
                    self._before = self.used - buckets[-1][1]
                return

    def wait(self, time: float, amount: int) -> float:
        """Return the seconds until an amount fits; 0 if it fits now."""
        excess = self.used + amount - self.limit
        for number, taken in self.buckets:
            if excess <= 0:
                break
            excess -= taken
            if excess <= 0:
                return max((number + 1) / PER_SECOND + SECONDS - time, 0.0)
        return 0.0 if excess <= 0 else float(SECONDS)


class Account:
    """The windows and the running requests of a key.

    Args:
        clock: returns the time in seconds.
        requests, tokens: the buckets of its windows.

    Attributes:
        running: the number of its leases.
    """

    __slots__ = ("_clock", "_most", "_now", "rates", "requests", "running", "tokens")

    def __init__(
        self,
        rates: Rates,
        clock: Callable[[], float] = monotonic,
        requests: Iterable[list[int]] = (),
        tokens: Iterable[list[int]] = (),
    ) -> None:
        self._clock = clock
        self.requests, self.tokens = Window(math.inf, requests), Window(math.inf, tokens)
        # The number of the newest bucket of both windows.
        self._now = -1
        found = [window.buckets[-1][0] for window in (self.requests, self.tokens) if window.buckets]
        if found:
            self._turn(max(found))
        self._most = math.inf
        self.running = 0
        self.limit(rates)

    def limit(self, rates: Rates) -> None:
        """Apply other limits from now on."""
        self.rates = rates
        self.requests.limit = math.inf if rates.requests is None else rates.requests
        self.tokens.limit = math.inf if rates.tokens is None else rates.tokens
        self._most = math.inf if rates.concurrent is None else rates.concurrent

    def reserve(self, tokens: int) -> Lease | Refusal:
        """Take a place, a request and tokens, or nothing; return the limit that forbids it.

        Every request with limits takes this path, so it makes no call where it can.

        Args:
            tokens: at most the limit of tokens.
        """
        now = int(self._clock() * PER_SECOND)
        if now > self._now:
            self._turn(now)
        requests, spent = self.requests, self.tokens
        if (
            requests.used >= requests.limit
            or spent.used + tokens > spent.limit
            or self.running >= self._most
        ):
            return self._refusal(tokens)
        requests.used += 1
        spent.used += tokens
        self.running += 1
        left = requests.limit - requests.used, spent.limit - spent.used
        return Lease(self, self._now, tokens, left)

    def settle(self, lease: Lease, used: int) -> None:
        """End a lease: what it did not use is free again, and what it used beyond counts now."""
        self.running -= 1
        unused = lease.tokens - used
        if unused < 0:
            now = int(self._clock() * PER_SECOND)
            if now > self._now:
                self._turn(now)
        elif lease.at != self._now:
            self.tokens.refund(lease.at, unused)
            return
        self.tokens.used -= unused

    def _turn(self, now: int) -> None:
        """Begin the buckets of a new half second."""
        self.requests.turn(now)
        self.tokens.turn(now)
        self._now = now

    def _refusal(self, tokens: int) -> Refusal:
        """Return the limit that the request exceeds for the longest time."""
        found: list[Refusal] = []
        time, running = self._clock(), self.running
        left = self.requests.limit - self.requests.used, self.tokens.limit - self.tokens.used
        if running >= self._most:
            found.append(Refusal("concurrent", int(self._most), running, 1, BUSY_SECONDS, left))
        for kind, window, amount in (
            ("requests", self.requests, 1),
            ("tokens", self.tokens, tokens),
        ):
            if window.used + amount > window.limit:
                wait = window.wait(time, amount)
                found.append(Refusal(kind, int(window.limit), window.used, amount, wait, left))  # type: ignore[arg-type]
        return max(found, key=lambda one: one.wait)


class SharedAccount(Account):
    """An account that several processes share: its leases have names, and expire by themselves.

    Args:
        clock: returns the time in seconds, of a clock that all processes share.
        leases: the time at which each lease expires.
    """

    __slots__ = ("leases",)

    def __init__(
        self,
        rates: Rates,
        clock: Callable[[], float],
        requests: Iterable[list[int]] = (),
        tokens: Iterable[list[int]] = (),
        leases: dict[str, float] | None = None,
    ) -> None:
        super().__init__(rates, clock, requests, tokens)
        self.leases = {} if leases is None else leases
        self.running = len(self.leases)

    def reserve_as(self, name: str, tokens: int, seconds: float) -> Lease | Refusal:
        """Do what `reserve` does, under the name of a lease.

        Args:
            seconds: the time after which the lease expires, if nobody renews it.
        """
        found = self.reserve(tokens)
        if not isinstance(found, Lease) and self.expire():
            found = self.reserve(tokens)
        if isinstance(found, Lease):
            self.leases[name] = self._clock() + seconds
        return found

    def settle_as(self, name: str, lease: Lease, used: int) -> None:
        """Do what `settle` does, for the lease of a name."""
        self.leases.pop(name, None)
        self.settle(lease, used)
        self.running = len(self.leases)

    def renew(self, names: Iterable[str], seconds: float) -> None:
        """Let leases expire later; one that has expired already stays so."""
        for name in names:
            if name in self.leases:
                self.leases[name] = self._clock() + seconds

    def expire(self) -> bool:
        """Forget the leases that nobody has renewed: their process has ended; True if any were."""
        time, before = self._clock(), self.running
        for name in [one for one, expires in self.leases.items() if expires <= time]:
            del self.leases[name]
        self.running = len(self.leases)
        return self.running < before


class LimitsError(Exception):
    """A store of limits that cannot be used as it is set; the message shows no password."""


class LeaseStore(Protocol):
    """A store of the limits, which counts them."""

    async def reserve(self, grant: Grant, tokens: int) -> Lease | Refusal:
        """Take a place, a request and tokens, or nothing.

        Args:
            tokens: at most the limit of tokens.

        Raises:
            LimitsUnavailable: the store does not answer, and requests are refused then.
        """
        ...

    def try_reserve(self, grant: Grant, tokens: int) -> Lease | Refusal | None:
        """Do what `reserve` does, if that needs no wait; None if it does."""
        return None

    async def open(self) -> None:
        """Check that the store answers.

        Raises:
            LimitsError: it cannot be used as it is set.
            LimitsUnavailable: it does not answer now.
        """
        ...

    async def look(self) -> None:
        """Check the same, and change nothing in the store; see `open`."""
        await self.open()

    def is_up(self) -> bool:
        """Return True unless the store has a database that does not answer."""
        return True

    async def aclose(self) -> None:
        """Write what is left, and close the connections."""
        ...


class Settling(Protocol):
    """An account, or a store that several processes share: it counts a lease."""

    def settle(self, lease: Lease, used: int) -> None:
        """End a lease soon, with the tokens that it used; nobody waits for that."""
        ...


class Lease:
    """A place, a request and tokens that a request has until its end.

    Args:
        counter: counts it; None after its end.
        at: the bucket in which its tokens were reserved.
        tokens: the number of reserved tokens.
        left: the numbers of requests and of tokens that the key has left after it.

    Attributes:
        prompt: the number of tokens of the prompt: an estimate, until an engine has counted them.
        generated: the number of tokens that were generated for it so far.
    """

    __slots__ = ("at", "counter", "generated", "left", "prompt", "tokens")

    def __init__(self, counter: Settling, at: int, tokens: int, left: tuple[float, float]) -> None:
        self.counter: Settling | None = counter
        self.at = at
        self.tokens = tokens
        self.left = left
        self.prompt = self.generated = 0

    def settle(self, used: int) -> None:
        """End the lease with the tokens that were used; only the first end counts."""
        counter, self.counter = self.counter, None
        if counter is not None:
            counter.settle(self, used)

    def release(self) -> None:
        """End the lease of a request without usage: it has used what was generated for it."""
        self.settle(self.prompt + self.generated if self.generated else 0)
