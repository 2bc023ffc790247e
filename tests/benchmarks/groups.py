"""Measure the groups in which requests that arrive together do their work.

    python tests/benchmarks/groups.py [--kind chat|completion] [--clients 32] [--seconds 2]

`latimer serve` has a core to itself, and the fake llama-server and the clients share the other one.
A clock notes where a request waits for others, gives way to them, sends its call, and ends. A part
is the work of a request between two of these places. Requests that do the same part right after one
another are a group: all but the first of them find its code in the processor's caches.

The table has the median time of each part by its number in the group, and the mean size of the
group that a request is in. The clock takes about 0.5 us of each part.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import coroutine
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES
from benchmarks.fake_engine import fake_engine, free_port, wait_for
from benchmarks.load import chat, completion, load
from latimer.adapter import request as requests
from latimer.adapter.cli import main as latimer
from latimer.adapter.cli.protocol import Protocol
from latimer.adapter.observers import Observers
from latimer.backends import http, offload
from latimer.backends.connection import Connection

KINDS = {"chat": chat, "completion": completion}
NUMBERS = (1, 2, 4, 8, 16, 28)
# Seconds of requests before those that count.
WARM_UP = 1.0
# Parts of fewer requests than this share have no row.
LEAST = 0.5

# The beginnings of the places at which parts begin, in their order.
ORDER = ("received", "task", "read_", "create_", "__aenter__", "engine", "answer", "finish")

# A time, a place, and True if a part begins there.
Mark = tuple[float, str, bool]
# What the clock has noted. A list of marks would be work for the garbage collector.
TIMES, PLACES, BEGINS = array("d"), list[str](), list[bool]()


def note(place: str, begins: bool) -> None:
    """Note that a part begins or ends."""
    TIMES.append(time.perf_counter())
    PLACES.append(place)
    BEGINS.append(begins)


def around(owner: Any, name: str, begin: str | None, end: str | None) -> None:
    """Note when a method begins and ends; None notes nothing."""
    usual: Callable[..., Any] = getattr(owner, name)

    def clocked(*arguments: Any, **more: Any) -> Any:
        if begin is not None:
            note(begin, True)
        result = usual(*arguments, **more)
        if end is not None:
            note(end, False)
        return result

    setattr(owner, name, clocked)


def waits(name: str) -> None:
    """Note when a request waits for others or gives way, and when it continues."""
    usual = getattr(offload, name)

    @coroutine
    def clocked(place: str) -> Generator[Any, None, None]:
        note(place, False)
        yield from usual().__await__() if name == "wait_for_others" else usual()
        note(place, True)

    def named() -> Any:
        caller = sys._getframe(1)
        return clocked(f"{caller.f_code.co_name}, line {caller.f_lineno}")

    setattr(offload, name, named)


def answered() -> None:
    """Note when the head of an engine's response lets a request go on."""
    usual = http.ConnectionPool.handle_async_request

    async def clocked(self: http.ConnectionPool, request: Any) -> http.Response:
        response = await usual(self, request)
        note("answer", True)
        return response

    http.ConnectionPool.handle_async_request = clocked  # type: ignore[method-assign]


def serve(port: int, engine: int, file: Path) -> None:
    """Run `latimer serve` with the clock, and write what it has noted at the end."""
    around(Protocol, "data_received", "received", "request read")
    around(requests.Exchange, "__init__", "task begins", None)
    waits("wait_for_others")
    waits("give_way")
    around(Connection, "start", None, "call sent")
    around(Connection, "data_received", "engine's data", "data read")
    answered()
    around(Observers, "ended", None, "end")
    atexit.register(lambda: file.write_text(json.dumps([*zip(TIMES, PLACES, BEGINS, strict=True)])))
    latimer(["serve", f"http://127.0.0.1:{engine}", "--port", str(port)])


def marks_of(kind: str, clients: int, seconds: float) -> list[Mark]:
    """Return what the clock of a server notes while clients send requests."""
    request, port = KINDS[kind]("hello", False, 8), free_port()
    with fake_engine(max(CORES)) as engine, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(port), str(engine), str(file)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {min(CORES)}),
        )
        try:
            wait_for(port)
            asyncio.run(load(port, request, b"}}", clients, WARM_UP + seconds))
        finally:
            process.terminate()
            process.wait(30)
        marks: list[Mark] = json.loads(file.read_text())
    return [one for one in marks if one[0] > marks[-1][0] - seconds]


def table(marks: Sequence[Mark]) -> str:
    """Return the table of the parts."""
    found = [
        (f"{one[1]} → {other[1]}", (other[0] - one[0]) * 1e6)
        for one, other in pairwise(marks)
        if one[2] and not other[2]
    ]
    count = sum(place == "end" for _, place, _ in marks)
    times: dict[str, list[list[float]]] = defaultdict(list)
    for name, group in groupby(found, lambda part: part[0]):
        times[name].append([took for _, took in group])
    lines = [
        "| part | mean | group | " + " | ".join(map(str, NUMBERS)) + " |",
        "|---" + "|--:" * (len(NUMBERS) + 2) + "|",
    ]
    for name in sorted(times, key=_position):
        groups = times[name]
        total = sum(map(len, groups))
        if total < LEAST * count:
            continue
        mean, size = sum(map(sum, groups)) / total, sum(len(one) ** 2 for one in groups) / total
        cells = [f"{mean:.1f}", f"{size:.1f}"]
        for number in NUMBERS:
            at = [one[number - 1] for one in groups if len(one) >= number]
            # No group may be as large.
            cells.append(f"{statistics.median(at):.1f}" if at else "")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n{count:,} requests\n"


def _position(part: str) -> tuple[int, str]:
    """Return the place of a part in a request."""
    return next((at for at, start in enumerate(ORDER) if part.startswith(start)), -1), part


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--kind", choices=KINDS, default="chat")
    options.add_argument("--clients", type=int, default=32)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        port, engine, file = arguments.serve
        serve(int(port), int(engine), Path(file))
        return
    sys.stdout.write(table(marks_of(arguments.kind, arguments.clients, arguments.seconds)))


if __name__ == "__main__":
    main()
