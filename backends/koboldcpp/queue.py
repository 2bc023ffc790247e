"""First come, first served, one at a time: koboldcpp runs one generation and keeps no order."""

from __future__ import annotations

import asyncio
import time

from ..errors import Busy


class Turns:
    """A bounded queue in front of an engine.

    Args:
        limit: how many may wait; one more is refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._started = 0.0
        self._seconds = 1.0

    def check(self) -> None:
        """Raise `Busy` while the queue is full."""
        if self._waiting >= self._limit:
            # Past two minutes OpenAI's clients would not retry at all (contract 1.5).
            wait = min(max(self._seconds * self._waiting / 2, 0.1), 60.0)
            raise Busy(
                f"{self._waiting} requests are waiting for the engine already; ask again later.",
                wait,
            )

    async def take(self) -> None:
        """Wait for one's turn; `release` ends it."""
        self.check()
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        self._started = time.monotonic()

    def release(self) -> None:
        """Let the next one go on."""
        self._seconds = 0.8 * self._seconds + 0.2 * (time.monotonic() - self._started)
        self._lock.release()
