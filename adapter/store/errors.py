"""The errors of a store.

A message of a database goes to the log, so it must not show stored text.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreUnavailable as StoreUnavailable
from ..postgresql_errors import SILENT, first_line, reason_of

# The reason for clients when there is no answer within seconds.
LATE = "the database does not answer in time"
# The same of a store in memory.
BUSY = "this process is too busy to keep objects in memory in time"


class StoreError(Exception):
    """A store that cannot be opened as it is set; the message is one line without secrets."""


class DuplicateItem(Exception):
    """An item whose id is already that of another item of the conversation."""

    def __init__(self, id: str) -> None:  # noqa: A002
        super().__init__(id)
        self.id = id


class ConversationTooLarge(Exception):
    """A conversation that would be larger than the whole store may be."""


def in_words(error: StoreError | StoreUnavailable) -> str:
    """Return why a store cannot be used, with the message of its database, for its operator."""
    if isinstance(error, StoreError):
        return str(error)
    if error.detail == error.reason:
        return f"{error.reason}."
    return f"{error.reason} ({error.detail})."


_SQLITE = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_BUSY": "the file is locked by another process",
    "SQLITE_LOCKED": "the file is locked by another process",
    "SQLITE_CORRUPT": "the file is damaged",
    "SQLITE_NOTADB": "the file is not a database of SQLite, or is damaged",
    "SQLITE_READONLY": "the file cannot be written",
    "SQLITE_CANTOPEN": "the file cannot be opened",
    "SQLITE_IOERR": "the disk failed",
}
DAMAGED = _SQLITE["SQLITE_CORRUPT"]
# Errors of a database that still reads: of SQLite, and of PostgreSQL's disk and its standby.
_UNWRITABLE = ("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_IOERR", "53100", "25006")
WRONG = "stored data is damaged"
# Errors of rows: of their values, their keys, and their sizes.
_OF_ROWS = ("22", "23", "54")
# A deadlock, and a transaction that cannot be put in an order with another one.
_CONFLICTS = ("40P01", "40001")


class Rejected(Exception):
    """Rows that the database can never take, in place of its own error."""


class Deadlock(Exception):
    """A transaction that PostgreSQL ended in favour of another one."""


class Withdrawn(Exception):
    """A record of a batch was withdrawn before the batch was committed."""


class Refused(StoreUnavailable):
    """A database that answers and refuses, until its operator changes it or the settings."""


class Unwritable(StoreUnavailable):
    """A database that answers, and takes no changes: its disk is full, or it is read-only."""


@contextmanager
def opening() -> Iterator[None]:
    """Turn errors into those of `errors`, and into `StoreError` if waiting does not help."""
    try:
        with errors():
            yield
    except Refused as error:
        raise StoreError(in_words(error)) from None


@contextmanager
def errors() -> Iterator[None]:
    """Turn errors of the database into `StoreUnavailable` and `Rejected`."""
    # This module is also for those who need no database.
    import sqlite3

    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise _translated(error) from None
    except OSError as error:
        raise StoreUnavailable("the disk or the network failed", first_line(error)) from None


def _translated(error: Exception) -> Exception:
    import sqlite3

    from sqlalchemy.exc import DataError, IntegrityError

    original = getattr(error, "orig", None) or error
    state, line = getattr(original, "sqlstate", None) or "", first_line(original)
    if isinstance(error, IntegrityError | DataError) or state.startswith(_OF_ROWS):
        return Rejected(type(original).__name__)
    if state in _CONFLICTS:
        return Deadlock()
    if isinstance(original, sqlite3.Error):
        name = getattr(original, "sqlite_errorname", None)
        if name is None:
            # The driver's own errors show values: of text that is not UTF-8, and of wrong types.
            return StoreUnavailable(DAMAGED, type(original).__name__)
        known = next((words for key, words in _SQLITE.items() if name.startswith(key)), None)
        return _kind(name)(known or SILENT, f"{name}: {line}")
    reason = reason_of(original)
    return (Refused if reason.is_refusal else _kind(state))(reason.words, reason.line)


def _kind(code: str) -> type[StoreUnavailable]:
    return Unwritable if code.startswith(_UNWRITABLE) else StoreUnavailable


@contextmanager
def damage() -> Iterator[None]:
    """Turn errors of reading stored JSON into `StoreUnavailable`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        name = type(error).__name__
        raise StoreUnavailable(WRONG, f"{name} at {where}") from None
