"""Compare the CPU time of a request with that of another checkout.

    git worktree add ../before COMMIT
    python tests/benchmarks/cpu.py --before ../before [--turns 10] [--fleet N] [--unseen]

A turn starts `latimer serve` of both checkouts in front of one fake llama-server. It sends both of
them blocks of requests of one kind in random order, one request after the other, so that other work
on the machine affects both. The time is the time on a core of all threads of a process. The result
of a turn is the median of its blocks.

With `--fleet`, this checkout serves a model of N engines, with a key that has limits. The other one
has one engine and no keys. With `--unseen`, this checkout has neither metrics nor the log of
requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES, HERE, on_core, served
from benchmarks.fake_engine import fake_engine
from benchmarks.load import Client, chat, completion
from latimer.adapter.limits.config import digest_of

WARM_UP = 400
# The number of blocks per checkout, and of requests per block.
BLOCKS, REQUESTS = 12, 400
KEY = "unused"
UNSEEN = ("--no-metrics", "--no-log-requests")


def with_key(request: bytes) -> bytes:
    """Return a request with the key."""
    line = f"\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    return request.replace(b"\r\n\r\n", line, 1)


# The kinds of requests, each with the end of its responses.
KINDS = {
    "plain": (with_key(chat("Hello", False, 8)), b"}}"),
    "streamed": (with_key(chat("Hello", True, 8)), b"0\r\n\r\n"),
    "completion": (with_key(completion("Hello", False, 8)), b"}}"),
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


def fleet_file(folder: Path, engines: Sequence[int]) -> Path:
    """Write the settings of a fleet, and return their file."""
    names = [f"e{port}" for port in engines]
    tables: dict[str, dict[str, Any]] = {
        f"engines.e{port}": {"url": f"http://127.0.0.1:{port}"} for port in engines
    }
    limits = {"requests_per_minute": 10**8, "tokens_per_minute": 10**10, "concurrent": 1000}
    tables["models.fake"] = {"engines": names}
    tables["keys.team"] = {"digest": digest_of(KEY), **limits}
    lines: list[str] = []
    for table, fields in tables.items():
        lines.append(f"[{table}]")
        lines += (f"{name} = {json.dumps(value)}" for name, value in fields.items())
    file = folder / "fleet.toml"
    file.write_text("\n".join(lines))
    return file


def turn(
    trees: Mapping[str, Path], engine: int, kind: str, fleet: Path | None, flags: Sequence[str]
) -> dict[str, float]:
    """Return the microseconds per request of a kind, by checkout; `flags` are this checkout's."""
    request, end = KINDS[kind]
    found: dict[str, list[float]] = {name: [] for name in trees}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                served(tree, engine)
                if tree != HERE
                else served(tree, engine, *flags)
                if fleet is None
                else served(tree, None, "--config", str(fleet), *flags)
            )
            for name, tree in trees.items()
        }
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
    options.add_argument("--fleet", type=int, help="the number of this checkout's engines")
    options.add_argument("--unseen", action="store_true", help="no metrics and no log")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    arguments = options.parse_args()
    flags = UNSEEN if arguments.unseen else ()
    trees = {"before": arguments.before, "now": HERE}
    for kind in arguments.kinds:
        with contextlib.ExitStack() as stack:
            engines = [
                stack.enter_context(fake_engine(max(CORES))) for _ in range(arguments.fleet or 1)
            ]
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fleet = fleet_file(folder, engines) if arguments.fleet else None
            turns = [turn(trees, engines[0], kind, fleet, flags) for _ in range(arguments.turns)]
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
