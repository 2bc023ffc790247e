"""Tests of scripts in a process with limits."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from latimer.backends import offload
from latimer.backends.offload import FairThreads
from latimer.backends.sandbox import LOOK, Ended, run

MEBIBYTE = 2**20
LIMITS: dict[str, Any] = {"cpu": 5, "memory": 512 * MEBIBYTE}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return the file of a script."""
    return tmp_path / "script.py"


def test_a_slow_reader_gets_all(script: Path) -> None:
    """A script that begins to read late gets all of its input, which fills the pipe many times."""
    script.write_text(
        f"import sys, time; time.sleep({4 * LOOK}); print(len(sys.stdin.buffer.read()))"
    )
    ended = run(script, bytes(4 * MEBIBYTE), wait=30, **LIMITS)
    assert ended == Ended(0, b"4194304\n")


def test_an_unread_input_is_no_error(script: Path) -> None:
    """A script may end without reading its input."""
    script.write_text("print('done')")
    assert run(script, bytes(4 * MEBIBYTE), wait=30, **LIMITS) == Ended(0, b"done\n")


def test_files_as_input_and_output(script: Path, tmp_path: Path) -> None:
    """A script can have files instead of pipes; its output is then not returned."""
    script.write_text(
        "import sys; sys.stdin.buffer.seek(2); sys.stdout.buffer.write(sys.stdin.buffer.read())"
    )
    (tmp_path / "in").write_bytes(b"abcd")
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as target:
        assert run(script, source, wait=30, output=target, **LIMITS) == Ended(0)
    assert (tmp_path / "out").read_bytes() == b"cd"


def test_the_time_is_limited(script: Path) -> None:
    """A script that neither reads nor ends is killed in time."""
    script.write_text("import time; time.sleep(60)")
    begin = time.monotonic()
    assert run(script, bytes(4 * MEBIBYTE), wait=0.5, **LIMITS) == Ended(None)
    assert time.monotonic() - begin < 20


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    """Return two threads for processes."""
    made = FairThreads(2, "sandbox")
    yield made
    made.shutdown()


@pytest.fixture
def sleeper(script: Path) -> Path:
    """Return a script that ends after a minute."""
    script.write_text("import time; time.sleep(60)")
    return script


async def _is_ended(processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until the ends of all processes are known."""
    async with asyncio.timeout(10):
        while None in [process.returncode for process in processes]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("moment", ["start", "kill"])
async def test_no_moment_loses_a_process(
    sleeper: Path, monkeypatch: pytest.MonkeyPatch, threads: FairThreads, moment: str
) -> None:
    """A caller that is cancelled while its process starts, or is killed, leaves none."""
    begun, may_end = threading.Event(), threading.Event()
    found: list[subprocess.Popen[bytes]] = []

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            found.append(self)
            self.pause("start")

        def kill(self) -> None:
            self.pause("kill")
            super().kill()

        def pause(self, at: str) -> None:
            """Wait, if this is the moment at which the caller is cancelled."""
            if at == moment:
                begun.set()
                may_end.wait(10)

    def work() -> None:
        run(sleeper, b"", wait=0.2 if moment == "kill" else 60, **LIMITS)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    task = asyncio.create_task(offload.run(offload.UNKNOWN, work, threads=threads))
    assert await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    may_end.set()
    await _is_ended(found)
    assert [process.returncode for process in found] == [-signal.SIGKILL]


async def test_many_cancelled_callers(
    sleeper: Path, monkeypatch: pytest.MonkeyPatch, threads: FairThreads
) -> None:
    """After many callers were cancelled at any moment, no process and no thread is lost."""
    found: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            found.append(self)
            super().__init__(*arguments, **options)

    def work() -> Ended:
        return run(sleeper, b"", wait=60, **LIMITS)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    # Abandoned work is ended again and again, so that it is often while it cleans up.
    monkeypatch.setattr(offload, "AGAIN", 0.0005)
    turn = 0
    # On a busy machine the thread of a call begins later.
    while turn < 60 or (len(found) <= 10 and turn < 600):
        turn += 1
        task = asyncio.create_task(offload.run(offload.UNKNOWN, work, threads=threads))
        await asyncio.sleep(turn % 20 / 4_000 * (1 + turn // 60))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    both = threading.Barrier(2)
    running = (
        offload.run(offload.UNKNOWN, both.wait, 10, threads=threads, seconds=20) for _ in range(2)
    )
    assert sorted(await asyncio.gather(*running)) == [0, 1]
    await _is_ended(found)
    assert len(found) > 10
