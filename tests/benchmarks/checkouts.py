"""Run `latimer` from any checkout, and measure its CPU time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fake_engine import free_port, wait_for

HERE = Path(__file__).parent.parent.parent
# Latimer has one core to itself; the client and the engine share the other.
CORES = os.sched_getaffinity(0)


@contextlib.contextmanager
def package_of(tree: Path) -> Iterator[dict[str, str]]:
    """Yield the environment variables of a process that imports `latimer` from a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "latimer"
        package.mkdir()
        for name in ("adapter", "backends", "schemas"):
            (package / name).symlink_to((tree / name).resolve())
        yield {**os.environ, "PYTHONPATH": folder}


def on_core(pid: int) -> float:
    """Return the microseconds that the threads of a process have run on a core."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e3


@contextlib.contextmanager
def served(tree: Path, engine: int | None, *words: str) -> Iterator[tuple[int, int]]:
    """Run `latimer serve` of a checkout; yield its process id and its port.

    Args:
        engine: the port of its engine; None for the demo model.
    """
    place = () if engine is None else (f"http://127.0.0.1:{engine}", "--model-name", "fake")
    port = free_port()
    with package_of(tree) as environment:
        process = subprocess.Popen(
            ["latimer", "serve", *place, "--port", str(port), *words],
            env={**environment, "LATIMER_PORT": str(port)},
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {min(CORES)}),
        )
        try:
            wait_for(port)
            yield process.pid, port
        finally:
            process.terminate()
            process.wait(30)
