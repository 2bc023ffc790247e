"""Tests of the short forms: each short case once, random samples, and the samples of findings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos import cancels
from chaos.case import ALL, Case
from chaos.cases import CASES
from chaos.fuzz import WORDS, Findings, Run, Session, show
from chaos.once import WORDS as WORDS_ONCE
from chaos.once import Outcome, attempt, table
from chaos.samples import from_json
from chaos.stage import Stage

SHORT = [
    (case, engine) for engine in ALL for case in CASES if case.short and engine in case.engines
]
# Findings of earlier runs.
MENDED = {
    path.stem: json.loads(path.read_text())
    for path in Path(__file__).parent.glob("regressions/*.json")
}


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
        stage = Stage(engine, *WORDS_ONCE[engine])
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


@pytest.fixture(scope="module", params=WORDS)
def session(request: pytest.FixtureRequest) -> Iterator[tuple[Session, asyncio.Runner]]:
    """A process under test for each engine, and the runner of its clients."""
    with asyncio.Runner() as runner:
        session = Session(request.param)
        runner.run(session.start())
        yield session, runner
        runner.run(session.close())


@pytest.mark.timed
def test_findings_stay_mended(session: tuple[Session, asyncio.Runner]) -> None:
    """Each saved sample of an engine gets valid responses and produces no finding."""
    tested, runner = session
    found: dict[str, Any] = {}
    for name, made in MENDED.items():
        if tested.engine in made["targets"]:
            found[name] = runner.run(tested.run(from_json(made)))
    found["afterwards"] = runner.run(tested.look())
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.timed
@pytest.mark.parametrize("engine", WORDS)
def test_a_few_samples_of_each_engine(engine: str, tmp_path: Path) -> None:
    """The fuzzer runs a fixed set of samples over each engine without a finding."""
    # Responses that hang take seconds.
    count = 8 if engine.startswith("edited") else 25
    findings = Findings(tmp_path)
    summary = Run(engine, 1, findings, count).until(float("inf"))
    show({engine: summary}, findings)
    assert summary.samples == count
    assert not findings.counts


@pytest.mark.timed
async def test_cancelled_requests_cost_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over koboldcpp's double, all requests among cancelled ones are answered right, and the
    engine is idle soon after them."""
    monkeypatch.setattr(cancels, "STREAMS", 4)
    assert await cancels.cancels(None, 0.1, 1) == []


def test_every_saved_sample_has_an_engine() -> None:
    """Each saved sample names only engines that the fuzzer knows."""
    assert MENDED
    assert {engine for made in MENDED.values() for engine in made["targets"]} <= set(WORDS)
