"""A router for Ray Serve that counts the questions it gets; for tests/ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latimer.adapter.ray_serve import SessionRouter
from typing_extensions import override


class CountingRouter(SessionRouter):
    """Latimer's router, which adds a byte to a file whenever it is asked for a replica."""

    @override
    def initialize_state(self, **options: Any) -> None:
        self._file = Path(options["file"])

    @override
    async def choose_replicas(self, *arguments: Any, **options: Any) -> Any:
        with self._file.open("ab") as count:
            count.write(b".")
        return await super().choose_replicas(*arguments, **options)
