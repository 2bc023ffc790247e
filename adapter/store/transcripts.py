"""The transcripts of spoken answers, which later requests name by the ids of their audio."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Imported when the first answer is spoken.
    import sqlite3

_log = logging.getLogger("latimer")
# The id of the audio of a choice: that of its completion, and two digits for the choice.
_AUDIO, _CHAT = "audio_", "chatcmpl-"
_ID = re.compile(rf"{_AUDIO}([0-9a-f]+)([0-9a-f]{{2}})")
# Seconds for which an id is known: as long as OpenAI's (contract of audio, 1.4).
SECONDS = 3_600
# The bytes of all transcripts together, and those that a transcript takes besides its text.
MOST, REST = 16 << 20, 400
# Seconds that a worker waits while another one writes.
_PATIENCE = 5.0
_TABLE = """
CREATE TABLE IF NOT EXISTS transcripts (
    number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, id TEXT NOT NULL,
    text BLOB NOT NULL, expires_at INTEGER NOT NULL, size INTEGER NOT NULL, UNIQUE (owner, id)
)"""
_ADD = "INSERT OR REPLACE INTO transcripts (owner, id, text, expires_at, size) VALUES (?,?,?,?,?)"
_FIND = "SELECT text FROM transcripts WHERE owner = ? AND id = ? AND expires_at > ?"
_FORGET = "DELETE FROM transcripts WHERE owner = ? AND substr(id, 1, ?) = ?"
_EXPIRE = "DELETE FROM transcripts WHERE expires_at <= ?"
_SIZE = "SELECT sum(size) FROM transcripts"
# The oldest ones, beyond the bytes that may be kept.
_SHRINK = """
DELETE FROM transcripts WHERE number <= (
    SELECT max(number) FROM (
        SELECT number, sum(size) OVER (ORDER BY number DESC) AS total FROM transcripts
    ) WHERE total > ?
)"""


def audio_id(completion: str, choice: int) -> str:
    """Return the id of the audio of a choice of a completion."""
    return f"{_start_of(completion)}{choice:02x}"


def origin_of(name: str) -> tuple[str, int] | None:
    """Return the completion and the choice of an audio id; None if it is not one of the server."""
    match = _ID.fullmatch(name)
    return None if match is None else (f"{_CHAT}{match[1]}", int(match[2], 16))


def _start_of(completion: str) -> str:
    return f"{_AUDIO}{completion.removeprefix(_CHAT)}"


class Transcripts:
    """The latest transcripts, each for the API key that it belongs to.

    They are in memory, or in a file that the workers of a server share and that ends with it. They
    are not in the store, because their answers may be none that are to be stored.

    Args:
        file: the file; None for memory.
        most: the bytes of all of them; the oldest are forgotten first.
        now: returns the seconds since 1970.
    """

    def __init__(
        self, file: Path | None = None, most: int = MOST, now: Callable[[], float] = time.time
    ) -> None:
        self._file = file
        self._most = most
        self._now = now
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    async def keep(self, owner: str, name: str, text: str) -> int:
        """Keep a transcript, and return the time at which it expires, in seconds since 1970.

        Args:
            owner: the digest of the API key; empty if the server has no keys.
            name: the id of the audio.
        """
        expires_at = int(self._now()) + SECONDS
        await asyncio.to_thread(self._keep, owner, name, text, expires_at)
        return expires_at

    async def find(self, owner: str, name: str) -> str | None:
        """Return a transcript; None if the id is unknown, expired, or of another key."""
        if not self._is_used():
            return None
        found = await asyncio.to_thread(self._run, _FIND, owner, name, int(self._now()))
        return str(found[0][0], "utf-8", "surrogatepass") if found else None

    async def forget(self, owner: str, completion: str) -> None:
        """Forget the transcripts of all choices of a completion."""
        if self._is_used():
            start = _start_of(completion)
            await asyncio.to_thread(self._run, _FORGET, owner, len(start), start)

    def close(self) -> None:
        """Close the database; transcripts in memory are forgotten."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def _is_used(self) -> bool:
        """Return False if nothing can have been kept yet."""
        return self._connection is not None or (self._file is not None and self._file.exists())

    def _keep(self, owner: str, name: str, text: str, expires_at: int) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self._run(_EXPIRE, expires_at - SECONDS)
        self._run(_ADD, owner, name, data, expires_at, len(data) + REST)
        sizes = self._run(_SIZE)
        if sizes and sizes[0][0] > self._most:
            self._run(_SHRINK, self._most)

    def _run(self, statement: str, *values: Any) -> list[Any]:
        """Run a statement, in a thread, and return its rows.

        Without the database answers are spoken all the same, and their ids are unknown.
        """
        import sqlite3

        with self._lock:
            try:
                if self._connection is None:
                    self._connection = _opened(self._file)
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                _log.warning("transcripts of spoken answers cannot be kept or found: %s", error)
                return []


def _opened(file: Path | None) -> sqlite3.Connection:
    """Return a connection that commits each statement, with the table."""
    import sqlite3

    place = ":memory:" if file is None else str(file)
    # The threads that use it take turns.
    connection = sqlite3.connect(
        place, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
    )
    try:
        # The file ends with the server, so nothing has to outlive a crash of the system.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute(_TABLE)
    except sqlite3.Error:
        connection.close()
        raise
    return connection
