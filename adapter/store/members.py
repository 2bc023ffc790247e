"""The processes that share a durable store and run.

Each holds a lock that ends with it, also if it is killed: on a file next to SQLite's, or an
advisory lock of a connection to PostgreSQL.
"""

from __future__ import annotations

import asyncio
import fcntl
import glob
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ...backends.single_flight import SingleFlight
from ..daemon_threads import DaemonThreads
from .errors import LATE, StoreError, StoreUnavailable, errors
from .store import Store

if TYPE_CHECKING:
    # Imported when the store is opened.
    from sqlalchemy import Connection

    from .database import Database

# Hexadecimal digits of a mark, as the locks of PostgreSQL have bits.
DIGITS = 8
# The first of the two numbers of each advisory lock; others have other locks.
_CLASS = 0x6C617469
_LOCK = "SELECT pg_advisory_lock(%s, %s)"
_HELD = (
    "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND classid = %s "
    "AND objsubid = 2 AND granted "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
_PING = "SELECT 1"
# Seconds that the database has to answer, and at the end of the process.
PATIENCE = 2.0
_LEAVE = 1.0


class Members:
    """The members of a store, as this process sees them.

    Args:
        store: the store, whose database is durable.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._joining = SingleFlight()
        # A server that is silent would hold the end of the process.
        self._thread = DaemonThreads(1, "latimer-store-members")
        # The file that this process has locked.
        self._file: IO[bytes] | None = None
        self._connection: Connection | None = None

    @cached_property
    def mark(self) -> str:
        """The digits that name this process; a process that forks before has none yet."""
        return secrets.token_hex(DIGITS // 2)

    async def join(self) -> None:
        """Let the others know that this process runs; again, if a connection was lost.

        Raises:
            StoreUnavailable: the database does not take the lock now.
        """
        await self._joining.run(self._check)

    async def _check(self) -> None:
        if self._file is None and self._connection is None:
            # Without compiled files, these imports can take longer than the database may.
            await asyncio.to_thread(import_module, ".database", __package__)
        async with _in_time():
            database = await self._store.open()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._join, database)

    async def running(self) -> set[str]:
        """Return the marks of the processes that run.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        async with _in_time():
            database = await self._store.open()
            if self._store.place.kind == "postgresql":
                return await database.read(_locked)
            return await asyncio.to_thread(_locked_files, Path(self._store.place.target))

    async def leave(self) -> None:
        """Let the others know that this process ends; without an answer, its end does so."""
        thread, self._thread = self._thread, DaemonThreads(1, "latimer-store-members")
        leaving = asyncio.get_running_loop().run_in_executor(thread, self._leave)
        thread.shutdown()
        await asyncio.wait([leaving], timeout=_LEAVE)

    def _join(self, database: Database) -> None:
        if self._store.place.kind != "postgresql":
            if self._file is None:
                self._file = _locked_file(_path(self._store.place.target, self.mark))
            return
        if self._connection is not None:
            try:
                with errors():
                    self._connection.exec_driver_sql(_PING)
            except Exception:
                # Its lock is lost with it.
                self._leave()
            else:
                return
        with errors():
            connection = database.connect()
            try:
                connection.exec_driver_sql(_LOCK, (_CLASS, _signed(self.mark)))
            except BaseException:
                connection.close()
                raise
        self._connection = connection

    def _leave(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                _path(self._store.place.target, self.mark).unlink()
            file.close()
        connection, self._connection = self._connection, None
        if connection is not None:
            # The pool would keep the connection, and the connection its lock.
            connection.invalidate()
            connection.close()


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Raise `StoreUnavailable` after `PATIENCE`, and for a store that cannot be opened."""
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    except TimeoutError:
        raise StoreUnavailable(LATE) from None
    except OSError as error:
        raise StoreUnavailable("the disk failed", str(error)) from None
    except StoreError as error:
        raise StoreUnavailable("it cannot be opened", str(error)) from None


def _path(target: str, mark: str) -> Path:
    return Path(f"{target}-run-{mark}")


def _locked_file(path: Path) -> IO[bytes]:
    """Return a new file that this process has locked; it has its name only then."""
    draft = path.with_name(f"{path.name}.draft")
    file = draft.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(path)
    return file


def _locked_files(target: Path) -> set[str]:
    """Return the marks of the files that are locked, and delete the others."""
    found = set()
    start = f"{target.name}-run-"
    for path in target.parent.glob(f"{glob.escape(start)}{'?' * DIGITS}"):
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.add(path.name.removeprefix(start))
            else:
                path.unlink()
    return found


def _locked(connection: Connection) -> set[str]:
    held = connection.exec_driver_sql(_HELD, (_CLASS,)).scalars()
    return {f"{number:0{DIGITS}x}" for number in held}


def _signed(mark: str) -> int:
    """Return a mark as a signed number of 32 bits."""
    number = int(mark, 16)
    return number - (1 << 32) if number >> 31 else number
