"""Measure the slowest answers of a server that has more clients than it can serve at once.

    git worktree add ../before COMMIT
    python tests/benchmarks/tails.py [--before ../before] [--turns 3] [--seconds 4]

Clients connect at once, and each sends its next request when it has an answer. `latimer serve` has
a core to itself, which is always busy. The fake llama-server and the clients share the other one.
A latency is that of the client, from the request to the last byte. A client that has fewer answers
than others is passed over. Turns alternate between the checkouts. All figures are medians of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections import defaultdict
from dataclasses import astuple, dataclass
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES, HERE, served
from benchmarks.fake_engine import fake_engine
from benchmarks.load import Client, chat, quantile

CONNECTIONS = (32, 128, 512)
# The requests, each with the end of its answer.
KINDS = {
    "plain": (chat("Hello", False, 64), b"}}"),
    "streamed": (chat("Hello", True, 64), b"0\r\n\r\n"),
}


@dataclass(frozen=True, slots=True)
class Tails:
    """The latencies and the answers of a number of clients.

    Args:
        rate: the answers in a second.
        middle, late, slowest: the median, the 99th percentile and the largest latency, in ms.
        fewest, most: the answers of the clients that have the fewest and the most of them.
    """

    rate: float
    middle: float
    late: float
    slowest: float
    fewest: float
    most: float


async def tails(port: int, request: bytes, end: bytes, count: int, seconds: float) -> Tails:
    """Load a server with a number of clients that connect at once."""
    loop = asyncio.get_running_loop()
    clients = [Client(request, end, seconds) for _ in range(count)]
    await asyncio.gather(
        *(
            loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
            for client in clients
        )
    )
    await asyncio.gather(*(client.done for client in clients))
    found = [latency for client in clients for latency in client.latencies]
    answers = [len(client.latencies) for client in clients]
    middle, late, slowest = (quantile(found, share) for share in (0.5, 0.99, 1))
    return Tails(len(found) / seconds, middle, late, slowest, min(answers), max(answers))


def measure(
    trees: dict[str, Path], turns: int, seconds: float
) -> dict[tuple[str, int, str], list[Tails]]:
    """Return the results of turns, by the kind of the request, the clients and the checkout."""
    found: dict[tuple[str, int, str], list[Tails]] = defaultdict(list)
    with fake_engine(max(CORES)) as engine:
        for _ in range(turns):
            for name, tree in trees.items():
                with served(tree, engine) as (_process, port):
                    for kind, (request, end) in KINDS.items():
                        # The first requests fill caches.
                        uvloop.run(tails(port, request, end, 8, 0.5))
                        for count in CONNECTIONS:
                            one = uvloop.run(tails(port, request, end, count, seconds))
                            found[kind, count, name].append(one)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4)
    args = parser.parse_args()
    trees = {"": HERE} if args.before is None else {"before": args.before, "after": HERE}
    print("| request | clients | | requests/s | p50 | p99 | slowest | fewest | most |")
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|")
    for (kind, count, name), turns in sorted(
        measure(trees, args.turns, args.seconds).items(), key=lambda one: one[0][:2]
    ):
        row = (statistics.median(values) for values in zip(*map(astuple, turns), strict=True))
        rate, middle, late, slowest, fewest, most = row
        print(
            f"| {kind} | {count} | {name} | {rate:,.0f} | {middle:.0f} ms | {late:.0f} ms |"
            f" {slowest:.0f} ms | {fewest:.0f} | {most:.0f} |"
        )


if __name__ == "__main__":
    main()
