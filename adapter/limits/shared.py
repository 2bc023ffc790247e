"""Limits that several processes share: what a database is asked, and what happens without it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...backends.queue import is_running, settle
from ..errors import LimitsUnavailable
from ..probe import PROBE_SECONDS, Probe
from .leases import Grant, Lease, LeaseStore, LimitsError, Refusal
from .memory import MemoryLimits

log = logging.getLogger("latimer")

# Seconds in which the database must answer, and in which it is not asked after it did not.
ANSWER_SECONDS, DOWN_SECONDS = 1.0, 1.0
# Seconds after which a lease expires by itself, and between two renewals of those of a process.
LEASE_SECONDS, RENEW_SECONDS = 30.0, 10.0
# Seconds to wait for another process that may be about to end a lease of the same key: a client
# sends its next request when it has the answer, and that may be a moment before.
GRACE = 0.05
# The steps that a database is asked for together, at most.
MOST_STEPS = 256

LATE = "it did not answer in time"


class Refused(LimitsUnavailable):
    """A database that answers and refuses, until its operator changes it or the settings."""


class SharedLease(Lease):
    """A lease that a database knows.

    Args:
        store: the store, which settles it.
        id: its name there.
    """

    __slots__ = ("grant", "id")

    def __init__(
        self,
        store: SharedLimits,
        grant: Grant,
        id: str,  # noqa: A002
        at: int,
        tokens: int,
        left: tuple[float, float],
    ) -> None:
        super().__init__(store, at, tokens, left)
        self.grant = grant
        self.id = id


@dataclass(slots=True)
class Reserve:
    """Take a place, a request and tokens under the name of a lease, or nothing."""

    grant: Grant
    tokens: int
    lease: str


@dataclass(slots=True)
class Settle:
    """End a lease with the tokens that it used."""

    lease: SharedLease
    used: int

    @property
    def grant(self) -> Grant:
        """The grant of the lease."""
        return self.lease.grant


@dataclass(slots=True)
class Renew:
    """Let leases of a key expire later."""

    grant: Grant
    leases: Sequence[str]


Step: TypeAlias = Reserve | Settle | Renew


class SharedLimits(LeaseStore):
    """The base class of stores of limits in a database.

    Steps run in their order, on one connection of each process. Those that wait while others run
    are done together afterwards. Leases have an expiry, which their process renews: those of a
    process that was killed end by themselves.

    Args:
        admits: True to count in this process alone while the database does not answer; False to
            refuse requests then.
    """

    def __init__(self, admits: bool) -> None:
        self._admits = admits
        self._alone = MemoryLimits()
        self._process = secrets.token_hex(6)
        self._count = 0
        self._is_down = False
        self._down_until = 0.0
        self._leases: dict[str, SharedLease] = {}
        self._waiting: list[tuple[Step, asyncio.Future[Any]]] = []
        self._working: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None
        # A database can be lost, and come back, while no key with limits is used.
        self._probe = Probe(self._ask, self._note_probe)

    @abstractmethod
    async def _connect(self) -> None:
        """Connect, and make what the steps need.

        Raises:
            LimitsError: the URL is wrong.
            Refused: the database refuses the user, the password, or the name of the database.
            LimitsUnavailable: it does not answer.
        """

    @abstractmethod
    async def _ping(self) -> None:
        """Ask a trivial question; connect first if that is necessary; see `_connect`."""

    async def _reach(self) -> None:
        """Connect, and change nothing; see `_connect`."""
        await self._ping()

    @abstractmethod
    async def _run(self, steps: Sequence[Step]) -> Sequence[Any]:
        """Do steps, and return their results: a `SharedLease` or a `Refusal` for each `Reserve`.

        Raises:
            LimitsUnavailable: the database does not answer.
        """

    def _cut(self) -> None:
        """End a connection on which the database does not answer in time."""
        return

    @abstractmethod
    async def _close(self) -> None:
        """Close the connection."""

    async def open(self) -> None:
        """See `LeaseStore.open`; from then on, an idle database is asked whether it answers."""
        try:
            with _refusing():
                await self._connect()
        except LimitsUnavailable:
            # The caller says so.
            self._is_down = True
            self._probe.start()
            raise
        self._probe.start()

    async def look(self) -> None:
        """See `LeaseStore.look`."""
        with _refusing():
            await self._reach()

    def is_up(self) -> bool:
        """See `LeaseStore.is_up`; as far as the last step or probe has shown."""
        return not self._is_down

    async def reserve(self, grant: Grant, tokens: int) -> Lease | Refusal:
        """See `LeaseStore.reserve`; while it counts alone, nobody waits for a lost database."""
        if self._is_down and self._admits:
            self._ask_soon()
            return await self._alone.reserve(grant, tokens)
        if time.monotonic() < self._down_until:
            return await self._without(grant, tokens, LimitsUnavailable("it did not answer"))
        try:
            found = await self._asked(grant, tokens)
            if isinstance(found, Refusal) and found.kind == "concurrent":
                await asyncio.sleep(GRACE)
                found = await self._asked(grant, tokens)
        except LimitsUnavailable as error:
            return await self._without(grant, tokens, error)
        if isinstance(found, SharedLease):
            self._leases[found.id] = found
            if not is_running(self._renewing):
                self._renewing = asyncio.get_running_loop().create_task(self._keep())
        return found

    def settle(self, lease: Lease, used: int) -> None:
        """See `Settling.settle`; if that fails, the lease and its tokens expire by themselves."""
        assert isinstance(lease, SharedLease)
        self._leases.pop(lease.id, None)
        self._add(Settle(lease, used))

    async def aclose(self) -> None:
        """See `LeaseStore.aclose`."""
        self._probe.cancel()
        # The event loop of the tasks may have ended.
        with suppress(RuntimeError, ValueError):
            for task in (self._renewing, self._asking):
                if task is not None:
                    task.cancel()
            if is_running(self._working):
                await asyncio.wait([self._working], timeout=ANSWER_SECONDS)
        # A step that failed meanwhile has started it again.
        self._probe.cancel()
        await self._close()

    async def _asked(self, grant: Grant, tokens: int) -> SharedLease | Refusal:
        """Ask the database; a lease that comes after the client has disconnected is ended."""
        self._count += 1
        asking = self._add(Reserve(grant, tokens, f"{self._process}-{self._count}"))
        try:
            found: SharedLease | Refusal = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_end)
            raise
        return found

    async def _without(
        self, grant: Grant, tokens: int, error: LimitsUnavailable
    ) -> Lease | Refusal:
        if not self._admits:
            raise error
        return await self._alone.reserve(grant, tokens)

    def _add(self, step: Step) -> asyncio.Future[Any]:
        """Do a step soon; return its result."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((step, done))
        if not is_running(self._working):
            self._working = loop.create_task(self._work())
        return done

    async def _work(self) -> None:
        """Do what waits, until nothing does."""
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_STEPS], self._waiting[MOST_STEPS:]
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    results = await self._run([step for step, _ in batch])
            except TimeoutError:
                self._cut()
                self._fail(LimitsUnavailable(LATE), batch)
            except Exception as error:
                self._fail(error, batch)
            else:
                for (_, done), result in zip(batch, results, strict=True):
                    settle(done, result)
                self._probe.used_at = time.monotonic()
                if self._is_down:
                    self._note_probe(None)

    def _fail(self, error: Exception, batch: Sequence[tuple[Step, asyncio.Future[Any]]]) -> None:
        """Ask the database no more for a moment; the log says so once."""
        self._down_until = time.monotonic() + DOWN_SECONDS
        if not isinstance(error, LimitsUnavailable):
            error = LimitsUnavailable(f"{type(error).__name__}: {error}")
        self._note_probe(error)
        # It may come back without another step.
        self._probe.start()
        for step, done in batch:
            if not isinstance(step, Reserve):
                settle(done, None)
            elif settle(done, error) and done.done():
                # The client may have disconnected.
                done.exception()

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._ping()
        except TimeoutError:
            self._cut()
            raise

    def _ask_soon(self) -> None:
        """Ask a lost database whether it answers again, unless it was asked a moment ago."""
        now = time.monotonic()
        if now >= self._down_until and not is_running(self._asking):
            self._down_until = now + DOWN_SECONDS
            self._asking = asyncio.get_running_loop().create_task(self._ask_again())

    async def _ask_again(self) -> None:
        self._note_probe(await self._probe.now())

    def _note_probe(self, error: Exception | None) -> None:
        """Note if the database answers; the log says once that it does not, and that it does."""
        if error is None:
            if self._is_down:
                self._is_down, self._down_until = False, 0.0
                log.warning("the store of the limits answers again")
        elif not self._is_down:
            self._is_down = True
            detail = LATE if isinstance(error, TimeoutError) else getattr(error, "detail", error)
            result = "this process counts alone" if self._admits else "requests are refused"
            log.error("the store of the limits does not answer, so %s: %s", result, detail)

    async def _keep(self) -> None:
        """Renew the leases of this process until it has none."""
        while self._leases:
            await asyncio.sleep(RENEW_SECONDS)
            leases: dict[Grant, list[str]] = {}
            for lease in self._leases.values():
                leases.setdefault(lease.grant, []).append(lease.id)
            for grant, ids in leases.items():
                self._add(Renew(grant, ids))


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn a refusal into `LimitsError`, because waiting does not help."""
    try:
        yield
    except Refused as error:
        raise LimitsError(error.detail) from None


def _end(asking: asyncio.Future[SharedLease | Refusal]) -> None:
    """End a lease that nobody waits for any more."""
    if asking.exception() is None:
        found = asking.result()
        if isinstance(found, Lease):
            found.settle(0)
