"""Tests that engines do what `Backend.open` says: that of CONTRIBUTING.md, and the real ones."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from latimer.backends.base import Backend
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from support.documents import blocks
from support.duties import Duties

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
UNRECORDED = {"test_an_unknown_id_is_refused", "test_top_p_is_obeyed"}
ENGINES = ["guide", "llama_cpp", "llama_server", "koboldcpp"]


@pytest.fixture(scope="module", params=[*ENGINES, "pool_of_one", "pool_of_two"])
async def backend(
    request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]
) -> AsyncIterator[Backend]:
    """A backend of each engine, and models that one engine or two serve."""
    if request.param == "guide":
        engines = [of_the_guide()]
    elif request.param in ENGINES:
        engines = [make_backend(request.param)]
    else:
        count = 1 if request.param == "pool_of_one" else 2
        engines = [make_backend("llama_server") for _ in range(count)]
    made = engines[0]
    if request.param not in ENGINES:
        made = Pool("demo", [Replica(str(at), one) for at, one in enumerate(engines)])
        await made.model()
    yield made
    for one in {made, *engines}:
        await one.aclose()


@pytest.fixture(autouse=True)
def _running(request: pytest.FixtureRequest) -> None:
    """Skip what no recording of koboldcpp has."""
    is_recorded = not os.environ.get("LATIMER_KOBOLDCPP_URL")
    engine = request.node.callspec.params["backend"]
    if engine == "koboldcpp" and is_recorded and request.node.originalname in UNRECORDED:
        pytest.skip("it needs a running koboldcpp")


class TestEngines(Duties):
    """The duties over each engine."""


def of_the_guide() -> Backend:
    """Return the engine that CONTRIBUTING.md shows."""
    text = next(one.text for one in blocks(GUIDE) if "class YourEngine" in one.text)
    names: dict[str, Any] = {"__name__": "example", "__package__": "latimer.backends.yours"}
    exec(text, names)  # noqa: S102
    engine: Backend = names["YourEngine"]()
    return engine
