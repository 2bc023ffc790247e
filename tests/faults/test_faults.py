"""Tests of the short form of the faults: each of its cases, with each of its engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from faults.case import ALL, Case
from faults.cases import CASES
from faults.stage import Stage
from faults.table import table
from faults.trial import Outcome, attempt

SHORT = [
    (case, engine) for engine in ALL for case in CASES if case.short and engine in case.engines
]


@pytest.fixture(scope="session")
async def stages() -> AsyncIterator[dict[str, Stage]]:
    """The stages that have been started, by engine."""
    started: dict[str, Stage] = {}
    yield started
    for stage in started.values():
        await stage.stop()


@pytest.mark.parametrize(
    ("case", "engine"), SHORT, ids=[f"{engine}-{case.kind}-{case.name}" for case, engine in SHORT]
)
async def test_nothing_is_violated(case: Case, engine: str, stages: dict[str, Stage]) -> None:
    """Latimer survives the case's fault without a freeze, a crash, a mixed-up reply or an unwanted
    access."""
    if engine not in stages:
        stage = Stage(engine)
        await stage.start()
        stages[engine] = stage
    outcome = await attempt(stages[engine], case)
    assert not outcome.violations, "\n".join(outcome.violations)


def test_cases_have_names_of_their_own() -> None:
    """Each case has a unique combination of class, name and engine."""
    names = [(case.kind, case.name, engine) for case in CASES for engine in case.engines]
    assert len(names) == len(set(names)), [one for one in names if names.count(one) > 1][:5]


def test_a_violation_is_in_the_table() -> None:
    """The table counts the cases and shows each violation in full."""
    case = Case(name="a name", kind="1 memory")
    outcomes = [Outcome(case, "real", 1.0, []), Outcome(case, "real", 1.0, ["it broke"])]
    text = table(outcomes, 2.0)
    assert "| 1 memory | real | 2 | 1 | 1 | 1 |" in text
    assert "**1 memory, a name** (real)\n  - it broke" in text
