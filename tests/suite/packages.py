"""Servers from packages: an environment for each, the demo model in its format, start and end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx2
from latimer.backends.llama_cpp import DEMO_MODEL
from support.environments import Environment

# The seconds that a server has to end itself after SIGTERM, before it gets SIGKILL.
GRACE = 10.0
# The safetensors of the demo model, below the folder of the environments. Servers run there, so
# that this is also the name of the model.
EXPORTED = "demo"
# The packages that export the demo model, in addition to torch and transformers.
EXPORT = ("accelerate==1.15.0", "gguf==0.19.0")


def installed(
    folder: Path, packages: Sequence[str], removed: Sequence[str] = (), alias: str = ""
) -> Environment:
    """Return an environment with packages.

    It is kept if the packages are the same, and made again if they differ or only a part is there.

    Args:
        packages: what pip installs, the server's own package first.
        removed: packages that are uninstalled again.
        alias: a second name of the server's own package.
    """
    place = Environment(folder)
    done = folder / "packages.txt"
    wanted = repr((packages, removed, alias))
    if done.exists() and done.read_text() == wanted:
        return place
    if (folder / "home").exists():
        shutil.rmtree(folder)
    place = Environment.made(folder)
    place.run("pip", "install", "-q", *packages)
    if removed:
        place.run("pip", "uninstall", "-q", "-y", *removed)
    if alias:
        _named_again(place, packages[0].partition("==")[0], alias)
    done.write_text(wanted)
    return place


def _named_again(place: Environment, distribution: str, alias: str) -> None:
    """Copy the metadata of a package under a second name."""
    stem = distribution.replace("-", "_")
    (old,) = place.folder.glob(f"venv/lib/*/site-packages/{stem}-*.dist-info")
    new = old.with_name(old.name.replace(stem, alias))
    new.mkdir()
    text = (old / "METADATA").read_text()
    (new / "METADATA").write_text(text.replace(f"Name: {distribution}", f"Name: {alias}", 1))


def exported(place: Environment, folder: Path) -> None:
    """Write the safetensors of the demo model below a folder, unless they are there."""
    target = folder / EXPORTED
    if not (target / "config.json").exists():
        program = str(Path(__file__).with_name("export.py"))
        place.run("python", program, str(DEMO_MODEL), str(target))


def installed_version(place: Environment, distribution: str) -> str:
    """Return the version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({distribution!r}))"
    return place.run("python", "-c", code).stdout.strip()


def stated(koboldcpp: Path) -> str:
    """Return the version that a koboldcpp states."""
    words = [sys.executable, str(koboldcpp / "koboldcpp.py"), "--version"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def restarted(words: Sequence[str], note: Path) -> list[str]:
    """Return a command that runs another one again when it ends, with its process id in a file."""
    loop = 'while :; do "$@" & echo $! > "$0"; wait $!; sleep 0.1; done'
    return ["sh", "-c", loop, str(note), *words]


@contextlib.contextmanager
def running(
    words: Sequence[str],
    variables: Mapping[str, str],
    folder: Path,
    log: Path,
    url: str,
    seconds: float,
    grace: float = GRACE,
) -> Iterator[None]:
    """Run a server until the block ends, then end it with all its processes.

    Args:
        folder: where it runs.
        log: the file for its output.
        url: the URL that answers, with any status below 500, when the server is ready.
        seconds: the time until then.
        grace: the seconds between SIGTERM and SIGKILL.

    Raises:
        RuntimeError: the server ended, or is not ready in time; with the end of its log.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(words), cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(process, url, seconds, log)
        yield
    finally:
        _end(process, grace)


def _wait(process: subprocess.Popen[bytes], url: str, seconds: float, log: Path) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(url, timeout=5).status_code < 500:
                return
        time.sleep(0.2)
    state = "is not ready" if process.poll() is None else f"ended with {process.returncode}"
    tail = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"The server {state} after {seconds:g} s or less.\n{tail}")


def _end(process: subprocess.Popen[bytes], grace: float) -> None:
    """End the group of a process: SIGTERM, and SIGKILL for what is left of it."""
    for sign, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 30.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
