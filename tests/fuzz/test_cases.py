"""Tests that earlier findings stay fixed, and that the fuzzer runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz.cases import from_json
from fuzz.engines import TARGETS, engine
from fuzz.findings import Findings
from fuzz.run import Run, show
from fuzz.session import Session

CASES = {path.stem: json.loads(path.read_text()) for path in Path(__file__).parent.glob("cases/*")}
# Responses that hang take seconds.
COUNTS = {name: 8 if name.endswith("_edited") else 25 for name in TARGETS}
PAIRS = [(name, target) for name, made in CASES.items() for target in made["targets"]]


@pytest.fixture(scope="module", params=TARGETS)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """A process under test for each engine."""
    with asyncio.Runner() as runner, engine(request.param) as here:
        session = Session(here, runner)
        yield session
        session.close()


@pytest.mark.timed
def test_cases_stay_mended(session: Session) -> None:
    """Each saved case of an engine gets valid responses and produces no finding."""
    found: dict[str, Any] = {}
    for name, made in CASES.items():
        if session.engine.name in made["targets"]:
            found[name] = session.run(from_json(made))
    found["afterwards"] = session.look()
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.timed
@pytest.mark.parametrize("name", TARGETS)
def test_a_few_cases_of_each_engine(name: str, tmp_path: Path) -> None:
    """The fuzzer runs a fixed set of cases over each engine without a finding."""
    findings = Findings(tmp_path)
    summary = Run(name, 1, findings, COUNTS[name]).until(float("inf"))
    show({name: summary}, findings)
    assert summary.cases == COUNTS[name]
    assert not findings.counts


def test_every_case_has_an_engine() -> None:
    """Each saved case names only engines that the fuzzer knows."""
    assert {target for _, target in PAIRS} <= set(TARGETS)
