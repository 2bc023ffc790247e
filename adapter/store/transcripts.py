"""The transcripts of spoken answers, which later requests name by the ids of their audio."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

# Seconds for which an id is known: as long as OpenAI's (contract of audio, 1.4).
SECONDS = 3_600
# The bytes of all transcripts together, and those that a transcript takes besides its text.
MOST, REST = 16 << 20, 400


class _Kept(NamedTuple):
    text: str
    expires_at: int
    size: int


class Transcripts:
    """The latest transcripts, in memory, each for the API key that it belongs to.

    Args:
        most: the bytes of all of them; the oldest are forgotten first.
        now: returns the seconds since 1970.
    """

    def __init__(self, most: int = MOST, now: Callable[[], float] = time.time) -> None:
        self._most = most
        self._now = now
        # In the order in which they expire, which is the order in which they came.
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()
        self._size = 0

    def keep(self, owner: str, name: str, text: str) -> int:
        """Keep a transcript, and return the time at which it expires, in seconds since 1970.

        Args:
            owner: the digest of the API key; empty if the server has no keys.
            name: the id of the audio.
        """
        now = int(self._now())
        expires_at = now + SECONDS
        size = len(text.encode("utf-8", "surrogatepass")) + REST
        self._kept[owner, name] = _Kept(text, expires_at, size)
        self._size += size
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self._size <= self._most and oldest.expires_at > now:
                break
            self._kept.popitem(last=False)
            self._size -= oldest.size
        return expires_at

    def find(self, owner: str, name: str) -> str | None:
        """Return a transcript; None if the id is unknown, expired, or of another key."""
        kept = self._kept.get((owner, name))
        return None if kept is None or kept.expires_at <= self._now() else kept.text
