"""Tests of the project's layout: folders, the contents of the wheel."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from latimer.backends.llama_cpp import DEMO_MODEL

ROOT = Path(__file__).parent.parent
FLOORS = ("schemas", "backends", "adapter")
# The conformance suite is in the tests' folder and is installed as a package of its own.
PACKAGES = {**{floor: floor for floor in FLOORS}, "tests/conformance": "conformance"}
SOURCES = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def test_rooms_are_small() -> None:
    """No module is longer than 900 lines."""
    for path in SOURCES + TESTS:
        assert path.read_text().count("\n") <= 900, path


# Modules with pydantic's models.
MODELS = (
    *(path for path in SOURCES if path.is_relative_to(ROOT / "schemas")),
    ROOT / "adapter/limits/config.py", ROOT / "adapter/settings.py",
    ROOT / "backends/fleet/config.py",
)  # fmt: skip


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_annotations_of_models_are_no_texts(path: Path) -> None:
    """Pydantic need not compile annotations at each start, and those of a base class repeatedly."""
    assert "from __future__ import annotations" not in path.read_text()


def test_no_middleware_that_copies_streams() -> None:
    """No source uses BaseHTTPMiddleware, which costs more per request than the translation."""
    assert not [path for path in SOURCES if "BaseHTTPMiddleware" in path.read_text()]


def test_shared_code_does_not_know_engines() -> None:
    """No module of the adapter names an engine's backend, except those that choose one."""
    for path in (ROOT / "adapter").rglob("*.py"):
        if path.name not in ("engines.py", "settings.py", "__init__.py"):
            assert not re.search(r"LlamaServer|KoboldCpp|LlamaCpp", path.read_text()), path


def test_the_demo_model_is_the_one_of_the_recordings() -> None:
    """The shipped demo model has the SHA-256 of the recorded one."""
    digest = hashlib.sha256(DEMO_MODEL.read_bytes()).hexdigest()
    assert digest == DEMO_SHA256


DEMO_SHA256 = "2b7fe019de7479d7ab1082ce814ef9d0a4cf1bc79e5a84d82144b6637c86110d"


def test_the_citation_has_the_version() -> None:
    """CITATION.cff has the version and the licence of pyproject.toml."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, so that it contains no files of an earlier build."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in (*PACKAGES, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    # What pip calls; pip itself takes as long as this.
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", build, str(out)], cwd=source, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return next(out.glob("latimer-*.whl"))


def test_every_package_is_in_the_wheel(wheel: Path) -> None:
    """The wheel has every module, type marker, page and model, and no other file."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"latimer/{package}/{path.relative_to(ROOT / folder)}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".gguf", ".html", ".css", ".js", ".wav", ".mp3")
        or path.name in ("py.typed", "peers.json")
        or (path.suffix in (".json", ".md") and path.parent.name == "sessions")
        if "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    for package in PACKAGES.values():
        assert f"latimer/{package}/py.typed" in names
