"""Measure what one worker and several workers of `latimer serve` carry.

    python tests/benchmarks/workers.py [--workers 1 2] [--turns 5] [--seconds 5]

The load is `wrk` (Debian's package), with plain chat requests of 8 tokens over kept connections.
The engine is the fake llama-server. Both need cores too, so with as many workers as cores the
requests per second do not grow by the number of workers. The table therefore also has what the
processes cost: the requests of a second of CPU time of the workers, and the CPU time of everything
else on the machine meanwhile. Turns alternate between the numbers of workers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.servers import begun
from support.workers import double, workers

CONNECTIONS = 32
_TICK = os.sysconf("SC_CLK_TCK")
_SCRIPT = """
wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.body = '{"model":"fake","messages":[{"role":"user","content":"Hello"}],"max_tokens":8}'
"""


@dataclass
class Turn:
    """The figures of one turn.

    Attributes:
        rate: requests per second.
        own: CPU seconds of the workers per second, and of their parent.
        others: CPU seconds per second of everything else on the machine.
    """

    rate: float
    own: float
    parent: float
    others: float


def busy() -> float:
    """Return the CPU seconds that the machine has worked."""
    user, nice, system, _idle, _wait, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / _TICK


def cpu(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def load(address: str, script: Path, seconds: float) -> float:
    """Return the requests per second that were answered; all of them must be."""
    url = f"{address}/v1/chat/completions"
    command = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds:g}", "-s", str(script), url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "Non-2xx" not in text, text
    assert "Socket errors" not in text, text
    found = re.search(r"Requests/sec: +([\d.]+)", text)
    assert found is not None, text
    return float(found[1])


def measured(
    address: str, pids: Sequence[int], parent: int | None, script: Path, seconds: float
) -> Turn:
    """Load a server, after a short warm-up."""
    load(address, script, 1)
    start, before, own = time.monotonic(), busy(), sum(map(cpu, pids))
    first = cpu(parent) if parent is not None else 0.0
    rate = load(address, script, seconds)
    passed = time.monotonic() - start
    used = (sum(map(cpu, pids)) - own) / passed
    of_parent = (cpu(parent) - first) / passed if parent is not None else 0.0
    return Turn(rate, used, of_parent, (busy() - before) / passed - used - of_parent)


def turn(engine: str, count: int, script: Path, seconds: float) -> Turn:
    """Measure a new server with a number of workers."""
    if count == 1:
        with begun(engine) as (process, address, _):
            return measured(address, [process.pid], None, script, seconds)
    with workers(engine, count=count) as server:
        return measured(server.address, server.pids, server.process.pid, script, seconds)


def main() -> None:
    """Print the medians of turns."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5)
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing: apt-get install wrk")
    found: dict[int, list[Turn]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, double() as engine:
        script = Path(folder) / "chat.lua"
        script.write_text(_SCRIPT)
        for _ in range(args.turns):
            for count in args.workers:
                one = turn(engine, count, script, args.seconds)
                found[count].append(one)
                print(count, one, flush=True)
    print("| workers | requests/s | cores: workers | parent | everything else | requests/CPU s |")
    print("|--:|--:|--:|--:|--:|--:|")
    for count, turns in found.items():
        rate, own, parent, others = (
            statistics.median(getattr(one, name) for one in turns)
            for name in ("rate", "own", "parent", "others")
        )
        each = statistics.median(one.rate / one.own for one in turns)
        row = f"{rate:,.0f} | {own:.2f} | {parent:.2f} | {others:.2f} | {each:,.0f}"
        print(f"| {count} | {row} |")


if __name__ == "__main__":
    main()
