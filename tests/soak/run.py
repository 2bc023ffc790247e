"""Serve at 80 % of capacity with random faults for a long time, and check that nothing grows.

    python tests/soak/run.py [--minutes 30] [--engine NAME] [--seed N]

The engines share the minutes. The exit code is 1 if a response is wrong or a number grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from soak.engines import ENGINES, engine
from soak.load import Load
from support.servers import free_port, wait_for

PART = 0.8
# Seconds of the measurement of capacity.
MEASURE = 60.0
# Limits by which the median of the last third can exceed that of the second; for memory also
# 5 %, if that is more. A short run does not judge memory.
MORE = {"memory, MiB": 16.0, "threads": 4.0, "files": 8.0, "to the engine": 8.0, "tasks": 8.0}
MINUTES_FOR_MEMORY = 3.0
# Seconds between the last response and a sample.
SETTLE = 0.5
QUIET = 20.0
EXPECTED = (
    "Latimer serves", "Encrypted reasoning", "WARNING:  Invalid HTTP request",
    "WARNING:  Unsupported upgrade", "WARNING:  No supported WebSocket",
)  # fmt: skip


class Sample(NamedTuple):
    """The resources that a process uses."""

    memory: float
    threads: int
    files: int
    connections: int
    tasks: int


class Process:
    """A `latimer serve` process.

    Args:
        options: its command line options.
        engine: the engine's port.
    """

    def __init__(self, options: Sequence[str], engine: int) -> None:
        self.port = free_port()
        self._engine = engine
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        program = str(Path(__file__).with_name("launched.py"))
        self.process = subprocess.Popen(
            [sys.executable, program, "serve", *options, "--port", str(self.port), "--any-model"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip

    def sample(self) -> Sample:
        """Measure the process from outside, and count its tasks from inside."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("tasks\n")
        self.process.stdin.flush()
        tasks = int(self.process.stdout.readline())
        folder = Path("/proc") / str(self.process.pid)
        pages = int((folder / "statm").read_text().split()[1])
        files = []
        for one in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                files.append(str(one.readlink()))
        own = {name.removeprefix("socket:[").removesuffix("]") for name in files}
        remote = f":{self._engine:04X}"
        lines = [line.split() for line in (folder / "net/tcp").read_text().splitlines()[1:]]
        connections = sum(1 for line in lines if line[2].endswith(remote) and line[9] in own)
        size = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        threads = len(list((folder / "task").iterdir()))
        return Sample(size, threads, len(files), connections, tasks)

    def errors(self) -> list[str]:
        """Return the lines of standard error, except for those that clients' garbage causes."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return [line for line in lines if line.strip() and not line.startswith(EXPECTED)]


@contextlib.contextmanager
def serving(options: Sequence[str], engine: int) -> Iterator[Process]:
    """Run `latimer serve`, end it with SIGTERM, and check its exit code."""
    latimer = Process(options, engine)
    try:
        wait_for(f"http://127.0.0.1:{latimer.port}/health", latimer.process)  # type: ignore[arg-type]
        yield latimer
        latimer.process.terminate()
        code = latimer.process.wait(60)
        assert code == 0, f"latimer serve ended with {code}"
    finally:
        if latimer.process.poll() is None:
            latimer.process.kill()
            latimer.process.wait(10)


def growth(samples: Sequence[Sample], minutes: float) -> list[tuple[str, float, float, bool]]:
    """Return each number's name, its medians in the second and last third, and True if it grew."""
    third = max(len(samples) // 3, 1)
    rows = []
    for index, (name, more) in enumerate(MORE.items()):
        before = statistics.median(
            sample[index] for sample in samples[third : 2 * third] or samples
        )
        after = statistics.median(sample[index] for sample in samples[-third:])
        bound = max(more, before * 0.05) if index == 0 else more
        judged = index > 0 or minutes >= MINUTES_FOR_MEMORY
        rows.append((name, before, after, judged and after - before > bound))
    return rows


async def soak(name: str, minutes: float, seed: int) -> list[str]:
    """Soak one engine and return the failures."""
    rng = random.Random(seed)
    seconds = minutes * 60
    every = min(20.0, seconds / 30)
    samples: list[Sample] = []
    async with engine(name, rng, min(90.0, seconds / 4)) as (options, port, trouble, failing):
        with serving(options, port) as latimer:
            start = latimer.sample()
            load = Load(latimer.port, trouble, rng)
            # Faults already run while the capacity is measured, because they reduce it.
            background = [] if failing is None else [asyncio.create_task(failing)]
            rate = await load.closed(MEASURE)
            print(
                f"{name}: {rate:.1f} requests a second; {PART:.0%} of it from here on", flush=True
            )
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                await load.open(min(every, left), rate * PART)
                # Requests in flight would add resources by chance.
                await asyncio.sleep(SETTLE)
                samples.append(await asyncio.to_thread(latimer.sample))
            for task in background:
                task.cancel()
            ended = await asyncio.gather(*background, return_exceptions=True)
            wrong = [repr(one) for one in ended if not isinstance(one, asyncio.CancelledError)]
            wrong += await _quiet(latimer, start)
            wrong += latimer.errors()
    rows = growth(samples, minutes)
    wrong += [
        f"{what} grew from {before:g} to {after:g}" for what, before, after, bad in rows if bad
    ]
    wrong += load.failures
    _show(name, load, rows, trouble.counts)
    return wrong


async def _quiet(latimer: Process, start: Sample) -> list[str]:
    """Wait until the resources of the load are released, and return those that are not."""
    end = time.monotonic() + QUIET
    while True:
        now = await asyncio.to_thread(latimer.sample)
        left = [
            f"{field} is {getattr(now, field)} after the load, {getattr(start, field)} before it"
            for field in ("files", "connections", "tasks")
            if getattr(now, field) > getattr(start, field) + 8
        ]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.5)


def _show(
    name: str, load: Load, rows: Sequence[tuple[str, float, float, bool]], troubles: dict[str, int]
) -> None:
    statuses = ", ".join(f"{count} × {status}" for status, count in load.statuses.most_common())
    print(f"{name}: {statuses}; {load.left_out} left out; the slowest took {load.slowest:.1f} s")
    print(
        f"{name}: faults of the engine: {troubles or 'none'}; wrong answers: {len(load.failures)}"
    )
    print("| | second third | last third | |\n|---|--:|--:|---|")
    for what, before, after, bad in rows:
        print(f"| {what} | {before:.1f} | {after:.1f} | {'grew' if bad else ''} |", flush=True)


def main() -> int:
    """Read the options, soak each engine, and print the failures."""
    parser = argparse.ArgumentParser(description="Serve with random faults: nothing may grow.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    print(f"Seed {seed}", flush=True)
    names = given.engine or ENGINES
    wrong = []
    for name in names:
        wrong += [
            f"{name}: {one}" for one in asyncio.run(soak(name, given.minutes / len(names), seed))
        ]
    for one in wrong[:50]:
        print(one[:1_000])
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
