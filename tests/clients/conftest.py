"""The official `openai` client of the demo model, for its tests over several engines and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from openai import OpenAI
from support.engines.echo import Echo
from support.servers import serving


def strict(address: str, **more: Any) -> OpenAI:
    """Return the client of an address, which validates responses strictly."""
    return OpenAI(base_url=f"{address}/v1", api_key="x", _strict_response_validation=True, **more)


@pytest.fixture
def sdk(served_url: str) -> Iterator[OpenAI]:
    """Yield a client of each engine."""
    with strict(served_url) as made:
        yield made


@pytest.fixture(scope="module", params=["llama_cpp", "llama_server"])
def address(request: pytest.FixtureRequest, make_backend: Callable[[str], Any]) -> Iterator[str]:
    """Serve the demo model of each engine that has everything of the Responses API."""
    with serving(lambda: OpenAIAdapter(make_backend(request.param), any_model=True)) as url:
        yield url


@pytest.fixture
def responses_sdk(address: str) -> Iterator[OpenAI]:
    """Yield a client of these, which repeats no request."""
    with strict(address, max_retries=0) as made:
        yield made


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the setting `store` for an empty database of each kind."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("postgresql_url")
        return url
    return "memory" if request.param == "memory" else str(tmp_path / "store.db")


@pytest.fixture
def stored_sdk(target: str) -> Iterator[OpenAI]:
    """Serve an engine with each kind of store, and yield a client of it."""
    with (
        serving(lambda: OpenAIAdapter(Echo(context=512), store=target)) as address,
        strict(address) as made,
    ):
        yield made
