"""Tests of the checks: the correct server passes them, and each fault fails exactly its own.

A check runs with a fault only if the fault can reach it (`suite.witness` explains why that
suffices). It runs in process, except for its requests over bare sockets. `LATIMER_FULL=1` in the
environment runs every check with every fault over sockets. This takes ten minutes on two cores
and is meant for releases.
"""

from __future__ import annotations

import ast
import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from latimer.conformance.check import all_checks
from latimer.conformance.profiles import PROFILES, needed
from suite.faults import EXPECTED, FAULTS
from suite.trial import TIMED, Trial, judges, opened
from support.samples import FULL

pytestmark = pytest.mark.slow

CHECKS = all_checks()
SUITE = Path(__file__).parent.parent / "conformance"
# The sizes of two random samples of pairs of a fault and a check: of all, and of those that fail.
SAMPLE, FAILING = 200, 50


@pytest.fixture(scope="module")
async def trial() -> AsyncIterator[Trial]:
    """Yield a trial with the recorded run of each check on the correct server."""
    async with opened(FULL) as trial:
        yield trial


async def test_what_is_right_passes(trial: Trial) -> None:
    """A server that keeps every promise passes every check."""
    await trial.record(CHECKS)
    assert trial.complaints() == []


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in TIMED])
async def test_a_fault_fails_its_own_checks(trial: Trial, fault: str) -> None:
    """A fault fails the checks that it is expected to fail, and no others."""
    advice = f"if that is right: cd tests && python -m suite.trial --expected {fault}"
    assert await trial.failed(fault) == sorted(EXPECTED.get(fault, [])), advice


@pytest.mark.timed
async def test_a_fault_of_timing_fails_its_own_checks(trial: Trial) -> None:
    """Faults that only timing reveals fail their own checks; they mostly wait, and so run together.

    Their checks measure time. Nothing else runs meanwhile.
    """
    await trial.record(CHECKS)
    failed = await asyncio.gather(*map(trial.failed, TIMED))
    assert dict(zip(TIMED, failed, strict=True)) == {one: sorted(EXPECTED[one]) for one in TIMED}


async def test_shortcuts_change_no_verdict(trial: Trial) -> None:
    """Random pairs of a fault and a check have the expected verdict when they run over sockets."""
    pairs = [
        (fault, check) for fault in FAULTS for check in CHECKS
        if fault not in TIMED and judges(check, fault) and not trial.records[check.id].joint
    ]  # fmt: skip
    failing = [(fault, check) for fault, check in pairs if check.id in EXPECTED[fault]]
    drawn = random.sample(pairs, SAMPLE) + random.sample(failing, FAILING)
    verdicts = await asyncio.gather(*(trial.over_sockets(fault, check) for fault, check in drawn))
    wrong = [
        (fault, check.id, verdict.outcome, verdict.detail)
        for (fault, check), verdict in zip(drawn, verdicts, strict=True)
        if (verdict.outcome != "pass") != (check.id in EXPECTED[fault])
    ]
    assert wrong == []


def test_every_check_has_a_fault() -> None:
    """Every check fails with at least one fault."""
    caught = {check for name in FAULTS for check in EXPECTED[name]}
    assert [check.id for check in CHECKS if check.id not in caught] == []


def test_checks_say_what_they_promise() -> None:
    """An id is `group.name`, a promise ends in a full stop, and a source names a section."""
    for check in CHECKS:
        assert re.fullmatch(r"[a-z_]+\.[a-z0-9-]+", check.id), check.id
        assert check.promise.endswith("."), check.id
        assert re.search(r"\d+\.?\d*|design", check.source), check.id


def test_profiles_name_checks_that_there_are() -> None:
    """Each pattern of a client's profile matches at least one check."""
    for name, patterns in PROFILES.items():
        assert needed(name, CHECKS), name
        for pattern in patterns:
            glob = re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
            assert any(glob.fullmatch(check.id) for check in CHECKS), (name, pattern)


@pytest.mark.parametrize("path", sorted(SUITE.rglob("*.py")), ids=lambda path: path.name)
def test_the_judge_knows_nothing_of_latimer(path: Path) -> None:
    """No module of the conformance suite imports Latimer, or is longer than 900 lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("latimer"), path
            assert node.level <= len(path.relative_to(SUITE).parts), path
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("latimer") for alias in node.names), path
    assert path.read_text().count("\n") <= 900
