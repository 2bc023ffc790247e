"""Tests of a pool over simulated engines, in simulated time."""

from __future__ import annotations

import time

import pytest
from benchmarks.simulation import Result, simulate

ENGINES = 50


def run(way: str, *, seconds: float = 11.0, fails: bool = False, seed: int = 1) -> Result:
    """Simulate engines, and check that every request has ended."""
    result = simulate(ENGINES, way, seconds=seconds, fails=fails, seed=seed)
    assert (result.left, result.failed) == (0, 0)
    return result


@pytest.mark.slow
def test_prompts_are_reused_and_engines_have_equal_loads() -> None:
    """Prefixes and sessions reuse most prompts, and no engine has much more than the mean."""
    before = time.monotonic()
    for way, least, most in (("prefix", 97, 100), ("session", 97, 100), ("least busy", 20, 90)):
        shown = run(way).figures()
        assert least <= shown["reuse"] <= most, (way, shown)
        assert 50 <= shown["load"] <= 85, (way, shown)
        assert shown["balance"] < 1.6, (way, shown)
        assert shown["cut"] == 0
    # The clock is the real one again.
    assert time.monotonic() - before < 60


def test_engines_that_die_lose_only_what_they_had_begun() -> None:
    """Requests whose engine dies before their first token run elsewhere; no request is lost."""
    result = run("prefix", fails=True)
    assert 0 < result.cut <= 2 * 8
    assert result.figures()["reuse"] > 90


@pytest.mark.slow
def test_a_seed_gives_the_same_figures() -> None:
    """Two runs with the same seed agree in every figure but CPU time, and another seed differs."""
    one, again, other = (run("prefix", seconds=3.0, seed=seed).figures() for seed in (3, 3, 4))
    assert one == again
    assert one != other
