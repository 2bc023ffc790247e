"""Whether it is still the same model that answers at an engine's address."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .errors import EngineUnavailable, LatimerError


class Checks:
    """One check for everybody who asks at once; each gets one that began after they asked.

    Args:
        check: asks the engine; what it raises is raised to everybody whom the check was for.
    """

    def __init__(self, check: Callable[[], Awaitable[None]]) -> None:
        self._check = check
        self._lock = asyncio.Lock()
        self._begun = 0
        self._ended = 0
        self._error: LatimerError | None = None

    async def run(self) -> None:
        """Return when a check has found nothing wrong.

        Raises:
            LatimerError: what the check raised.
        """
        asked = self._begun
        async with self._lock:
            if self._ended > asked:
                if self._error is not None:
                    raise self._error
                return
            self._begun += 1
            try:
                await self._check()
            except LatimerError as error:
                self._ended, self._error = self._begun, error
                raise
            # Who leaves in the middle has found nothing out: the next one asks.
            self._ended, self._error = self._begun, None


def changed(address: str, now: str, before: str) -> EngineUnavailable:
    """The error for a request that was made for a model that is served no more."""
    return EngineUnavailable(
        f"The engine at {address} serves another model now ({now}, was {before}); ask again."
    )
