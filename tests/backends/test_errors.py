"""Tests of the checks on values and errors that engines return."""

from __future__ import annotations

import math
from typing import Any

import pytest
from latimer.backends import koboldcpp, llama_server
from latimer.backends.errors import LatimerError, parse_logprob


@pytest.mark.parametrize("value", [5.0, 0.1, math.inf, math.nan, "x", None, []])
def test_no_probability_is_above_one(value: Any) -> None:
    """An engine's value that cannot be a log-probability never reaches a client."""
    with pytest.raises((TypeError, ValueError)):
        parse_logprob(value)
    assert parse_logprob(1e-7) == 1e-7
    assert parse_logprob(-5) == -5.0


@pytest.mark.parametrize(
    "to_error", [llama_server.translate.to_error, koboldcpp.translate.to_error]
)
@pytest.mark.parametrize("status", [204, 301, 400, 404, 500, 503])
@pytest.mark.parametrize(
    "data",
    [b"", b"null", b'{"error":null}', b'{"error":{}}', b'{"detail":{}}', b"[" * 200_000],
    ids=lambda data: data[:20].decode(),
)
def test_any_error_can_be_read(to_error: Any, status: int, data: bytes) -> None:
    """An error response of any status and body gives a `LatimerError`."""
    assert isinstance(to_error(status, data), LatimerError)
