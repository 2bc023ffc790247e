"""`latimer serve` with several workers over a fast double of llama-server, as real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2

from support.copies import Latimer
from support.servers import QUIET, free_port, wait_for

_DOUBLE = Path(__file__).parent.parent / "benchmarks" / "fake_engine.py"
_COMPLETE = re.compile(r"Latimer runs \d+ workers: processes ([\d, ]+)\.")


@contextlib.contextmanager
def double() -> Iterator[str]:
    """Run the double, which sends a token each 20 ms if a body has `paced`; yield its address."""
    port = free_port()
    process = subprocess.Popen([sys.executable, str(_DOUBLE), str(port)])
    try:
        wait_for(f"http://127.0.0.1:{port}/props", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(30)


class Running:
    """A server of several workers.

    Attributes:
        address: the URL for clients.
        pids: the processes of the workers at the start.
        lines: what it has written, as far as it was read.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.pids = [int(one) for one in self.line(_COMPLETE)[1].split(", ")]
        address = re.search(r" at (http://\S+)/v1", "".join(self.lines))
        assert address is not None
        self.address = address[1]

    def line(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """Read lines until one matches; return the match."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(pattern, line)
            if found is not None:
                return found
        raise AssertionError("".join(self.lines))

    def end(self, number: signal.Signals = signal.SIGTERM) -> str:
        """Send a signal, wait for the end, and return what was written since the last line."""
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=60)
        return rest


@contextlib.contextmanager
def workers(
    *arguments: str, count: int = 2, before: str = "", **environment: str
) -> Iterator[Running]:
    """Run `latimer serve` with workers until all of them serve.

    Args:
        before: statements that change constants of the command's `parent`.
    """
    words = ["serve", *arguments, "--workers", str(count), "--port", "0"]
    kind: type[subprocess.Popen[str]] = Latimer
    first = ["latimer"]
    if before:
        # The constants of a copy are those of the original.
        code = f"from latimer.adapter.cli import main, parent; {before}; main()"
        first, kind = [sys.executable, "-c", code], subprocess.Popen
    process = kind(
        [*first, *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET, "LATIMER_REASONING_KEY": "test", **environment},
    )
    try:
        yield Running(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def has_ended(pid: int, seconds: float = 10.0) -> bool:
    """Return True if a process ends in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with contextlib.suppress(OSError):
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                # Nobody in a container may collect it.
                return True
        time.sleep(0.02)
    return False


def chat(tokens: int, text: str = "paced", **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request that the double answers with so many tokens."""
    messages = [{"role": "user", "content": text}]
    return {"model": "fake", "messages": messages, "max_tokens": tokens, **fields}


class Stream:
    """A stream on a connection of its own.

    Attributes:
        begun: set when it has its first token.
        tokens: the number of tokens so far.
        is_whole: True if it has ended as it should.
    """

    def __init__(self, address: str, tokens: int, **headers: str) -> None:
        self.begun = asyncio.Event()
        self.tokens = 0
        self.is_whole = False
        self._wanted = tokens
        self.task = asyncio.create_task(self._read(address, headers))

    async def _read(self, address: str, headers: dict[str, str]) -> None:
        url, body = f"{address}/v1/chat/completions", chat(self._wanted, stream=True)
        text = ""
        with contextlib.suppress(httpx2.TransportError):
            async with (
                httpx2.AsyncClient(timeout=60, headers=headers) as client,
                client.stream("POST", url, json=body) as reply,
            ):
                async for part in reply.aiter_text():
                    text += part
                    self.tokens = text.count(" word")
                    self.begun.set()
        self.is_whole = self.tokens == self._wanted and text.endswith("data: [DONE]\n\n")


async def streams(address: str, count: int, tokens: int, **headers: str) -> list[Stream]:
    """Start streams, and wait until each has begun."""
    found = [Stream(address, tokens, **headers) for _ in range(count)]
    await asyncio.wait_for(asyncio.gather(*(one.begun.wait() for one in found)), 30)
    return found


async def ended(found: list[Stream]) -> list[bool]:
    """Wait until streams have ended; return which of them are whole."""
    await asyncio.wait_for(asyncio.gather(*(one.task for one in found)), 60)
    return [one.is_whole for one in found]
