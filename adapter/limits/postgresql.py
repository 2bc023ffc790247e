"""Limits in PostgreSQL: one row for each key, with the state of its `leases.SharedAccount`."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import orjson
import psycopg
from psycopg import Connection
from typing_extensions import override

from ..daemon_threads import DaemonThreads
from ..errors import LimitsUnavailable
from ..postgresql_errors import reason_of
from .leases import NO_RATES, LimitsError, Refusal, SharedAccount
from .shared import (
    ANSWER_SECONDS,
    LATE,
    LEASE_SECONDS,
    Refused,
    Renew,
    Settle,
    SharedLease,
    SharedLimits,
    Step,
)

T = TypeVar("T")

# Seconds to connect, at least two for libpq, and until a dead network ends a connection.
_CONNECT_SECONDS, _DEAD_SECONDS = 2, 10
# The number of the lock that makes the table once; any will do that nobody else uses.
_LOCK = 0x6C61_7469_6D65

# A crash of the server may lose what the last minute used, and nothing else: the table needs no
# write-ahead log. The free space of its pages takes the next version of a row.
_CREATE = (
    "CREATE UNLOGGED TABLE IF NOT EXISTS latimer_limits "
    "(name text PRIMARY KEY, state text NOT NULL) WITH (fillfactor = 50)"
)
_INSERT = (
    "INSERT INTO latimer_limits (name, state) SELECT unnest(%s::text[]), '{}' "
    "ON CONFLICT (name) DO NOTHING"
)
_SELECT = (
    "SELECT name, state, extract(epoch FROM clock_timestamp())::float8 FROM latimer_limits "
    "WHERE name = ANY(%s) ORDER BY name FOR UPDATE"
)
_UPDATE = (
    "UPDATE latimer_limits SET state = new.state "
    "FROM unnest(%s::text[], %s::text[]) AS new (name, state) WHERE latimer_limits.name = new.name"
)


class PostgresLimits(SharedLimits):
    """A store of limits in PostgreSQL; see `SharedLimits`.

    Args:
        url: the address of the database, such as `postgresql://USER:PASSWORD@HOST/NAME`.
    """

    def __init__(self, url: str, admits: bool = True) -> None:
        super().__init__(admits)
        self._url = url
        self._thread = DaemonThreads(1, "latimer-limits")
        self._connection: Connection[Any] | None = None

    @override
    async def _connect(self) -> None:
        await self._in_thread(self._ready)

    @override
    async def _reach(self) -> None:
        await self._in_thread(lambda: self._connected().close())

    @override
    async def _ping(self) -> None:
        await self._in_thread(self._answered)

    @override
    async def _run(self, steps: Sequence[Step]) -> Sequence[Any]:
        until = time.monotonic() + ANSWER_SECONDS
        return await self._in_thread(partial(self._transact, steps, until))

    @override
    async def _close(self) -> None:
        # A second one has nothing to close.
        with suppress(RuntimeError):
            closing = asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
            self._thread.shutdown()
            if not (await asyncio.wait([closing], timeout=ANSWER_SECONDS))[0]:
                self._cut()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Return the result of a function that waits for the database.

        A function that nobody waits for any more still ends.

        Raises:
            LimitsUnavailable: the database does not answer; its connection is then closed.
        """
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        except RuntimeError:
            raise LimitsUnavailable("it is closed") from None
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(_ignore)
            raise

    @override
    def _cut(self) -> None:
        connection = self._connection
        if connection is not None:
            with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as one:
                one.shutdown(socket.SHUT_RDWR)

    def _answered(self) -> None:
        """Ask a trivial question, on a new connection if the database was started again."""
        connection = self._connection
        if connection is not None:
            with suppress(psycopg.Error), connection.transaction():
                connection.execute("SELECT 1")
                return
            self._disconnect()
        self._ready()

    def _ready(self) -> Connection[Any]:
        """Return the connection; a new one makes the table if it is missing."""
        if self._connection is not None:
            return self._connection
        connection = self._connected()
        try:
            with connection.transaction():
                connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
                found = connection.execute("SELECT to_regclass('latimer_limits')").fetchone()
                if found is None or found[0] is None:
                    connection.execute(_CREATE)
            # A commit that is lost is one that the clients do not see, too.
            connection.execute("SET synchronous_commit TO off")
            connection.execute("SET statement_timeout TO 1000")
            connection.commit()
        except psycopg.Error as error:
            connection.close()
            raise _unavailable(error) from None
        self._connection = connection
        return connection

    def _connected(self) -> Connection[Any]:
        """Return a new connection."""
        options: dict[str, Any] = {
            "application_name": "latimer",
            "connect_timeout": _CONNECT_SECONDS,
            "tcp_user_timeout": _DEAD_SECONDS * 1000,
            "keepalives_idle": _DEAD_SECONDS // 2,
            "keepalives_interval": 1,
            "keepalives_count": _DEAD_SECONDS // 2,
        }
        try:
            return psycopg.connect(self._url, **options)
        except psycopg.ProgrammingError:
            # Its message has the value of a wrong option.
            raise LimitsError("the URL is wrong") from None
        except psycopg.Error as error:
            raise _unavailable(error) from None

    def _transact(self, steps: Sequence[Step], until: float) -> list[Any]:
        """Do steps in one transaction, and return their results.

        Args:
            until: the time after which nobody waits for them (`time.monotonic`).
        """
        _check(until)
        connection = self._ready()
        _check(until)
        try:
            with connection.transaction():
                return self._done(connection, steps)
        except psycopg.Error as error:
            self._disconnect()
            raise _unavailable(error) from None

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _done(self, connection: Connection[Any], steps: Sequence[Step]) -> list[Any]:
        names = sorted({step.grant.name for step in steps})
        rows = connection.execute(_SELECT, [names]).fetchall()
        if len(rows) < len(names):
            connection.execute(_INSERT, [names])
            rows = connection.execute(_SELECT, [names]).fetchall()
        accounts = {name: _account(orjson.loads(state), time) for name, state, time in rows}
        results = []
        for step in steps:
            account = accounts[step.grant.name]
            account.limit(step.grant.rates)
            results.append(self._apply(step, account))
        states = [_state(account) for account in accounts.values()]
        connection.execute(_UPDATE, [[*accounts], states])
        return results

    def _apply(self, step: Step, account: SharedAccount) -> SharedLease | Refusal | None:
        if isinstance(step, Settle):
            account.settle_as(step.lease.id, step.lease, step.used)
            return None
        if isinstance(step, Renew):
            account.renew(step.leases, LEASE_SECONDS)
            return None
        found = account.reserve_as(step.lease, step.tokens, LEASE_SECONDS)
        if isinstance(found, Refusal):
            return found
        return SharedLease(self, step.grant, step.lease, found.at, found.tokens, found.left)


def _account(state: Mapping[str, Any], time: float) -> SharedAccount:
    """Return the account with a state, at the time of the database."""
    return SharedAccount(
        NO_RATES,
        lambda: time,
        state.get("requests", ()),
        state.get("tokens", ()),
        state.get("leases", {}),
    )


def _state(account: SharedAccount) -> str:
    account.expire()
    state = {
        "requests": [*account.requests.buckets],
        "tokens": [*account.tokens.buckets],
        "leases": account.leases,
    }
    return orjson.dumps(state).decode()


def _unavailable(error: Exception) -> LimitsUnavailable:
    """Return an error with the first line of the database's message, which shows no password."""
    reason = reason_of(error)
    if reason.is_refusal:
        return Refused(f"{reason.words} ({reason.line})")
    return LimitsUnavailable(f"{type(error).__name__}: {reason.line}")


def _check(until: float) -> None:
    """Raise an error for steps that nobody waits for: nobody would end their leases."""
    if time.monotonic() > until:
        raise LimitsUnavailable(LATE)


def _ignore(running: asyncio.Future[Any]) -> None:
    """Retrieve the exception of work that nobody waits for."""
    if not running.cancelled():
        running.exception()
