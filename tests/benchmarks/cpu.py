"""Compare the CPU time of a request with that of another checkout.

    git worktree add ../before COMMIT
    python tests/benchmarks/cpu.py --before ../before [--turns 10]

A turn starts `latimer serve` of both checkouts in front of one fake llama-server. It sends both of
them blocks of requests of one kind in random order, one request after the other, so that other work
on the machine affects both. The time is the time on a core of all threads of a process. The result
of a turn is the median of its blocks.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES, HERE, on_core, served
from benchmarks.fake_engine import fake_engine
from benchmarks.load import Client, chat, completion

WARM_UP = 400
# The number of blocks per checkout, and of requests per block.
BLOCKS, REQUESTS = 12, 400
# The kinds of requests, each with the end of its responses.
KINDS = {
    "plain": (chat("Hello", False, 8), b"}}"),
    "streamed": (chat("Hello", True, 8), b"0\r\n\r\n"),
    "completion": (completion("Hello", False, 8), b"}}"),
}


class Counted(Client):
    """A client that sends a number of requests, one after the other."""

    def __init__(self, request: bytes, end: bytes, count: int) -> None:
        super().__init__(request, end, 1e9)
        self._left = count

    def data_received(self, data: bytes) -> None:
        """Receive a response, and finish after the last one."""
        super().data_received(data)
        if len(self.latencies) >= self._left and not self.done.done():
            self._transport.abort()
            self.done.set_result(None)


async def send(port: int, request: bytes, end: bytes, count: int) -> None:
    """Send requests on one connection."""
    client = Counted(request, end, count)
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
    await client.done


def turn(trees: Mapping[str, Path], engine: int, kind: str) -> dict[str, float]:
    """Return the microseconds per request of a kind, by checkout."""
    request, end = KINDS[kind]
    found: dict[str, list[float]] = {name: [] for name in trees}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(served(tree, engine)) for name, tree in trees.items()}
        for _, port in servers.values():
            asyncio.run(send(port, request, end, WARM_UP))
        for _ in range(BLOCKS):
            for name in random.sample(sorted(servers), len(servers)):
                process, port = servers[name]
                before = on_core(process)
                asyncio.run(send(port, request, end, REQUESTS))
                found[name].append((on_core(process) - before) / REQUESTS)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    """Measure and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--before", type=Path, required=True, help="another checkout")
    options.add_argument("--turns", type=int, default=10)
    arguments = options.parse_args()
    trees = {"before": arguments.before, "now": HERE}
    for kind in KINDS:
        with fake_engine(max(CORES)) as engine:
            turns = [turn(trees, engine, kind) for _ in range(arguments.turns)]
        for name in trees:
            times = sorted(one[name] for one in turns)
            middle = statistics.median(times)
            sys.stdout.write(
                f"{kind:10} {name:7} min {times[0]:7.1f} median {middle:7.1f} "
                f"max {times[-1]:7.1f} us\n"
            )
        ratios = sorted(one["now"] / one["before"] for one in turns)
        least = min(one["now"] for one in turns) / min(one["before"] for one in turns)
        sys.stdout.write(
            f"{kind:10} now/before: of the minima {least:.3f}; turn by turn {ratios[0]:.3f} to "
            f"{ratios[-1]:.3f}, median {statistics.median(ratios):.3f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
