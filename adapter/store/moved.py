"""An SQLite file that can be deleted or replaced while it is open."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

# Seconds between two looks at a file.
LOOK_SECONDS = 1.0


class Watched:
    """An SQLite file that was opened, with its log of changes and the index of that."""

    def __init__(self, file: Path) -> None:
        self._paths = [file, *(file.with_name(file.name + end) for end in ("-wal", "-shm"))]
        self._seen = [*map(_identity, self._paths)]
        self._look_at = time.monotonic() + LOOK_SECONDS

    def is_moved(self) -> bool:
        """Return True if its path is not that of this file any more; looked at once a second."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        found = [*map(_identity, self._paths)]
        if found[0] != self._seen[0]:
            return True
        self._seen = found
        return False

    def forget(self) -> None:
        """Delete its log of changes, which SQLite would add to another file with its path."""
        with suppress(OSError):
            for path, seen in zip(self._paths[1:], self._seen[1:], strict=True):
                if seen is not None and _identity(path) == seen:
                    path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and the number of a file, or None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
