"""One fresh environment for each way of installing, shared by its tests and timed."""

from __future__ import annotations

import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from support.environments import ROOT, Environment, copy_of_checkout

Install = Callable[..., Environment]
SECONDS: dict[str, float] = {}
# The extras whose lowest versions are tested: those without large packages.
EXTRAS = ("llama-cpp", "tiktoken", "postgres", "redis", "s3", "otel", "speech", "conformance")


def lowest_versions(*extras: str) -> Iterator[str]:
    """Yield a pin of each package of the project and of some extras, to its lowest version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    for text in (*project["dependencies"], *(one for extra in extras for one in optional[extra])):
        found = re.match(r"([\w.-]+)(?:\[\w+\])?>=([\w.]+)", text)
        assert found, f"{text} has no lowest version"
        yield f"{found[1]}=={found[2]}"


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
def prebuilt(install: Install) -> Environment:
    """Return an environment with the package and llama.cpp's prebuilt server."""
    return install(".[prebuilt]")


@pytest.fixture(scope="session")
def lowest(install: Install, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Return an environment with the lowest versions that the project and its extras declare."""
    if sys.version_info >= (3, 12):
        pytest.skip("some of the lowest versions have no wheel for this Python")
    pins = tmp_path_factory.mktemp("pins") / "lowest.txt"
    pins.write_text("\n".join(lowest_versions(*EXTRAS)))
    words = (f".[{','.join(EXTRAS)}]", "pytest", "--no-compile", "-c", str(pins))
    return install(*words)


def of_extra(extra: str, *more: str) -> Callable[..., Environment]:
    """Return a fixture: an environment with an extra, then one with the lowest versions of all.

    Args:
        more: what else is installed.
    """

    @pytest.fixture(scope="session", params=["newest", "lowest"])
    def made(request: pytest.FixtureRequest, install: Install) -> Environment:
        if request.param == "lowest":
            return cast(Environment, request.getfixturevalue("lowest"))
        return install(f".[{extra}]", *more)

    return made


llama_cpp = of_extra("llama-cpp")
tiktoken = of_extra("tiktoken")
s3 = of_extra("s3")
redis = of_extra("redis")
otel = of_extra("otel")
speech = of_extra("speech")
postgres = of_extra("postgres")
conformance = of_extra("conformance", "pytest")


@pytest.fixture(scope="session")
def client(install: Install) -> Environment:
    """Return an environment with the `openai` client and without Latimer."""
    return install("openai")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the duration of each installation."""
    for name, seconds in SECONDS.items():
        terminalreporter.write_line(f"{seconds:6.1f} s  {name}")
