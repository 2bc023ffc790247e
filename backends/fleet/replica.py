"""One engine of a model: its places, its state, and what loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

from ..base import Backend

# `ready`: it gets requests. `unavailable`: it does not answer, or serves another model. `draining`:
# its requests run to their end, and it gets no others. The others concern a `Loader`.
State: TypeAlias = Literal["ready", "unavailable", "draining", "unloaded", "loading", "failed"]
LoadState: TypeAlias = Literal["unloaded", "loading", "ready", "failed"]


class Loader(Protocol):
    """An engine whose model Latimer loads and unloads.

    Attributes:
        is_pinned: True if the model is never unloaded.
        idle: seconds without requests after which the model is unloaded; None for never.
    """

    is_pinned: bool
    idle: float | None

    @property
    def state(self) -> LoadState:
        """The state of the model."""
        ...

    @property
    def backend(self) -> Backend:
        """The engine; the same object before, while and after its model is loaded."""
        ...

    @property
    def memory(self) -> Mapping[str, int]:
        """The bytes of each kind of memory that the model needs; empty if unknown.

        They are declared, or measured at its last load.
        """
        ...

    async def load(self) -> None:
        """Load the model, and return when it is ready; a second call joins the first.

        Raises:
            EngineUnavailable: the model cannot be loaded; with the end of the engine's log.
        """
        ...

    async def unload(self) -> None:
        """Unload the model, and return when its memory is free; nothing runs on it."""
        ...
