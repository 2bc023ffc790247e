"""Fixtures of the programs of clients, which run in environments without Latimer."""

from __future__ import annotations

import os

import pytest

URLS = dict(one.split("=", 1) for one in os.environ["LATIMER_URLS"].split())


@pytest.fixture(params=list(URLS), scope="session")
def url(request: pytest.FixtureRequest) -> str:
    """Return the base URL of a Latimer, once for each of its engines."""
    return f"{URLS[request.param]}/v1"
