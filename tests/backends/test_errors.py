"""Tests of the checks on values that engines return."""

from __future__ import annotations

import math
from typing import Any

import pytest
from latimer.backends.errors import parse_logprob


@pytest.mark.parametrize("value", [5.0, 0.1, math.inf, math.nan, "x", None, []])
def test_no_probability_is_above_one(value: Any) -> None:
    """An engine's value that cannot be a log-probability never reaches a client."""
    with pytest.raises((TypeError, ValueError)):
        parse_logprob(value)
    assert parse_logprob(1e-7) == 1e-7
    assert parse_logprob(-5) == -5.0
