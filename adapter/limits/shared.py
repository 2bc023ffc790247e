"""Limits that several processes share: what a database is asked, and what happens without it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..errors import LimitsUnavailable
from .leases import Grant, Lease, LeaseStore, Refusal
from .memory import MemoryLimits

log = logging.getLogger("latimer")

# Seconds in which the database must answer, and in which it is not asked after it did not.
ANSWER_SECONDS, DOWN_SECONDS = 1.0, 1.0
# Seconds after which a lease expires by itself, and between two renewals of those of a process.
LEASE_SECONDS, RENEW_SECONDS = 30.0, 10.0
# Seconds to wait for another process that may be about to end a lease of the same key: a client
# sends its next request when it has the answer, and that may be a moment before.
GRACE = 0.05


class SharedLimits(LeaseStore):
    """The base class of stores of limits in a database.

    Leases have an expiry, which their process renews: those of a process that was killed end by
    themselves.

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
        # The leases of this process, and its work that nobody waits for.
        self._leases: dict[str, Lease] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._renewing: asyncio.Task[None] | None = None

    @abstractmethod
    async def _reserve(self, grant: Grant, tokens: int, name: str) -> Lease | Refusal:
        """Ask the database for a lease.

        Raises:
            LimitsUnavailable: it does not answer.
        """

    @abstractmethod
    async def _settle(self, lease: Lease, used: int) -> None:
        """Tell the database the end of a lease; see `_reserve`."""

    @abstractmethod
    async def _renew(self, leases: Mapping[str, Sequence[str]]) -> None:
        """Let leases expire later, by the name of their key; see `_reserve`."""

    @abstractmethod
    async def _close(self) -> None:
        """Close the connections."""

    async def reserve(self, grant: Grant, tokens: int) -> Lease | Refusal:
        """See `LeaseStore.reserve`."""
        if time.monotonic() < self._down_until:
            return await self._without(grant, tokens, LimitsUnavailable("it did not answer"))
        try:
            found = await self._asked(grant, tokens)
            if isinstance(found, Refusal) and found.kind == "concurrent":
                await asyncio.sleep(GRACE)
                found = await self._asked(grant, tokens)
        except LimitsUnavailable as error:
            return await self._without(grant, tokens, error)
        if isinstance(found, Lease):
            self._leases[found.id] = found
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.get_running_loop().create_task(self._keep())
        return found

    def settle(self, lease: Lease, used: int) -> None:
        """See `LeaseStore.settle`."""
        self._leases.pop(lease.id, None)
        self._start(self._settled(lease, used))

    async def aclose(self) -> None:
        """See `LeaseStore.aclose`."""
        if self._renewing is not None:
            # The event loop of the task may have ended.
            with suppress(RuntimeError):
                self._renewing.cancel()
        if self._tasks:
            with suppress(ValueError):
                await asyncio.wait(self._tasks, timeout=ANSWER_SECONDS)
        await self._close()

    async def _asked(self, grant: Grant, tokens: int) -> Lease | Refusal:
        """Ask the database; a lease that comes after the client has disconnected is ended."""
        self._count += 1
        asking = self._start(self._reserve(grant, tokens, f"{self._process}-{self._count}"))
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await asyncio.shield(asking)
        except TimeoutError:
            asking.add_done_callback(self._end)
            raise self._fail(LimitsUnavailable("it did not answer in time")) from None
        except LimitsUnavailable as error:
            raise self._fail(error) from None
        except asyncio.CancelledError:
            asking.add_done_callback(self._end)
            raise
        if self._is_down:
            self._is_down = False
            log.warning("the store of the limits answers again")
        return found

    def _end(self, asking: asyncio.Task[Lease | Refusal]) -> None:
        """End a lease that nobody waits for any more."""
        if not asking.cancelled() and asking.exception() is None:
            found = asking.result()
            if isinstance(found, Lease):
                found.settle(0)

    async def _without(
        self, grant: Grant, tokens: int, error: LimitsUnavailable
    ) -> Lease | Refusal:
        if not self._admits:
            raise error
        return await self._alone.reserve(grant, tokens)

    def _fail(self, error: LimitsUnavailable) -> LimitsUnavailable:
        """Ask the database no more for a moment; the log says so once."""
        self._down_until = time.monotonic() + DOWN_SECONDS
        if not self._is_down:
            self._is_down = True
            result = "this process counts alone" if self._admits else "requests are refused"
            log.error("the store of the limits does not answer, so %s: %s", result, error.detail)
        return error

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _settled(self, lease: Lease, used: int) -> None:
        """End a lease; if that fails, it expires by itself, and its tokens do within a minute."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._settle(lease, used)
        except TimeoutError:
            self._fail(LimitsUnavailable("it did not answer in time"))
        except LimitsUnavailable as error:
            self._fail(error)

    async def _keep(self) -> None:
        """Renew the leases of this process until it has none."""
        while self._leases:
            await asyncio.sleep(RENEW_SECONDS)
            leases: dict[str, list[str]] = {}
            for lease in self._leases.values():
                leases.setdefault(lease.grant.name, []).append(lease.id)
            if leases and time.monotonic() >= self._down_until:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await self._renew(leases)
                except TimeoutError:
                    self._fail(LimitsUnavailable("it did not answer in time"))
                except LimitsUnavailable as error:
                    self._fail(error)
