"""A `latimer serve` process as a user starts it, with measurements from the system."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from faults.client import ask, encoded

_TICK = os.sysconf("SC_CLK_TCK")
_ADDRESS = re.compile(rb"http://\S+?:(\d+)/v1")
# Words that a log must never contain.
BAD = re.compile(
    rb"Traceback|Fatal Python error|Segmentation fault|GGML_ASSERT|Exception in|never awaited|"
    rb"never retrieved|ASGI callable"
)


class Latimer:
    """A running `latimer serve` on a free port.

    Args:
        words: its arguments.
        environment: additional environment variables.
    """

    def __init__(self, words: Sequence[str], **environment: str) -> None:
        self.words = ["latimer", "serve", *words, "--port", "0"]
        self._environment = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
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
        handle, name = tempfile.mkstemp(prefix="latimer-faults-")
        self.log = Path(name)
        self.process = subprocess.Popen(  # noqa: ASYNC220
            self.words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=handle,
            env=self._environment,
        )  # fmt: skip
        os.close(handle)
        end = time.monotonic() + seconds
        while not (found := _ADDRESS.findall(self.output())):
            assert self.process.poll() is None, self.output().decode(errors="replace")
            assert time.monotonic() < end, "Latimer does not say where it listens"
            await asyncio.sleep(0.02)
        self.port = int(found[-1])
        while ready:
            reply = await ask(self.port, encoded("/health", method="GET"), 5)
            if reply.status == 200:
                break
            assert time.monotonic() < end, f"Latimer does not become ready: {reply}"
            await asyncio.sleep(0.05)

    def output(self) -> bytes:
        """Return all output so far."""
        return self._ended or self.log.read_bytes()

    def fresh_problems(self) -> list[str]:
        """Return log lines since the last call that show an exception or a crash."""
        text = self.output()[self._read :]
        self._read += len(text)
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
        total = 0
        for pid in self.tree():
            for line in _text(Path(f"/proc/{pid}/status")).splitlines():
                if line.startswith(name + ":"):
                    total += int(line.split()[1])
        return total / 1024

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
        self._ended = self.output() or b" "
        self.log.unlink(missing_ok=True)
        return None if killed else self.process.returncode


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
