"""Tests that no request of any size blocks the event loop, on any engine."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from support.large import ENGINES, LARGE, seeing
from support.turns import MeasuredLoop, measured

pytestmark = pytest.mark.slow

# Seconds of CPU time. The design limit is 5 ms; the rest is tolerance for a busy machine.
LONGEST = 0.05

Measured = tuple[str, MeasuredLoop]


@pytest.fixture(scope="module", params=ENGINES)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Measured]:
    """Serve Latimer with each engine on an event loop that is measured."""
    with seeing(request.param, tmp_path_factory.mktemp("seeing")) as backend:
        app = OpenAIAdapter(backend, any_model=True)
        with measured(lambda: app) as running:
            yield running


@pytest.mark.parametrize("name", LARGE)
def test_a_large_request_leaves_the_loop_to_others(server: Measured, name: str) -> None:
    """No iteration of the event loop takes more than 50 ms of CPU time, the first time or later."""
    address, loop = server
    path, body = LARGE[name]()
    headers = {"content-type": "application/json"}
    with httpx2.Client(base_url=address, timeout=60) as client:
        loop.longest = 0.0
        for _ in range(2):
            reply = client.post(path, content=body, headers=headers)
            assert reply.status_code in (200, 400), reply.text
    assert loop.longest < LONGEST, (reply.status_code, reply.text[:200])
