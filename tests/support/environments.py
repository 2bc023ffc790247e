"""Fresh virtual environments, made and filled with the commands that a user types."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# The settings of the machine and of the user's pip. No other variable is kept.
KEPT = (
    "PIP_", "LC_", "LANG", "TMPDIR", "SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "CC",
    "CXX", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY",
)  # fmt: skip
PIP_CONFIGS = (".config/pip/pip.conf", ".pip/pip.conf", "Library/Application Support/pip/pip.conf")


@cache
def variables() -> dict[str, str]:
    """Return the environment variables of a user of this machine without a project."""
    kept = {name: value for name, value in os.environ.items() if name.upper().startswith(KEPT)}
    folders = os.environ["PATH"].split(os.pathsep)
    here = Path(sys.prefix).resolve()
    kept["PATH"] = os.pathsep.join(
        one for one in folders if not Path(one).resolve().is_relative_to(here)
    )
    known = [path for name in PIP_CONFIGS if (path := Path.home() / name).exists()]
    if known:
        kept.setdefault("PIP_CONFIG_FILE", str(known[0]))
    cache = _output(sys.executable, "-m", "pip", "cache", "dir")
    if cache:
        kept["PIP_CACHE_DIR"] = cache
    # The user's pip cache keeps the wheels that are compiled here, so they must be portable.
    kept["CMAKE_ARGS"] = _output("make", "-s", "cmake-args")
    assert kept["CMAKE_ARGS"]
    return kept


def copy_of_checkout(target: Path) -> Path:
    """Copy the files that git tracks, in their present state."""
    for name in _output("git", "ls-files", "-z").split("\0"):
        if name and (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@dataclass(frozen=True)
class Environment:
    """An activated virtual environment with an empty home and working folder."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Environment:
        """Create an environment in a folder."""
        for name in ("home", "work"):
            (folder / name).mkdir(parents=True)
        made = cls(folder)
        python = str(Path(sys.executable).resolve())
        made.run(python, "-m", "venv", str(folder / "venv"))
        return made

    @property
    def work(self) -> Path:
        """The folder in which commands run."""
        return self.folder / "work"

    def variables(self, **more: str) -> dict[str, str]:
        """Return the environment variables for commands."""
        known = variables()
        path = f"{self.folder / 'venv' / 'bin'}{os.pathsep}{known['PATH']}"
        # Use any free port, unless a test or a command names one.
        own = {"PATH": path, "HOME": str(self.folder / "home"), "LATIMER_PORT": "0"}
        return {**known, **own, **more}

    def run(
        self, *words: str, code: int = 0, folder: Path | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end and check its exit code."""
        done = subprocess.run(
            words, cwd=folder or self.work, env=self.variables(**more), text=True,
            capture_output=True,
        )  # fmt: skip
        said = f"{' '.join(words)}\n{done.stdout[-5000:]}\n{done.stderr[-5000:]}"
        assert done.returncode == code, said
        return done


def _output(*words: str) -> str:
    """Return the output of a command, or an empty string if it fails."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
