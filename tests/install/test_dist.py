"""Tests of `make dist`: the contents of the archives, and the wheel in each version of Python."""

from __future__ import annotations

import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from functools import cache
from pathlib import Path
from shutil import which

import httpx2
import pytest
from install.commands import imported, serving
from support.environments import ROOT, Environment, ask, variables

pytestmark = pytest.mark.timeout(600)
ANSWER = "The capital of France is Paris."
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What the source archive has besides the packages.
FILES = {
    "CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md",
    "SECURITY.md", "pyproject.toml", "setup.cfg", "setup.py",
}  # fmt: skip
FOLDERS = {"adapter": "adapter", "backends": "backends", "schemas": "schemas",
           "tests/conformance": "conformance"}  # fmt: skip
VERSIONS = ("3.11", "3.12", "3.13", "3.14")


@cache
def python_of(version: str) -> Path | None:
    """Return the program of a version of Python; None if this machine has none."""
    pyenv = Path.home() / ".pyenv" / "versions"
    first = which(f"python{version}")
    named = [] if first is None else [Path(first)]
    for program in (*named, *sorted(pyenv.glob(f"{version}.*/bin/python"))):
        words = (str(program), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])")
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:
            return program
    return None


@pytest.fixture(scope="session")
def dist(checkout: Callable[[], Path]) -> Path:
    """Run `make dist` in a copy of the project, and return the folder of its archives."""
    folder = checkout()
    done = subprocess.run(
        ("make", "dist"), cwd=folder, env=variables(), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("PASSED") == 2
    assert "Citation metadata are valid" in done.stdout
    return folder / "dist"


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """Return the wheel."""
    return dist / f"latimer-{PROJECT['version']}-py3-none-any.whl"


def shipped() -> set[str]:
    """Return the files of the packages that git tracks."""
    done = subprocess.run(
        ("git", "ls-files", *FOLDERS), cwd=ROOT, check=True, capture_output=True, text=True
    )
    return {name for name in done.stdout.split("\n") if name and (ROOT / name).exists()}


def test_the_wheel_has_the_packages_only(wheel: Path) -> None:
    """It has each file of the packages, the licence and the command, and no test."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    expected = {
        f"latimer/{package}/{name.removeprefix(folder + '/')}"
        for folder, package in FOLDERS.items()
        for name in shipped()
        if name.startswith(folder + "/")
    }
    info = f"latimer-{PROJECT['version']}.dist-info"
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    assert names == expected | {f"{info}/{name}" for name in about}
    for name in ("adapter/playground/page.js", "backends/llama_cpp/demo.gguf", "adapter/py.typed"):
        assert f"latimer/{name}" in names


def test_the_source_has_what_the_wheel_is_built_from(dist: Path) -> None:
    """The source archive has the packages and the files about the project, and no test."""
    with tarfile.open(dist / f"latimer-{PROJECT['version']}.tar.gz") as archive:
        names = {one.name.partition("/")[2] for one in archive if one.isfile()}
    assert {name for name in names if not name.startswith("latimer.egg-info/")} == shipped() | FILES


def test_the_metadata_is_complete(wheel: Path) -> None:
    """The metadata has the versions of Python, the licence, the extras, and the README."""
    info = f"latimer-{PROJECT['version']}.dist-info/METADATA"
    found = Parser().parsestr(zipfile.ZipFile(wheel).read(info).decode())
    assert found["Requires-Python"] == ">=3.11"
    assert (found["License-Expression"], found["License-File"]) == ("MIT", "LICENSE")
    classifiers = found.get_all("Classifier") or []
    for version in VERSIONS:
        assert f"Programming Language :: Python :: {version}" in classifiers
    assert {*(found.get_all("Provides-Extra") or ())} == {*PROJECT["optional-dependencies"]}
    assert found["Description-Content-Type"] == "text/markdown"
    assert str(found.get_payload()).startswith("# Latimer")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_works_in_each_python(
    version: str, wheel: Path, llama_server_url: str, tmp_path: Path
) -> None:
    """In a new environment the command answers, every module imports, and the page is served."""
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version} here")
    environment = Environment.made(tmp_path / "it", python)
    environment.run("pip", "install", "-q", str(wheel))
    said = environment.run("latimer", "--version").stdout
    assert PROJECT["version"] in said
    assert imported(environment, "latimer.adapter.playground", "latimer.adapter.endpoints") > 8
    with serving(environment, llama_server_url) as address:
        assert ask(address) == ANSWER
        page = httpx2.get(f"{address}/", headers={"accept": "text/html"})
        assert page.status_code == 200
        assert "<title>" in page.text
