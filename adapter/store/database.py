"""One database: its engine, its threads, and its transactions.

SQLAlchemy's calls run in threads. Its asynchronous extension takes twice the CPU per row with
SQLite, and compiles statements and decodes rows in the event loop.

SQLite's log of changes keeps deleted text until a checkpoint empties it, which is impossible while
somebody reads. A checkpoint waits for nobody, because it runs in the only thread that writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import QueuePool

from ..daemon_threads import DaemonThreads
from .blobs import Files, Folder, check_folder, of
from .config import StoreConfig
from .errors import Deadlock, Rejected, StoreError, StoreUnavailable, damage, errors, opening
from .schema import NEWEST, check, migrate, schema, version_of

log = logging.getLogger("latimer")

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[Concatenate[Connection, P], T]

# One thread writes, so that batches, updates and evictions of a process never wait for a lock.
READERS = 3
# Seconds to wait for a lock of another process, and for a connection to PostgreSQL.
LOCK_SECONDS, CONNECT_SECONDS = 2, 5
# Seconds after which a connection to PostgreSQL ends when the network takes nothing.
DEAD_SECONDS = 10
# Seconds to close the connections, at the end of the process.
CLOSE_SECONDS = 2.0
CLOSED = "it is closed"
# Attempts for a transaction that PostgreSQL ends because of a deadlock.
ATTEMPTS = 3

# Seconds from a deletion for room to the checkpoint after it, and between two attempts.
PAUSE = 3.0
# Seconds between the attempts of a command that waits for one.
_SHORT = 0.05

BUSY = "another process or request reads the file"

_BUSY_TIMEOUT = f"PRAGMA busy_timeout={LOCK_SECONDS * 1000}"
_EVERY = ("PRAGMA foreign_keys=OFF", _BUSY_TIMEOUT)
# A new file can give its free pages back without a VACUUM, which would write all of it again.
_SHRINKS = "PRAGMA auto_vacuum=INCREMENTAL"
# A checkpoint makes a commit durable against a power failure; a commit itself survives the process.
# Deleted text is overwritten.
_FILE = (
    *_EVERY, _SHRINKS, "PRAGMA journal_mode=WAL", "PRAGMA synchronous=NORMAL",
    "PRAGMA secure_delete=ON", "PRAGMA journal_size_limit=67108864",
)  # fmt: skip
_MEMORY = (*_EVERY, "PRAGMA journal_mode=MEMORY", "PRAGMA synchronous=OFF")


class Checkpoints:
    """The checkpoints of a database; one that fails is tried again until it succeeds.

    Args:
        checkpoint: empties the log; returns False if somebody reads.
    """

    def __init__(self, checkpoint: Callable[[], Awaitable[bool]]) -> None:
        self._checkpoint = checkpoint
        self._is_due = self._has_warned = False
        self._task: asyncio.Task[None] | None = None

    async def now(self) -> None:
        """Empty the log, or try it again later."""
        if await self._try() is not None:
            self.soon()

    def soon(self) -> None:
        """Empty the log some seconds later."""
        self._is_due = True
        loop = asyncio.get_running_loop()
        task = self._task
        # A task of an event loop that ended is never done.
        if task is None or task.done() or task.get_loop() is not loop:
            self._task = loop.create_task(self._later())

    async def within(self, seconds: float) -> bool:
        """Empty the log; return False if somebody reads all the time."""
        end = time.monotonic() + seconds
        while await self._try() is not None:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(_SHORT)
        return True

    def cancel(self) -> None:
        """Try nothing any more."""
        task, self._task = self._task, None
        if task is not None:
            # The event loop of the task may have ended.
            with suppress(RuntimeError):
                task.cancel()

    async def _later(self) -> None:
        while self._is_due:
            await asyncio.sleep(PAUSE)
            reason = await self._try() if self._is_due else None
            if reason is not None and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "deleted text is still in the log of changes of the store: %s; "
                    "there is an attempt every %g s",
                    reason,
                    PAUSE,
                )

    async def _try(self) -> str | None:
        """Return why the log was not emptied, or None."""
        # What is deleted during the attempt is due again.
        self._is_due = False
        try:
            reason = None if await self._checkpoint() else BUSY
        except StoreUnavailable as error:
            reason = error.detail
        if reason is None:
            self._has_warned = False
        else:
            self._is_due = True
        return reason


class Database:
    """A database of stored objects; nothing is opened before `open`.

    Attributes:
        files: the media of the objects, and what transactions leave to be deleted.
    """

    def __init__(self, place: StoreConfig) -> None:
        self.place = place
        self.files = Files(None if place.media is None else of(place.media))
        self.checkpoints = Checkpoints(self.checkpoint)
        self._is_closed = False
        self._engine: Engine | None = None
        # In memory, the database exists as long as one connection is open.
        self._anchor: Connection | None = None
        # A server that is silent would hold the end of the process.
        threads = DaemonThreads if place.kind == "postgresql" else ThreadPoolExecutor
        self._writer: Executor = threads(1, "latimer-store-write")
        self._readers: Executor = threads(READERS, "latimer-store-read")

    async def open(self) -> tuple[int, int]:
        """Connect, and run the missing migrations; return the schema's versions before and after.

        Raises:
            StoreError: the schema is newer than this program, or the place cannot be used.
            StoreUnavailable: the database does not answer now.
        """
        return await self._in(self._writer, self._open)

    async def look(self) -> int:
        """Return the version of the schema, 0 if there is none, and change nothing; see `open`."""
        return await self._in(self._readers, self._look)

    async def check(self) -> None:
        """Check that the file and the media can be written, and change nothing.

        SQLite only reports it for a change, and a folder of media for the first medium.

        Raises:
            StoreError: they cannot.
        """
        await self._in(self._readers, self._check)

    async def read(self, work: Work[P, T], *values: P.args, **named: P.kwargs) -> T:
        """Return the result of a function that reads, in a transaction.

        If the caller is cancelled, a function that has not begun never begins.

        Args:
            work: gets the connection, and then the values.

        Raises:
            StoreUnavailable: the database cannot answer, or what it has is damaged.
        """
        with damage():
            bound = partial(self._run, lambda one: work(one, *values, **named), False)
            return await self._in(self._readers, bound)

    async def change(self, work: Work[P, T], *values: P.args, **named: P.kwargs) -> T:
        """Return the result of a function that changes what is stored; see `write`.

        Raises:
            StoreUnavailable: the database cannot answer, what it has is damaged, or it can never
                take the change.
        """
        try:
            with damage():
                return await self.write(work, *values, **named)
        except Rejected as error:
            raise StoreUnavailable("the database does not take the change", str(error)) from None

    async def write(self, work: Work[P, T], *values: P.args, **named: P.kwargs) -> T:
        """Return the result of a function that writes, in a transaction; see `read`.

        A transaction that has begun can be committed after the caller was cancelled.

        Raises:
            Rejected: the database can never take these rows.
        """
        bound = partial(self._run, lambda one: work(one, *values, **named), True)
        return await self._in(self._writer, bound)

    async def delete(
        self,
        work: Callable[Concatenate[Connection, Files, P], T],
        *values: P.args,
        **named: P.kwargs,
    ) -> T:
        """Return the result of a function that deletes; what it leaves is deleted as well."""
        found = await self.change(work, self.files, *values, **named)
        if found:
            await self.forget()
        return found

    async def steps(
        self, work: Work[P, T | None], *values: P.args, **named: P.kwargs
    ) -> AsyncIterator[T]:
        """Yield the results of a function that deletes, in one transaction for each.

        After each there is a pause as long as it took, for the other processes that write.

        Args:
            work: returns a result that is not empty, or something empty at the end.

        Raises:
            StoreUnavailable: the database cannot answer.
        """
        began = time.monotonic()
        while result := await self.change(work, *values, **named):
            await self.clean()
            yield result
            await asyncio.sleep(time.monotonic() - began)
            began = time.monotonic()

    async def forget(self) -> None:
        """Delete what a deletion left: media, and text in the log of changes."""
        await self.clean()
        await self.checkpoints.now()

    async def clean(self) -> None:
        """Delete the bytes of the media that no object has any more, and soon evicted text."""
        if self.files.has_evicted:
            self.files.has_evicted = False
            self.checkpoints.soon()
        if self.files.unused:
            try:
                await self.write(self.files.clean)
            except StoreUnavailable as error:
                # They are deleted after the next deletion.
                log.warning("unused media were not deleted: %s", error.detail)

    async def aclose(self) -> None:
        """Close every connection; one that waits for its database is closed later."""
        self.checkpoints.cancel()
        self._is_closed = True
        with suppress(RuntimeError):
            closing = asyncio.get_running_loop().run_in_executor(self._writer, self._close)
            await asyncio.wait([closing], timeout=CLOSE_SECONDS)
        self._writer.shutdown(wait=False)
        self._readers.shutdown(wait=False)

    def connect(self) -> Connection:
        """Return a connection of the caller's own, which commits each statement; in a thread.

        Raises:
            StoreUnavailable: the database is closed.
        """
        return self._ready().connect().execution_options(isolation_level="AUTOCOMMIT")

    async def vacuum(self) -> None:
        """Give the space of deleted rows back.

        SQLite's file gets smaller; other processes cannot write meanwhile. PostgreSQL keeps the
        space for new rows.
        """
        await self._in(self._writer, self._vacuum)
        await self.checkpoint()

    async def checkpoint(self) -> bool:
        """Empty SQLite's log of changes, which has deleted text; return False if somebody reads."""
        return self.place.kind != "sqlite" or await self._in(self._writer, self._checkpoint)

    async def _in(self, threads: Executor, call: Callable[[], T]) -> T:
        try:
            running = asyncio.get_running_loop().run_in_executor(threads, call)
        except RuntimeError:
            # Its threads have ended.
            raise StoreUnavailable(CLOSED) from None
        return await running

    def _ready(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise StoreUnavailable(CLOSED)
        return engine

    def _open(self) -> tuple[int, int]:
        if self._is_closed:
            raise StoreUnavailable(CLOSED)
        if self._engine is not None:
            return NEWEST, NEWEST
        engine = _engine(self.place)
        if self.place.kind == "sqlite":
            # A file that is refused must not change, and the first statements change its mode.
            self._look()
            # A new file can only be read by its owner. SQLite reports one that cannot be created.
            with suppress(OSError):
                Path(self.place.target).touch(0o600, exist_ok=False)
        try:
            with opening():
                anchor = engine.connect()
                try:
                    versions = _migrated(anchor)
                except BaseException:
                    anchor.close()
                    raise
        except BaseException:
            engine.dispose()
            raise
        if self.place.kind == "memory":
            self._anchor = anchor
        else:
            anchor.close()
        self._engine = engine
        return versions

    def _look(self) -> int:
        engine = _engine(self.place, reads_only=True)
        if self.place.kind == "sqlite" and not os.path.exists(self.place.target):
            return 0
        try:
            with opening(), engine.connect() as connection, connection.begin():
                version = version_of(connection)
        finally:
            engine.dispose()
        check(version)
        return version

    def _check(self) -> None:
        if self.place.kind == "sqlite":
            file = self.place.target
            check_folder(Path(file).parent, "the store")
            if os.path.exists(file) and not os.access(file, os.W_OK):
                raise StoreError("The file cannot be written.")
        if isinstance(self.files.blobs, Folder):
            self.files.blobs.check()

    def _run(self, work: Callable[[Connection], T], writes: bool) -> T:
        engine = self._ready()
        pool = engine.pool
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with errors(), engine.connect() as connection:
                    connection = connection.execution_options(writes=writes)
                    with connection.begin():
                        result = work(connection)
                    if writes:
                        self.files.shares.update(self.files.changes)
                    return result
            except Deadlock:
                if attempt == ATTEMPTS:
                    raise StoreUnavailable("other processes write the same rows") from None
            finally:
                if writes:
                    self.files.changes.clear()
                if self._is_closed:
                    # A connection that was given back after the end would stay open.
                    pool.dispose()
        raise AssertionError

    def _vacuum(self) -> None:
        with errors(), self._ready().connect() as connection:
            if self.place.kind == "postgresql":
                connection = connection.execution_options(isolation_level="AUTOCOMMIT")
                connection.exec_driver_sql(f"VACUUM ANALYZE {', '.join(schema.tables)}")
            else:
                # The driver runs a script to its end, and only the first step of a statement.
                raw: Any = connection.connection.driver_connection
                raw.executescript("PRAGMA incremental_vacuum").close()

    def _checkpoint(self) -> bool:
        with errors(), self._ready().connect() as connection:
            # In this mode of the driver, no transaction begins by itself.
            raw: Any = connection.connection.driver_connection
            # Readers hold no writer, so a writer must not wait for them.
            raw.execute("PRAGMA busy_timeout=0").close()
            try:
                is_busy, _, _ = raw.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                raw.execute(_BUSY_TIMEOUT).close()
        return not is_busy

    def _close(self) -> None:
        if self._anchor is not None:
            self._anchor.close()
        if self._engine is not None:
            self._engine.dispose()
        self._anchor = self._engine = None


def _migrated(connection: Connection) -> tuple[int, int]:
    """Run the missing migrations, and take no lock if there are none; see `migrate`."""
    with connection.begin():
        version = version_of(connection)
    if version == NEWEST:
        return version, version
    connection = connection.execution_options(writes=True)
    with connection.begin():
        return migrate(connection)


def _engine(place: StoreConfig, reads_only: bool = False) -> Engine:
    """Return an engine; one that only reads does not change the mode of an SQLite file."""
    url, first = _url(place)
    if reads_only:
        first = _EVERY
    common: dict[str, Any] = {
        # A statement's parameters are texts of users, and errors go to the log.
        "hide_parameters": True,
        # One for the writer, one for a checkpoint, and one of the caller's own (`connect`).
        "pool_size": READERS + 3,
        "max_overflow": 0,
        "pool_logging_name": "latimer",
    }
    # The pool logs a traceback for a connection that fails while it is given back.
    logging.getLogger(f"{QueuePool.__module__}.QueuePool.latimer").setLevel(logging.CRITICAL + 1)
    if place.kind == "postgresql":
        return _postgresql(url, common)
    arguments = {"check_same_thread": False}
    engine = create_engine(url, **common, poolclass=QueuePool, connect_args=arguments)

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        # The driver begins no transaction by itself: `_begun` does.
        connection.isolation_level = None
        for statement in first:
            if statement != _SHRINKS or not connection.execute("PRAGMA page_count").fetchone()[0]:
                _patiently(connection, statement)

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        # A transaction that begins to write after it has read can fail at once.
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _patiently(connection: sqlite3.Connection, statement: str) -> None:
    """Run a statement; SQLite itself does not wait for a lock to change a file's mode."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            connection.execute(statement).close()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.01)
        else:
            return


def _postgresql(url: URL, common: Mapping[str, Any]) -> Engine:
    # A server behind a network that drops packets keeps its connections open.
    options = {
        "application_name": "latimer",
        "connect_timeout": CONNECT_SECONDS,
        "keepalives_idle": DEAD_SECONDS // 2,
        "keepalives_interval": 1,
        "keepalives_count": DEAD_SECONDS // 2,
        "tcp_user_timeout": DEAD_SECONDS * 1000,
    }
    given = {name: value for name, value in options.items() if name not in url.query}
    try:
        return create_engine(url, **common, pool_pre_ping=True, connect_args=given)
    except ModuleNotFoundError as error:
        if error.name != "psycopg":
            raise
        raise StoreError(
            "PostgreSQL requires the extra 'postgres': run pip install '.[postgres]' in a "
            "clone of Latimer."
        ) from None
    except ArgumentError:
        # Its message has their values.
        raise StoreError("The options host and port in the URL of the store are wrong.") from None


def _url(place: StoreConfig) -> tuple[URL, tuple[str, ...]]:
    """Return the address of a database, and the first statements of each connection."""
    if place.kind == "postgresql":
        return make_url(place.target).set(drivername="postgresql+psycopg"), ()
    if place.kind == "memory":
        # Connections share this database by its name. With SQLAlchemy's usual pool for databases
        # in memory, transactions would share a connection, and lose each other's rows.
        name = f"file:/latimer-{secrets.token_hex(8)}"
        query = {"vfs": "memdb", "uri": "true"}
        return URL.create("sqlite", database=name, query=query), _MEMORY
    path = Path(place.target)
    check_folder(path.parent, "the store", writes=False)
    return URL.create("sqlite", database=str(path)), _FILE
