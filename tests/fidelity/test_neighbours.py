"""Whether an answer depends on what else the engine in process is asked."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

from latimer.backends.llama_cpp import LlamaCpp
from support.neighbours import AT_ONCE, apart


async def test_exact_answers_are_the_same_alone_and_among_others(demo_f32: Path) -> None:
    """Greedy and seeded requests have the same text among fifteen others, and the same numbers."""
    async with aclosing(LlamaCpp(demo_f32, context=2048, exact=True)) as backend:
        found = await apart(backend, 4 * AT_ONCE)
    assert found.texts == 0
    assert found.worst < 1e-4


async def test_by_default_answers_are_nearly_the_same(demo_f32: Path) -> None:
    """With F32 weights, neighbours move log-probabilities by no more than memory's 16 bits do."""
    async with aclosing(LlamaCpp(demo_f32, context=2048)) as backend:
        found = await apart(backend, 2 * AT_ONCE)
    assert found.texts <= 2
    assert found.worst < 0.1
