"""The suite judges rightly: what is right passes, and each fault is caught by its own checks."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import pytest
from latimer.conformance.check import all_checks
from latimer.conformance.profiles import PROFILES, needed
from suite import trial
from suite.expected import EXPECTED
from suite.faults import FAULTS

CHECKS = all_checks()
SUITE = Path(__file__).parent.parent / "conformance"


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest) -> Iterator[dict[str | None, Future[list[str]]]]:
    """What each fault fails, found out by two processes for each core; None is the right server."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    names = dict.fromkeys(call.params["fault"] for call in calls if call and "fault" in call.params)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context, trial.start) as pool:
        yield {
            None: pool.submit(trial.complaints),
            **{n: pool.submit(trial.failed, n) for n in names},
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(1200)
def test_what_is_right_passes(trials: dict[str | None, Future[list[str]]]) -> None:
    """A server that keeps every promise passes every check."""
    assert trials[None].result() == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_own_checks(
    trials: dict[str | None, Future[list[str]]], fault: str
) -> None:
    """Each fault is noticed by the checks that it breaks, and by no other."""
    assert trials[fault].result() == sorted(EXPECTED[fault])


def test_every_check_has_a_fault() -> None:
    """No check passes whatever a server does."""
    caught = {check for name in FAULTS for check in EXPECTED[name]}
    assert [check.id for check in CHECKS if check.id not in caught] == []


def test_checks_say_what_they_promise() -> None:
    """Ids are `group.name`, promises are sentences, sources say where they are from."""
    for check in CHECKS:
        assert re.fullmatch(r"[a-z_]+\.[a-z0-9-]+", check.id), check.id
        assert check.promise.endswith("."), check.id
        assert re.search(r"\d+\.?\d*|design", check.source), check.id


def test_profiles_name_checks_that_there_are() -> None:
    """Each pattern of a client's profile stands for at least one check."""
    for name, patterns in PROFILES.items():
        assert needed(name, CHECKS), name
        for pattern in patterns:
            glob = re.compile(pattern.replace(".", r"\.").replace("*", ".*"))
            assert any(glob.fullmatch(check.id) for check in CHECKS), (name, pattern)


@pytest.mark.parametrize("path", sorted(SUITE.rglob("*.py")), ids=lambda path: path.name)
def test_the_judge_knows_nothing_of_latimer(path: Path) -> None:
    """The suite imports nothing of the adapter, the backends or the schemas."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("latimer"), path
            assert node.level <= len(path.relative_to(SUITE).parts), path
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("latimer") for alias in node.names), path
    assert path.read_text().count("\n") <= 500
