"""Engines without a model that take time to load, for tests of machines."""

from __future__ import annotations

import asyncio
from typing import Any

from latimer.backends.base import Backend
from latimer.backends.fleet.loading import EngineLoader, LoadFailed
from typing_extensions import override

from .engines.echo import Echo


class SlowLoader(EngineLoader):
    """A loader that takes time, and can fail.

    Args:
        seconds: the time of a load.
        size: what it measures once it is loaded, in bytes.
        engine: the engine; by default one that repeats prompts.

    Attributes:
        fails: the reason of the next failures; empty for none.
        starts, stops, ends: how often it began to load and to end, and has ended.
        users: the number of requests that use it now, for assertions; see `check_unused`.
    """

    def __init__(
        self,
        name: str,
        seconds: float = 0.01,
        size: int = 10,
        engine: Backend | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name, **options)
        self._seconds = seconds
        self._size = size
        self._backend = engine or Echo()
        self.fails = ""
        self.starts = self.stops = self.ends = self.users = 0

    @property
    @override
    def backend(self) -> Backend:
        return self._backend

    @override
    def measure(self) -> int:
        return self._size

    @override
    async def _start(self) -> None:
        self.starts += 1
        await asyncio.sleep(self._seconds)
        if self.fails:
            raise LoadFailed(self.fails, "the last line")

    @override
    async def _stop(self) -> None:
        assert not self.users, "an engine that was in use was unloaded"
        self.stops += 1
        await asyncio.sleep(min(self._seconds, 0.1) / 4)
        self.ends += 1
