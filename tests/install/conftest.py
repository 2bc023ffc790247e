"""One fresh environment for each way of installing, shared by its tests and timed."""

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
    """Return a function that records a duration for the summary and for JUnit."""

    def note(name: str, start: float) -> None:
        SECONDS[name] = time.monotonic() - start
        record_testsuite_property(f"seconds of {name}", round(SECONDS[name], 1))

    return note


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Return a function that makes a new copy of the project's files."""
    return lambda: copy_of_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="session")
def install(
    tmp_path_factory: pytest.TempPathFactory,
    checkout: Callable[[], Path],
    noted: Callable[[str, float], None],
) -> Install:
    """Return a function that makes an environment with an installed copy of the project."""

    def make(*requirements: str) -> Environment:
        start = time.monotonic()
        environment = Environment.made(tmp_path_factory.mktemp("environment") / "it")
        environment.run("pip", "install", *requirements, folder=checkout())
        noted(f"pip install {' '.join(requirements)}", start)
        return environment

    return make


@pytest.fixture(scope="session")
def plain(install: Install) -> Environment:
    """Return an environment with the package without extras."""
    return install(".")


@pytest.fixture(scope="session")
def llama_cpp(install: Install) -> Environment:
    """Return an environment with the package and the in-process engine."""
    return install(".[llama-cpp]")


@pytest.fixture(scope="session")
def prebuilt(install: Install) -> Environment:
    """Return an environment with the package and llama.cpp's prebuilt server."""
    return install(".[prebuilt]")


@pytest.fixture(scope="session")
def tiktoken(install: Install) -> Environment:
    """Return an environment with the package and tiktoken."""
    return install(".[tiktoken]")


@pytest.fixture(scope="session")
def s3(install: Install) -> Environment:
    """Return an environment with the package and media on S3."""
    return install(".[s3]")


@pytest.fixture(scope="session")
def redis(install: Install) -> Environment:
    """Return an environment with the package and the client of Redis."""
    return install(".[redis]")


@pytest.fixture(scope="session")
def otel(install: Install) -> Environment:
    """Return an environment with the package and the SDK of OpenTelemetry."""
    return install(".[otel]")


@pytest.fixture(scope="session")
def speech(install: Install) -> Environment:
    """Return an environment with the package, sherpa-onnx and the encoders."""
    return install(".[speech]")


@pytest.fixture(scope="session")
def postgres(install: Install) -> Environment:
    """Return an environment with the package and the driver of PostgreSQL."""
    return install(".[postgres]")


@pytest.fixture(scope="session")
def conformance(install: Install) -> Environment:
    """Return an environment with the package, the conformance suite and pytest."""
    return install(".[conformance]", "pytest")


@pytest.fixture(scope="session")
def client(install: Install) -> Environment:
    """Return an environment with the `openai` client and without Latimer."""
    return install("openai")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the duration of each installation."""
    for name, seconds in SECONDS.items():
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
