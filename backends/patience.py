"""The request that waits while an engine is loaded: how long, and what its client sees meanwhile.

The adapter sets the request of a task here. A stream sends comments while it waits, and any other
request waits up to a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol


class Waiting(Protocol):
    """A request that can wait."""

    async def wait(
        self, ready: asyncio.Future[Any], note: Callable[[], str], most: float | None
    ) -> bool:
        """Wait for an engine; return False if it is not ready in time.

        Args:
            ready: done when the engine is ready, or has failed; it is not cancelled.
            note: describes what the request waits for, as one line.
            most: the seconds that a request may wait which does not stream; None for no limit.
        """
        ...


# The request of the current task, and of the tasks that it starts.
REQUEST: ContextVar[Waiting | None] = ContextVar("latimer_request", default=None)


async def wait(
    ready: asyncio.Future[Any], note: Callable[[], str], most: float | None = None
) -> bool:
    """Wait for an engine on behalf of the current request; see `Waiting.wait`."""
    request = REQUEST.get()
    if request is not None:
        return await request.wait(ready, note, most)
    await asyncio.wait([ready], timeout=most)
    return ready.done()
