"""CPU time that the process spends on a plain request: this checkout against another.

    git worktree add ../before COMMIT
    python tests/benchmarks/cpu.py --before ../before [--turns 10] [--requests 3000]

Both run in alternating turns in front of one fake llama-server. A turn starts `latimer serve`,
sends plain chat requests one after the other, and reads the time that all threads of the process
were on a core. The smallest of the turns counts; the others say how much the machine disturbs.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.proxy import Client, free_port, run_engine, translated, wait_for

HERE = Path(__file__).parent.parent.parent
FOLDERS = {"adapter": "adapter", "backends": "backends", "schemas": "schemas"}
WARM_UP = 300
# Latimer has one to itself; the client and the engine share the other.
CORES = os.sched_getaffinity(0)


class Counted(Client):
    """Sends a number of requests, one after the other."""

    def __init__(self, request: bytes, end: bytes, count: int) -> None:
        super().__init__(request, end, 1e9)
        self._left = count

    def data_received(self, data: bytes) -> None:
        """Take a reply; the last one ends it."""
        super().data_received(data)
        if len(self.latencies) >= self._left and not self.done.done():
            self._transport.abort()
            self.done.set_result(None)


async def send(port: int, request: bytes, end: bytes, count: int) -> None:
    """Send requests on one connection."""
    client = Counted(request, end, count)
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
    await client.done


def on_core(pid: int) -> float:
    """Microseconds that the threads of a process have been on a core."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e3


def turn(tree: Path, engine: int, requests: int) -> tuple[float, float]:
    """Microseconds for each plain request, and for each streamed one."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "latimer"
        package.mkdir()
        for name, source in FOLDERS.items():
            (package / name).symlink_to((tree / source).resolve())
        port = free_port()
        arguments = [f"http://127.0.0.1:{engine}", "--port", str(port), "--model-name", "fake"]
        process = subprocess.Popen(
            ["latimer", "serve", *arguments],
            env={**os.environ, "PYTHONPATH": folder, "LATIMER_PORT": str(port)},
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {min(CORES)}),
        )
        try:
            wait_for(port)
            found = []
            for stream, end in ((False, b"}}"), (True, b"0\r\n\r\n")):
                request = translated("Hello", stream, 8)
                asyncio.run(send(port, request, end, WARM_UP))
                before = on_core(process.pid)
                asyncio.run(send(port, request, end, requests))
                found.append((on_core(process.pid) - before) / requests)
            return found[0], found[1]
        finally:
            process.terminate()
            process.wait(20)


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--before", type=Path, required=True, help="another checkout")
    options.add_argument("--turns", type=int, default=10)
    options.add_argument("--requests", type=int, default=3000)
    arguments = options.parse_args()
    engine = free_port()
    core = max(CORES)
    os.sched_setaffinity(0, {core})
    process = multiprocessing.Process(target=run_engine, args=(engine, core), daemon=True)
    process.start()
    wait_for(engine)
    trees = {"before": arguments.before, "now": HERE}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trees}
    for number in range(arguments.turns):
        for name in sorted(trees, reverse=bool(number % 2)):
            times[name].append(turn(trees[name], engine, arguments.requests))
            shown = " ".join(f"{one:7.1f}" for one in times[name][-1])
            sys.stdout.write(f"turn {number + 1:2} {name:7} {shown} us\n")
            sys.stdout.flush()
    process.terminate()
    for place, kind in enumerate(("plain", "streamed")):
        least = {}
        for name in trees:
            values = sorted(one[place] for one in times[name])
            least[name] = values[0]
            sys.stdout.write(
                f"{kind:8} {name:7} min {values[0]:7.1f} median {statistics.median(values):7.1f} "
                f"max {values[-1]:7.1f} us\n"
            )
        sys.stdout.write(f"{kind:8} now/before {least['now'] / least['before']:.3f}\n")


if __name__ == "__main__":
    main()
