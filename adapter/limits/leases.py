"""The limits of a key, as pure arithmetic: windows of a minute, and leases.

A window counts what happened in the last minute, in buckets of half a second. A bucket is dropped
when all of it is older than a minute, so there are never more than the limit in any 60 seconds.
The time is an argument, so that a database can count by its own clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

# The length of a window in seconds, and its buckets: those of a minute, and the current one.
SECONDS, PER_SECOND = 60, 2
BUCKETS = SECONDS * PER_SECOND + 1
# Seconds after which a request may be sent again if too many of its key run.
BUSY_SECONDS = 1.0

Kind: TypeAlias = Literal["requests", "tokens", "concurrent"]
KINDS: Sequence[Kind] = ("requests", "tokens", "concurrent")


@dataclass(frozen=True, slots=True)
class Rates:
    """The limits of a key; None where there is none.

    Args:
        requests, tokens: in any 60 seconds.
        concurrent: at the same time.
    """

    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None


NO_RATES = Rates()


@dataclass(frozen=True, slots=True)
class Grant:
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
    """

    kind: Kind
    limit: int
    used: int
    requested: int
    wait: float


class Window:
    """The amounts of the last minute.

    Args:
        limit: the largest sum; infinite if there is no limit.
        buckets: the number of each bucket, which is its time in half seconds, and its amount.

    Attributes:
        used: the sum.
    """

    __slots__ = ("buckets", "limit", "used")

    def __init__(self, limit: float, buckets: Iterable[list[int]] = ()) -> None:
        self.limit = limit
        self.buckets = deque(buckets)
        self.used = sum(amount for _, amount in self.buckets)

    def add(self, now: int, amount: int) -> None:
        """Add an amount to the current bucket, or to the newest one if the clock was set back."""
        if self.buckets and self.buckets[-1][0] >= now:
            self.buckets[-1][1] += amount
        else:
            self.buckets.append([now, amount])
        self.used += amount

    def refund(self, at: int, amount: int) -> None:
        """Take an amount from the bucket that it was added to, if that is still there."""
        for bucket in reversed(self.buckets):
            if bucket[0] <= at:
                if bucket[0] == at:
                    bucket[1] -= amount
                    self.used -= amount
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
    """The windows and the leases of a key.

    Args:
        requests, tokens: the buckets of its windows.
        leases: the time at which each lease expires by itself.
    """

    __slots__ = ("_now", "leases", "most", "rates", "requests", "tokens")

    def __init__(
        self,
        rates: Rates,
        requests: Iterable[list[int]] = (),
        tokens: Iterable[list[int]] = (),
        leases: dict[str, float] | None = None,
    ) -> None:
        self.requests, self.tokens = Window(math.inf, requests), Window(math.inf, tokens)
        # The bucket of the last request, which then is the newest one of both windows.
        self._now = -1
        self.most = math.inf
        self.leases = {} if leases is None else leases
        self.limit(rates)

    def limit(self, rates: Rates) -> None:
        """Apply other limits from now on."""
        self.rates = rates
        self.requests.limit = math.inf if rates.requests is None else rates.requests
        self.tokens.limit = math.inf if rates.tokens is None else rates.tokens
        self.most = math.inf if rates.concurrent is None else rates.concurrent

    def reserve(
        self, time: float, tokens: int, lease: str, expires: float = math.inf
    ) -> Refusal | None:
        """Take a place, a request and tokens, or nothing; return the limit that forbids it.

        Every request with limits takes this path, so it makes no call where it can.

        Args:
            time: in seconds, of a clock that all callers share.
            tokens: at most the limit of tokens.
            expires: the time at which the lease expires by itself.
        """
        now = int(time * PER_SECOND)
        requests, spent, leases = self.requests, self.tokens, self.leases
        if now != self._now:
            for window in (requests, spent):
                buckets = window.buckets
                while buckets and buckets[0][0] <= now - BUCKETS:
                    window.used -= buckets.popleft()[1]
        if (
            requests.used >= requests.limit
            or spent.used + tokens > spent.limit
            or len(leases) >= self.most
        ):
            self.expire(time)
            refusal = self._refusal(time, tokens)
            if refusal is not None:
                return refusal
        if now != self._now:
            self._now = now
            for window in (requests, spent):
                if not window.buckets or window.buckets[-1][0] < now:
                    window.buckets.append([now, 0])
        requests.buckets[-1][1] += 1
        requests.used += 1
        spent.buckets[-1][1] += tokens
        spent.used += tokens
        leases[lease] = expires
        return None

    def settle(self, time: float, lease: str, at: int, reserved: int, used: int) -> None:
        """End a lease: what it did not use is free again, and what it used beyond counts now.

        Args:
            at: the bucket in which its tokens were reserved.
        """
        self.leases.pop(lease, None)
        if used < reserved:
            buckets = self.tokens.buckets
            # A short request saves a call.
            if buckets and buckets[-1][0] == at:
                buckets[-1][1] -= reserved - used
                self.tokens.used -= reserved - used
            else:
                self.tokens.refund(at, reserved - used)
        elif used > reserved:
            self.tokens.add(int(time * PER_SECOND), used - reserved)

    def renew(self, leases: Iterable[str], expires: float) -> None:
        """Let leases expire later; one that has expired already stays so."""
        for lease in leases:
            if lease in self.leases:
                self.leases[lease] = expires

    def expire(self, time: float) -> None:
        """Forget the leases that nobody has renewed: their process has ended."""
        for lease in [one for one, expires in self.leases.items() if expires <= time]:
            del self.leases[lease]

    def _refusal(self, time: float, tokens: int) -> Refusal | None:
        """Return the limit that the request exceeds for the longest time; None if there is none."""
        found: list[Refusal] = []
        if len(self.leases) >= self.most:
            running = len(self.leases)
            found.append(Refusal("concurrent", int(self.most), running, 1, BUSY_SECONDS))
        for kind, window, amount in (
            ("requests", self.requests, 1),
            ("tokens", self.tokens, tokens),
        ):
            if window.used + amount > window.limit:
                wait = window.wait(time, amount)
                found.append(Refusal(kind, int(window.limit), window.used, amount, wait))  # type: ignore[arg-type]
        return max(found, key=lambda one: one.wait, default=None)


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

    def settle(self, lease: Lease, used: int) -> None:
        """End a lease soon, with the tokens that it used; nobody waits for that."""
        ...

    async def open(self) -> None:
        """Check that the store answers.

        Raises:
            LimitsError: it cannot be used as it is set.
            LimitsUnavailable: it does not answer now.
        """
        ...

    async def aclose(self) -> None:
        """Write what is left, and close the connections."""
        ...


class Lease:
    """A place, a request and tokens that a request has until its end.

    Args:
        id: its name in the store.
        at: the bucket in which its tokens were reserved.
        tokens: the number of reserved tokens.
        left: the numbers of requests and of tokens that the key has left after it.

    Attributes:
        prompt: the number of tokens that the prompt may have.
        generated: the number of tokens that were generated for it so far.
    """

    __slots__ = ("at", "generated", "grant", "id", "left", "prompt", "store", "tokens")

    def __init__(
        self,
        store: LeaseStore,
        grant: Grant,
        id: str,  # noqa: A002
        at: int,
        tokens: int,
        left: tuple[float, float],
    ) -> None:
        self.store: LeaseStore | None = store
        self.grant = grant
        self.id = id
        self.at = at
        self.tokens = tokens
        self.left = left
        self.prompt = self.generated = 0

    def settle(self, used: int) -> None:
        """End the lease with the tokens that were used; only the first end counts."""
        store, self.store = self.store, None
        if store is not None:
            store.settle(self, used)

    def release(self) -> None:
        """End the lease of a request without usage: it has used what was generated for it."""
        if self.store is not None:
            self.settle(self.prompt + self.generated if self.generated else 0)
