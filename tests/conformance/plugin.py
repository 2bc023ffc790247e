"""A pytest plugin for the suite: `pytest --pyargs latimer.conformance --openai-url URL`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name the server."""
    group = parser.getgroup("openai conformance")
    group.addoption("--openai-url", help="Base URL of the server to test, including /v1.")
    group.addoption("--openai-model", help="Model to request. Default: the first in /models.")
    group.addoption(
        "--openai-key", help="API key, sent as a bearer token. Default: OPENAI_API_KEY."
    )
    group.addoption(
        "--openai-hint",
        choices=["demo"],
        help="Also run the checks that depend on this model's answers.",
    )
    group.addoption(
        "--openai-limits",
        choices=["engine", "openai"],
        default="engine",
        help="Limits that the server must have. Default: engine.",
    )
