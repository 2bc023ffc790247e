"""Tests that grammars that cost llguidance minutes are rejected within seconds."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import llguidance
import pytest
from latimer.backends.grammar.gbnf import WrongGrammar
from latimer.backends.llama_cpp.grammars import GrammarTrials

READ = llguidance.LLMatcher.grammar_from_lark
PATTERNS = [{"type": "string", "pattern": f"a.{{{count}}}b"} for count in range(40)]
ROWS = " & ".join(f"/([a-z]{{{prime}}})*/" for prime in (2, 3, 5, 7, 11, 13, 17, 19))
HARD = {
    "patterns": llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"allOf": PATTERNS})),
    "multiple": READ('start: %json {"type": "integer", "multipleOf": 9999991}'),
    "rows": READ(f"start: A\nA: {ROWS}"),
}
EASY = READ("start: /[a-z]+/")


@pytest.fixture
async def trials() -> AsyncIterator[GrammarTrials]:
    """Trials with a limit of one second."""
    made = GrammarTrials({"max_items_in_row": 20_000}, seconds=1)
    yield made
    made.close()


# Each takes the second of CPU time that the limit allows.
@pytest.mark.parametrize(
    "name",
    ["patterns", *(pytest.param(name, marks=pytest.mark.slow) for name in ("multiple", "rows"))],
)
async def test_what_takes_too_long_is_refused(trials: GrammarTrials, name: str) -> None:
    """A grammar beyond the limit is rejected, and an easy one does not wait for it."""
    start = time.monotonic()
    hard = asyncio.ensure_future(trials.check(HARD[name]))
    await asyncio.sleep(0)
    await trials.check(EASY)
    assert not hard.done()
    with pytest.raises(WrongGrammar, match="takes more than 1 s or 1024 MiB to compile"):
        await hard
    assert time.monotonic() - start < 10


async def test_who_leaves_ends_the_trial(trials: GrammarTrials) -> None:
    """Cancelling the callers ends their trials and frees all places."""
    tasks = [asyncio.ensure_future(trials.check(HARD["rows"] + " " * n)) for n in range(8)]
    await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    start = time.monotonic()
    await trials.check(EASY)
    assert time.monotonic() - start < 0.8
