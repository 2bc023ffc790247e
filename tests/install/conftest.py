"""One fresh environment for each way of installing, shared by its tests; the times are shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.environments import Environment, copy_of_checkout

Install = Callable[..., Environment]
SECONDS: dict[str, float] = {}


@pytest.fixture(scope="session")
def noted(record_testsuite_property: Callable[[str, object], None]) -> Callable[[str, float], None]:
    """Keep for the summary, and for JUnit, how long something took since a start."""

    def note(name: str, start: float) -> None:
        SECONDS[name] = time.monotonic() - start
        record_testsuite_property(f"seconds of {name}", round(SECONDS[name], 1))

    return note


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Make a copy of the project's files, each time a new one."""
    return lambda: copy_of_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session")
def install(
    tmp_path_factory: pytest.TempPathFactory,
    checkout: Callable[[], Path],
    noted: Callable[[str, float], None],
) -> Install:
    """Make an environment, and install into it from a copy of the project."""

    def make(*requirements: str) -> Environment:
        start = time.monotonic()
        environment = Environment.made(tmp_path_factory.mktemp("environment") / "it")
        environment.run("pip", "install", *requirements, folder=checkout())
        noted(f"pip install {' '.join(requirements)}", start)
        return environment

    return make


@pytest.fixture(scope="session")
def plain(install: Install) -> Environment:
    """The package without any extra."""
    return install(".")


@pytest.fixture(scope="session")
def llama_cpp(install: Install) -> Environment:
    """The package with the engine in process."""
    return install(".[llama-cpp]")


@pytest.fixture(scope="session")
def tiktoken(install: Install) -> Environment:
    """The package with OpenAI's vocabularies."""
    return install(".[tiktoken]")


@pytest.fixture(scope="session")
def conformance(install: Install) -> Environment:
    """The package with the judge, and a pytest that its user has."""
    return install(".[conformance]", "pytest")


@pytest.fixture(scope="session")
def client(install: Install) -> Environment:
    """The `openai` client, on a machine that has no Latimer."""
    return install("openai")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how long each installation took."""
    for name, seconds in SECONDS.items():
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
