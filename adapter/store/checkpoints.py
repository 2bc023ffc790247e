"""Empty SQLite's log of changes after something was deleted.

The log keeps deleted text until a checkpoint empties it, which is impossible while somebody reads.
A checkpoint waits for nobody, because it runs in the only thread that writes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from .errors import StoreUnavailable

log = logging.getLogger("latimer")

# Seconds from a deletion for room to the checkpoint after it, and between two attempts.
PAUSE = 3.0
# Seconds between the attempts of a command that waits for one.
_SHORT = 0.05

BUSY = "another process or request reads the file"


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
