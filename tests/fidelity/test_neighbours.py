"""Tests of the in-process engine's answers alone and among concurrent requests."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest
from latimer.backends.llama_cpp import LlamaCpp
from support.reference import AT_ONCE, apart

pytestmark = pytest.mark.slow


async def test_exact_answers_are_the_same_alone_and_among_others(demo_f32: Path) -> None:
    """With `exact`, requests have the same text and logprobs alone and among fifteen others."""
    async with aclosing(LlamaCpp(demo_f32, context=2048, exact=True)) as backend:
        found = await apart(backend, 4 * AT_ONCE)
    assert found.texts == 0
    assert found.worst < 1e-4


async def test_by_default_answers_are_nearly_the_same(demo_f32: Path) -> None:
    """By default, concurrent requests move logprobs by no more than the 16-bit KV cache does."""
    async with aclosing(LlamaCpp(demo_f32, context=2048)) as backend:
        found = await apart(backend, 2 * AT_ONCE)
    assert found.texts <= 2
    assert found.worst < 0.1
