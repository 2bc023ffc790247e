"""Virtual environments made with the commands that a user types, and servers started from them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2

from support.servers import wait_for

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
    def made(cls, folder: Path, python: Path | None = None) -> Environment:
        """Create an environment in a folder, of this Python or another one."""
        for name in ("home", "work"):
            (folder / name).mkdir(parents=True)
        made = cls(folder)
        program = str((python or Path(sys.executable)).resolve())
        made.run(program, "-m", "venv", str(folder / "venv"))
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


QUESTION = "What is the capital of France?"


@contextlib.contextmanager
def program(
    words: Sequence[str],
    url: str,
    variables: Mapping[str, str],
    folder: Path,
    *,
    seconds: float = 60.0,
    stop: Callable[[int], int] = int,
    code: int = 0,
) -> Iterator[None]:
    """Run a server until the block ends, then end it and check its exit code.

    Args:
        url: the URL that answers 200 when the server is ready.
        seconds: the maximum time until the server is ready.
        stop: returns the process that gets SIGTERM; by default the one that was started.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            list(words), cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            wait_for(url, process, seconds)
            yield
            os.kill(stop(process.pid), signal.SIGTERM)
            ended = process.wait(60)
            assert ended == code, f"{words[0]} ended with {ended}"
        except BaseException:
            output.seek(0)
            print(output.read().decode(errors="replace")[-5000:])
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(30)


def post(address: str, path: str, body: Mapping[str, Any], key: str | None = None) -> Any:
    """Return the JSON of a successful reply of a server's first model.

    Args:
        key: the API key.
    """
    with _client(address, key) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        reply = client.post(f"/v1/{path}", json={"model": model, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def capabilities(address: str, key: str | None = None) -> set[str]:
    """Return what a server's first model is made for."""
    with _client(address, key) as client:
        return set(client.get("/v1/models").json()["data"][0]["capabilities"])


def ask(address: str, fields: Mapping[str, Any] | None = None, key: str | None = None) -> str:
    """Return the answer of a server's first model to one question.

    Args:
        fields: more fields of the request.
        key: the API key.
    """
    messages = [{"role": "user", "content": QUESTION}]
    body = {"messages": messages, "temperature": 0, **(fields or {})}
    return str(post(address, "chat/completions", body, key)["choices"][0]["message"]["content"])


def _client(address: str, key: str | None) -> httpx2.Client:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx2.Client(base_url=address, timeout=60, headers=headers)
