"""Tests that engines do what `Backend.open` says: that of CONTRIBUTING.md, and the real ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.base import Backend
from support.documents import blocks
from support.duties import Duties

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture(scope="module", params=["guide", "llama_cpp", "llama_server"])
async def backend(
    request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]
) -> AsyncIterator[Backend]:
    """A backend of each engine."""
    made = of_the_guide() if request.param == "guide" else make_backend(request.param)
    yield made
    await made.aclose()


class TestEngines(Duties):
    """The duties over each engine."""


def of_the_guide() -> Backend:
    """Return the engine that CONTRIBUTING.md shows."""
    text = next(one.text for one in blocks(GUIDE) if "class YourEngine" in one.text)
    names: dict[str, Any] = {"__name__": "example", "__package__": "latimer.backends.yours"}
    exec(text, names)  # noqa: S102
    engine: Backend = names["YourEngine"]()
    return engine
