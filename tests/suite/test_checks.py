"""The suite judges rightly: what is right passes, and each fault is caught by its own checks."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from latimer.conformance import runner
from latimer.conformance.check import Verdict, all_checks
from latimer.conformance.profiles import PROFILES, needed
from latimer.conformance.runner import Settings, judge
from suite.expected import EXPECTED
from suite.faults import FAULTS
from suite.server import Fault, Server
from support.servers import serving

CHECKS = all_checks()
# What takes seconds, or measures them, judges only the faults that it is there for.
SLOW = {
    "streaming.disconnect": ("stays-after-disconnect",),
    "streaming.first-chunk": ("waits-till-the-end",),
}
SUITE = Path(__file__).parent.parent / "conformance"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, str]]:
    """The right server, whose faults can be switched on."""
    server = Server()
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    with serving(lambda: server) as address:
        yield server, f"{address}/v1"


async def verdicts_of(url: str, fault: str | None) -> list[Verdict]:
    """Every check's verdict."""
    checks = [check for check in CHECKS if fault is None or fault in SLOW.get(check.id, (fault,))]
    # In a thread of its own, with an event loop of its own, as the command runs it.
    settings = Settings(url, "org/toy", hint="demo")
    return await asyncio.to_thread(lambda: asyncio.run(judge(settings, checks)))


async def test_what_is_right_passes(served: tuple[Server, str]) -> None:
    """A server that keeps every promise passes every check."""
    server, url = served
    server.fault = Fault()
    found = await verdicts_of(url, None)
    assert [(v.check.id, v.outcome, v.detail) for v in found if v.outcome != "pass"] == []


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_fails_its_own_checks(
    served: tuple[Server, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault is noticed by the checks that it breaks, and by no other."""
    server, url = served
    server.fault = FAULTS[name]
    monkeypatch.setattr(runner, "TRIES", 1)
    found = {v.check.id for v in await verdicts_of(url, name) if v.outcome != "pass"}
    assert sorted(found) == sorted(EXPECTED[name])


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
