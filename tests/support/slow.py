"""A backend that fails, or waits, in the middle of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from latimer.backends.base import Batch, Capabilities, Generation, Model, Piece
from latimer.backends.errors import EngineError


class Slow:
    """A backend that yields two pieces and then an error, or nothing more."""

    capabilities = Capabilities("slow", frozenset())

    def __init__(self, error: EngineError | None = None) -> None:
        self.error = error
        self.left = asyncio.Event()
        self.running = 0

    async def model(self) -> Model:
        """Return a model without a template."""
        return Model("m", 1000, None, "", "", False, "fp_0", 7)

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Yield two pieces, then fail or wait for an hour."""

        async def batches() -> AsyncIterator[Batch]:
            yield [Piece(0, b"one "), Piece(0, b"two ")]
            await asyncio.sleep(0.05)
            if self.error is not None:
                raise self.error
            await asyncio.sleep(3600)

        self.running += 1
        try:
            yield batches()
        finally:
            self.running -= 1
            self.left.set()

    async def aclose(self) -> None:
        """Do nothing, since no resource is held."""
