"""The memory of engines as it was measured, from one run of Latimer to the next."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import orjson

_FILE = "memory.json"
# The largest number of engines to remember.
_MOST = 1_000


class Sizes:
    """A file with the measured memory of engines.

    Args:
        folder: the state folder.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / _FILE

    def get(self, key: str) -> Mapping[str, int]:
        """Return the bytes of an engine by the names of memories; empty if unknown."""
        found = self._read().get(key)
        if not isinstance(found, dict):
            return {}
        return {name: size for name, size in found.items() if type(size) is int and size >= 0}

    def put(self, key: str, memory: Mapping[str, int]) -> None:
        """Remember the memory of an engine; a folder that cannot be written forgets it."""
        found = self._read()
        if found.pop(key, None) == memory:
            return
        found[key] = dict(memory)
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = self._file.with_suffix(".draft")
            draft.write_bytes(orjson.dumps(dict([*found.items()][-_MOST:])))
            draft.replace(self._file)

    def _read(self) -> dict[str, object]:
        with suppress(OSError, ValueError):
            found = orjson.loads(self._file.read_bytes())
            if isinstance(found, dict):
                return found
        return {}


def key_of(*words: str | Sequence[str] | None) -> str:
    """Return the key of an engine: a digest of its command, or of its address and model."""
    return hashlib.sha256(repr(words).encode()).hexdigest()[:32]
