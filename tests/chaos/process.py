"""A `latimer serve` process as a user starts it, with measurements from the system."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support.servers import QUIET

from chaos.client import ask, get

_TICK = os.sysconf("SC_CLK_TCK")
_ADDRESS = re.compile(rb"http://\S+?:(\d+)/v1")
# Words that a log must never contain.
BAD = re.compile(
    rb"Traceback|Fatal Python error|Segmentation fault|GGML_ASSERT|Exception in|never awaited|"
    rb"never retrieved|ASGI callable"
)
# Lines that a start and broken requests cause.
EXPECTED = (
    b"Latimer serves", b"The playground is at", b"Clients of /v1/responses can",
    b"Invalid HTTP request", b"Unsupported upgrade", b"No supported WebSocket",
)  # fmt: skip


class Died(Exception):
    """The process has ended, or does not respond any more."""


class Sample(NamedTuple):
    """The resources that a process uses: its memory in MiB, and numbers."""

    memory: float
    threads: int
    files: int
    connections: int
    tasks: int


class Latimer:
    """A running `latimer serve` on a free port.

    Args:
        words: its arguments.
        inside: a way of `inside.py` to run it with measurements from inside, or empty.
        environment: additional environment variables.
    """

    def __init__(self, words: Sequence[str], inside: str = "", **environment: str) -> None:
        program = ["latimer"]
        if inside:
            program = [sys.executable, str(Path(__file__).with_name("inside.py")), inside]
        self.words = [*program, "serve", *words, "--port", "0"]
        self._inside = bool(inside)
        # The log is searched for what no request may cause.
        self._environment = {**os.environ, **QUIET, "PYTHONFAULTHANDLER": "1", **environment}
        self.port = 0
        self._read = 0
        self._ended = b""

    async def start(self, ready: bool = True, seconds: float = 60.0) -> None:
        """Start the process, and wait until it listens and is ready.

        Args:
            ready: True to wait until `/health` returns 200.
            seconds: the time limit.
        """
        self._read, self._ended = 0, b""
        handle, name = tempfile.mkstemp(prefix="latimer-chaos-")
        self.log = Path(name)
        pipe = subprocess.PIPE if self._inside else subprocess.DEVNULL
        self.process = subprocess.Popen(  # noqa: ASYNC220
            self.words, stdin=pipe, stdout=pipe, stderr=handle, env=self._environment
        )
        os.close(handle)
        end = time.monotonic() + seconds
        while not (found := _ADDRESS.findall(self.output())):
            assert self.process.poll() is None, self.output().decode(errors="replace")
            assert time.monotonic() < end, "Latimer does not say where it listens"
            await asyncio.sleep(0.02)
        self.port = int(found[-1])
        while ready:
            reply = await ask(self.port, get("/health"), 5)
            if reply.status == 200:
                break
            assert time.monotonic() < end, f"Latimer does not become ready: {reply}"
            await asyncio.sleep(0.05)

    async def command(self, name: str = "state", seconds: float = 40.0) -> dict[str, Any]:
        """Run a command of `inside.py` and return its result.

        Raises:
            Died: the process has ended, or does not respond.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(name.encode() + b"\n")
            self.process.stdin.flush()
            reading = asyncio.to_thread(self.process.stdout.readline)
            line = await asyncio.wait_for(reading, seconds)
        except TimeoutError:
            self.process.kill()
            raise Died(f"no answer from inside within {seconds:g} s") from None
        except OSError:
            line = b""
        if not line:
            raise Died(f"the process ended with {await asyncio.to_thread(self.process.wait, 10)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def output(self) -> bytes:
        """Return all output so far."""
        return self._ended or self.log.read_bytes()

    def fresh_problems(self, strict: bool = False, also: tuple[bytes, ...] = ()) -> list[str]:
        """Return log lines since the last call that show an exception or a crash.

        Args:
            strict: True for all lines but those that a start and broken requests cause.
            also: the beginnings of further lines that are expected then.
        """
        text = self.output()[self._read :]
        self._read += len(text)
        if strict:
            lines = [one for one in text.splitlines() if one.strip()]
            other = [one for one in lines if not one.startswith((*EXPECTED, *also))]
            return [b"\n".join(other)[:20_000].decode(errors="replace")] if other else []
        found = BAD.search(text)
        if found is None:
            return []
        shown = text[max(0, found.start() - 200) :].decode(errors="replace")
        # The end of a traceback is the most useful part.
        return [f"its log says: {shown[:300]} … {shown[-600:]}"]

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self.process.poll() is None

    def tree(self) -> list[int]:
        """Return the ids of the process and its children."""
        found = [self.process.pid]
        for pid in found:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in _text(path).split()]
        return found

    def cpu(self) -> float:
        """Return the CPU seconds of the process and its children."""
        total = 0
        for pid in self.tree():
            fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            total += sum(map(int, fields[11:13])) if fields else 0
        return total / _TICK

    def forget_peak(self) -> None:
        """Reset the peak of the memory measurement."""
        for pid in self.tree():
            try:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            except OSError:
                continue

    def memory(self, name: str = "VmRSS") -> float:
        """Return the memory of the process and its children in MiB, or (`VmHWM`) its peak."""
        return sum(_memory(pid, name) for pid in self.tree())

    async def sample(self, engine: int = 0) -> Sample:
        """Measure the process from outside, and count its tasks from inside.

        Args:
            engine: the port of its engine, 0 without one.
        """
        tasks = (await self.command("tasks"))["tasks"]
        folder = Path("/proc") / str(self.process.pid)
        files = [_link(one) for one in (folder / "fd").iterdir()]
        own = {name.removeprefix("socket:[").removesuffix("]") for name in files}
        lines = [line.split() for line in _text(folder / "net/tcp").splitlines()[1:]]
        remote = f":{engine:04X}"
        connections = sum(1 for line in lines if line[2].endswith(remote) and line[9] in own)
        threads = len(list((folder / "task").iterdir()))
        memory = _memory(self.process.pid, "VmRSS")
        return Sample(memory, threads, len(files), connections, tasks)

    async def stop(self, seconds: float = 5.0) -> int | None:
        """End the process and return its exit code, or None if it had to be killed."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + seconds
        while self.alive and time.monotonic() < end:
            await asyncio.sleep(0.02)
        killed = self.alive
        if killed:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._ended = self.output() or b" "
        self.log.unlink(missing_ok=True)
        return None if killed else self.process.returncode


def _memory(pid: int, name: str) -> float:
    lines = _text(Path(f"/proc/{pid}/status")).splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
