"""Engines with faults: killed, stopped, terminated, or with edited responses."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import hypothesis
from fuzz.edits import edit, edited
from hypothesis import HealthCheck, Phase, given, settings
from latimer.backends.llama_cpp import DEMO_MODEL
from support.engines.front import Front, fronting
from support.servers import free_port, llama_server, llama_server_command, wait_for

ENGINES = ("llama_cpp", "llama_server", "edited")
# Seconds after an engine's return during which requests can still fail.
GRACE = 15.0


class Trouble:
    """A record of the times at which an engine had a fault.

    Args:
        always: True if the engine has faults at any time.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._spans: list[list[float]] = []
        self.counts: dict[str, int] = {}

    def begin(self, what: str) -> None:
        """Record the start of a fault."""
        self.counts[what] = self.counts.get(what, 0) + 1
        self._spans.append([time.monotonic(), float("inf")])

    def end(self) -> None:
        """Record that the engine responds again."""
        self._spans[-1][1] = time.monotonic() + GRACE

    def excuses(self, start: float, end: float) -> bool:
        """Return True if a request between two times can have failed."""
        return self._always or any(start < last and first < end for first, last in self._spans)


class Restarted:
    """A llama-server that can be ended and started again on the same port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        command = llama_server_command(DEMO_MODEL, self.port, slots=4, context=512)
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        wait_for(f"http://127.0.0.1:{self.port}/health", process)
        return process

    async def fail(self, trouble: Trouble, rng: random.Random) -> None:
        """Cause one random fault, and bring the server back."""
        what = rng.choice(("SIGKILL", "SIGTERM", "SIGSTOP"))
        trouble.begin(what)
        self.process.send_signal(getattr(signal, what))
        await asyncio.sleep(rng.uniform(0.2, 12.0))
        if what == "SIGSTOP":
            self.process.send_signal(signal.SIGCONT)
        else:
            await asyncio.to_thread(self._again)
        trouble.end()

    def _again(self) -> None:
        self.close()
        self.process = self._started()

    def close(self) -> None:
        """End the server."""
        self.process.kill()
        self.process.wait(30)


async def keep_failing(
    server: Restarted, trouble: Trouble, rng: random.Random, seconds: float
) -> None:
    """Cause faults of a server forever, with an average pause in seconds."""
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5) * seconds)
        await server.fail(trouble, rng)


async def keep_editing(front: Front, rng: random.Random) -> None:
    """Edit an engine's responses forever, with a new edit several times a second."""
    edits = list(_edits(300, rng.randrange(2**30)))
    while True:
        one = {**rng.choice(edits), "at": rng.randrange(12)}
        front.arm([one])
        await asyncio.sleep(rng.uniform(0.05, 0.6))


def _edits(count: int, seed: int) -> Iterator[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(edit)
    def take(one: dict[str, Any]) -> None:
        found.append(one)

    take()
    yield from found


@asynccontextmanager
async def engine(
    name: str, rng: random.Random, seconds: float
) -> AsyncIterator[tuple[list[str], int, Trouble, Any]]:
    """Run an engine.

    Args:
        seconds: the average time between two of its faults.

    Yields:
        The options of `latimer serve`, the engine's port (0 in process), the record of its faults,
        and a coroutine that causes them during the load, or None.
    """
    if name == "llama_cpp":
        options = ["--context", "2048", "--parallel", "8", "--cache-memory", "64"]
        yield options, 0, Trouble(), None
    elif name == "llama_server":
        server, trouble = await asyncio.to_thread(Restarted), Trouble()
        try:
            address = f"http://127.0.0.1:{server.port}"
            failing = keep_failing(server, trouble, rng, seconds)
            yield [address, "--engine-timeout", "10"], server.port, trouble, failing
        finally:
            server.close()
    else:
        with contextlib.ExitStack() as stack:
            address = stack.enter_context(llama_server(DEMO_MODEL, slots=4, context=512))
            front = stack.enter_context(fronting(address, edited))
            port = front.port
            options = [front.url, "--backend", "llama-server", "--engine-timeout", "5"]
            yield options, port, Trouble(always=True), keep_editing(front, rng)
