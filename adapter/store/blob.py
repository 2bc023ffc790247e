"""A storage of media by their hash: the protocol that folders and S3 implement."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

# The name of a blob: a SHA-256 in hexadecimal digits. Other names belong to somebody else.
HASH = re.compile(r"[0-9a-f]{64}")


class Blob(NamedTuple):
    """A stored blob: its hash, the seconds since it was last put, and its bytes."""

    hash: str
    age: float
    size: int


class Blobs(Protocol):
    """Blobs by their hash. Calls block, so they belong in a thread; any thread may call.

    Every method but `describe` raises `StoreUnavailable` if the storage fails.
    """

    def put(self, digest: str, data: bytes) -> None:
        """Store a blob durably, or make it new again if it is stored."""

    def get(self, digest: str) -> bytes | None:
        """Return a blob, or None if it is not stored."""

    def delete(self, hashes: Iterable[str]) -> None:
        """Delete blobs; those that are not stored are ignored."""

    def hashes(self) -> Iterator[Blob]:
        """Yield every stored blob, in any order."""

    def check(self) -> None:
        """Try the storage without a change to it."""

    def describe(self) -> str:
        """Return the place of the blobs in a few words, without secrets."""
