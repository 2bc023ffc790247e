"""Compare the CPU time of a request with that of another checkout.

    git worktree add ../before COMMIT
    python tests/benchmarks/cpu.py --before ../before [--turns 10] [--clients N] [--fleet N]
        [--unseen]
    python tests/benchmarks/cpu.py --observed [--turns 10]
    python tests/benchmarks/cpu.py --apis [--turns 10 | --quantiles]

A turn starts `latimer serve` of both checkouts in front of one fake llama-server. It sends both of
them blocks of requests of one kind in random order, one request after the other, so that other work
on the machine affects both. The time is the time on a core of all threads of a process. The result
of a turn is the median of its blocks.

With `--clients`, several clients send requests at the same time, and blocks are larger.

With `--fleet`, this checkout serves a model of N engines, with a key that has limits. The other one
has one engine and no keys. With `--unseen`, this checkout has neither metrics nor the log of
requests.

With `--observed`, this checkout without these two is compared with itself with them. Both are
servers in one process, since the ratios of two processes differ by a tenth from turn to turn. Small
blocks alternate, of as many requests as observers get together, and each turn is a new process.

`--apis` compares the APIs of this checkout instead: messages and responses with chat, and responses
over a WebSocket with those by POST. The blocks of all of them alternate on one server. The time of
a token is the difference of a long and a short stream. With `--quantiles`, there are many small
blocks, and the ratios are the median and the range of those of five quantiles.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES, HERE, on_core, package_of, served
from benchmarks.fake_engine import fake_engine, free_port, wait_for
from benchmarks.load import LAST_FRAMES, Client, chat, completion, http
from benchmarks.peers import UNSEEN
from latimer.adapter.cli.serve import run, serve
from latimer.adapter.limits.config import digest_of
from latimer.adapter.observers import MOST_UNSEEN, OBSERVED_AFTER
from latimer.adapter.settings import Settings

WARM_UP = 400
# The number of blocks per checkout, and of requests per block.
BLOCKS, REQUESTS = 12, 400
# How many times as many they are with several clients.
LARGER = 8
# The same with `--quantiles`, and which quantiles of the blocks: other work disturbs the small ones
# less.
SMALL_BLOCKS, SMALL_REQUESTS, SHARES = 160, 60, (0.0, 0.05, 0.1, 0.25, 0.5)
KEY = "unused"


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
        self._most = count


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Framed(Counted):
    """The same over a WebSocket; a response ends with its last event, which has no other after it.

    It looks at no more bytes than the client of a POST does. A slow client would let the server
    sleep, and cost it time at each end of that.
    """

    _opened = False
    _is_last = False

    def _send(self) -> None:
        if not self._opened:
            self._transport.write(HANDSHAKE)
            return
        size = len(self._request)
        # A mask of zeros leaves the text as it is.
        self._transport.write(b"\x81\xfe" + size.to_bytes(2) + bytes(4) + self._request)

    def data_received(self, data: bytes) -> None:
        """Receive frames, and send the request again after the last one of a response."""
        if not self._opened:
            assert data.startswith(b"HTTP/1.1 101"), data
            self._opened = True
            self._send()
            return
        seen = self._tail + data
        self._tail = seen[-64:]
        assert b'{"type":"error"' not in seen, seen
        self._is_last = self._is_last or any(one in seen for one in LAST_FRAMES)
        if self._is_last and seen.endswith(self._end):
            self._is_last = False
            super().data_received(self._end)


async def send(
    port: int, request: bytes, end: bytes, count: int, kind: type[Counted] = Counted
) -> None:
    """Send requests on one connection."""
    client = kind(request, end, count)
    await asyncio.get_running_loop().create_connection(lambda: client, "127.0.0.1", port)
    await client.done


async def send_together(port: int, request: bytes, end: bytes, count: int, clients: int) -> None:
    """Send requests on several connections, on each a number of them."""
    await asyncio.gather(*(send(port, request, end, count) for _ in range(clients)))


def message(stream: bool, tokens: int) -> bytes:
    """Return a request for a message."""
    asked = [{"role": "user", "content": "Hello"}]
    body = {"model": "fake", "messages": asked, "max_tokens": tokens, "stream": stream}
    return http("/v1/messages", body)


def response(tokens: int) -> dict[str, Any]:
    """Return the body of a request for a response."""
    return {"model": "fake", "input": "Hello", "max_output_tokens": tokens, "store": False}


class Api(NamedTuple):
    """A way to ask for an answer.

    Args:
        make: returns the request for an answer of some tokens.
        end: the end of the answer.
        of: the way to compare it with.
        is_stream: True if the time of a token is measured, too.
    """

    make: Callable[[int], bytes]
    end: bytes = b"0\r\n\r\n"
    kind: type[Counted] = Counted
    of: str = ""
    is_stream: bool = True


APIS = {
    "chat": Api(lambda tokens: chat("Hello", False, tokens), b"}}", is_stream=False),
    "messages": Api(lambda tokens: message(False, tokens), b"}}", of="chat", is_stream=False),
    "streamed chat": Api(lambda tokens: chat("Hello", True, tokens)),
    "streamed messages": Api(lambda tokens: message(True, tokens), of="streamed chat"),
    "streamed response": Api(
        lambda tokens: http("/v1/responses", {**response(tokens), "stream": True}),
        of="streamed chat",
    ),
    "response over a WebSocket": Api(
        lambda tokens: json.dumps({"type": "response.create", **response(tokens)}).encode(),
        end=b"}}",
        kind=Framed,
        of="streamed response",
    ),
}
# The tokens of a request, and those of the long stream.
SHORT, LONG = 8, 136


def apis(blocks: int, requests: int, shares: Sequence[float]) -> list[dict[str, float]]:
    """Return the microseconds of a request and of a token, by the name of the API.

    Args:
        blocks: how often each API has its turn, and `requests` how many requests it gets then.
        shares: the quantiles of the blocks to return, such as 0.5 for the median.
    """
    sizes = [(name, SHORT) for name in APIS]
    sizes += [(name, LONG) for name, api in APIS.items() if api.is_stream]
    found: dict[tuple[str, int], list[float]] = {one: [] for one in sizes}
    with fake_engine(max(CORES)) as engine, served(HERE, engine) as (process, port):
        for block in range(blocks + 1):
            for name, tokens in random.sample(sizes, len(sizes)):
                api = APIS[name]
                before = on_core(process)
                asyncio.run(send(port, api.make(tokens), api.end, requests, api.kind))
                # The first requests fill caches.
                if block:
                    found[name, tokens].append((on_core(process) - before) / requests)
    results = []
    for share in shares:
        times = {one: sorted(times)[int(share * blocks)] for one, times in found.items()}
        results.append(
            {name: times[name, SHORT] for name in APIS}
            | {
                f"{name}, token": (times[name, LONG] - times[name, SHORT]) / (LONG - SHORT)
                for name, api in APIS.items()
                if api.is_stream
            }
        )
    return results


def print_apis(turns: int, quantiles: bool) -> None:
    """Compare APIs in turns, or in many small blocks, and print a table."""
    if quantiles:
        found = apis(SMALL_BLOCKS, SMALL_REQUESTS, SHARES)
    else:
        found = [one for _ in range(turns) for one in apis(BLOCKS, REQUESTS, [0.5])]
    for name in found[0]:
        api = name.removesuffix(", token")
        line = f"{name:34} {statistics.median([one[name] for one in found]):7.1f} us"
        if of := APIS[api].of:
            ratios = sorted(one[name] / one[of + name.removeprefix(api)] for one in found)
            middle = statistics.median(ratios)
            line += f"; {middle:.2f} times that of {of} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        sys.stdout.write(f"{line}\n")


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


class Side(NamedTuple):
    """A server to compare: its checkout, and more words of its command."""

    tree: Path
    words: Sequence[str] = ()


def turn(
    sides: Mapping[str, Side], engine: int, kind: str, fleet: Path | None, clients: int
) -> dict[str, float]:
    """Return the microseconds per request of a kind, by the names of the sides.

    Args:
        clients: how many send requests at the same time.
        fleet: the settings of this checkout's servers; None for one engine.
    """
    request, end = KINDS[kind]
    each = REQUESTS if clients == 1 else LARGER * REQUESTS // clients
    found: dict[str, list[float]] = {name: [] for name in sides}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                served(tree, engine, *words)
                if fleet is None or tree != HERE
                else served(tree, None, "--config", str(fleet), *words)
            )
            for name, (tree, words) in sides.items()
        }
        for _, port in servers.values():
            asyncio.run(send(port, request, end, WARM_UP))
        for _ in range(BLOCKS):
            for name in random.sample(sorted(servers), len(servers)):
                process, port = servers[name]
                before = on_core(process)
                asyncio.run(send_together(port, request, end, each, clients))
                found[name].append((on_core(process) - before) / (each * clients))
    return {name: statistics.median(times) for name, times in found.items()}


async def serve_both(engine: int, ports: Sequence[int]) -> None:
    """Serve an engine at two ports in this process: without metrics and log, and with both."""
    place = {"model": f"http://127.0.0.1:{engine}", "model_name": ["fake"]}
    unseen, seen = (Settings(**place, port=port) for port in ports)
    unseen = unseen.model_copy(update={"metrics": False, "log_requests": False})
    await asyncio.gather(serve(unseen), serve(seen))


@contextlib.contextmanager
def served_both(engine: int) -> Iterator[tuple[int, list[int]]]:
    """Run `serve_both` in a process; yield its id and the ports."""
    ports = [free_port(), free_port()]
    with package_of(HERE) as environment:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(engine), *map(str, ports)],
            env=environment,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: os.sched_setaffinity(0, {min(CORES)}),
        )
        try:
            for port in ports:
                wait_for(port)
            yield process.pid, ports
        finally:
            process.terminate()
            process.wait(30)


def observed(kind: str) -> list[float]:
    """Return how many times the CPU time grows with metrics and log, for quantiles of blocks."""
    request, end = KINDS[kind]
    with fake_engine(max(CORES)) as engine, served_both(engine) as (process, ports):
        for port in ports:
            asyncio.run(send(port, request, end, WARM_UP))
        # From here on the observers get all requests of a block at its end, and no others.
        time.sleep(2 * OBSERVED_AFTER)
        found: dict[int, list[float]] = {port: [] for port in ports}
        for _ in range(SMALL_BLOCKS):
            for port in random.sample(ports, len(ports)):
                before, begun = on_core(process), time.perf_counter()
                asyncio.run(send(port, request, end, MOST_UNSEEN))
                is_whole = time.perf_counter() - begun < OBSERVED_AFTER
                # The observers may still work, and the log is written in a thread.
                time.sleep(0.01)
                if is_whole:
                    found[port].append(on_core(process) - before)
                else:
                    # Other work was so much that a timer has divided the block.
                    time.sleep(2 * OBSERVED_AFTER)
    if not all(found.values()):
        sys.exit("Other work has divided every block. Measure again on a quieter machine.")
    unseen, seen = (sorted(found[port]) for port in ports)
    return [seen[int(share * len(seen))] / unseen[int(share * len(unseen))] for share in SHARES]


def print_observed(kinds: Sequence[str], turns: int) -> None:
    """Compare metrics and log with neither, and print a line for each kind of request."""
    for kind in kinds:
        ratios = sorted(statistics.median(observed(kind)) for _ in range(turns))
        sys.stdout.write(
            f"{kind:10} {statistics.median(ratios):.3f} times with metrics and log "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f} in {turns} turns)\n"
        )
        sys.stdout.flush()


def main() -> None:
    """Measure and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--before", type=Path, help="another checkout")
    options.add_argument(
        "--observed", action="store_true", help="compare metrics and log with neither"
    )
    options.add_argument("--apis", action="store_true", help="compare APIs instead of checkouts")
    options.add_argument(
        "--quantiles", action="store_true", help="compare APIs in many small blocks"
    )
    options.add_argument("--turns", type=int, default=10)
    options.add_argument("--clients", type=int, default=1, help="how many send at the same time")
    options.add_argument("--fleet", type=int, help="the number of this checkout's engines")
    options.add_argument("--unseen", action="store_true", help="no metrics and no log")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    options.add_argument("--serve", type=int, nargs=3, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        engine, *ports = arguments.serve
        run(serve_both(engine, ports))
        return
    if arguments.observed:
        print_observed(arguments.kinds, arguments.turns)
        return
    if arguments.apis:
        print_apis(arguments.turns, arguments.quantiles)
        return
    if arguments.before is not None:
        own = Side(HERE, UNSEEN if arguments.unseen else ())
        sides = {"before": Side(arguments.before), "now": own}
    else:
        options.error("--before, --observed or --apis is needed")
    for kind in arguments.kinds:
        with contextlib.ExitStack() as stack:
            engines = [
                stack.enter_context(fake_engine(max(CORES))) for _ in range(arguments.fleet or 1)
            ]
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            fleet = fleet_file(folder, engines) if arguments.fleet else None
            clients = arguments.clients
            turns = [turn(sides, engines[0], kind, fleet, clients) for _ in range(arguments.turns)]
        for name in sides:
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
