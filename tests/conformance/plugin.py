"""A pytest plugin for the suite: `pytest --pyargs latimer.conformance --openai-url URL`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name the server."""
    group = parser.getgroup("openai conformance")
    group.addoption("--openai-url", help="Base URL of the server to judge, with its /v1.")
    group.addoption("--openai-model", help="What requests name; the first that it lists.")
    group.addoption("--openai-key", help="Sent as a bearer.")
    group.addoption("--openai-hint", choices=["demo"], help="Unlock what a model surely says.")
