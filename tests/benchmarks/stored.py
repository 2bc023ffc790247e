"""Measure what storing costs a request, and how fast a large store answers.

    python tests/benchmarks/stored.py speed [--turns 7] [--rate 500]
    python tests/benchmarks/stored.py rows [--rows 1000000] [--folder FOLDER]

`speed` runs `latimer serve` in front of a fake llama-server with each kind of store: memory, an
SQLite file, PostgreSQL. It sends chat requests at a constant rate, in turns with `store: true` and
without, and compares the CPU time of the server's process per request, and the median latency. The
time that writes the last objects of a turn belongs to the turn.

`rows` fills a store with completions of four models, with metadata, and reads pages through the
API. A page has 20 completions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.checkouts import CORES, HERE, on_core, served
from benchmarks.fake_engine import fake_engine
from benchmarks.load import http, quantile
from support.postgresql import missing, postgresql

KINDS = ("memory", "sqlite", "postgresql")
CLIENTS, SECONDS, WARM_UP = 16, 4.0, 2.0
# Seconds after a turn in which its last objects are written.
REST = 1.0
MODELS = tuple(f"model-{i}" for i in range(4))
# Objects of one transaction while a store is filled.
BATCH = 1_000


class Paced(asyncio.Protocol):
    """A connection that sends one request at a time, when it is asked to."""

    def __init__(self) -> None:
        self._buffer = b""
        self._sent = 0.0
        self.latencies: list[float] = []
        self.is_free = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def send(self, request: bytes) -> None:
        """Send a request; the response is complete when its length has arrived."""
        self.is_free = False
        self._sent = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) >= length:
            assert b" 200 " in head[:20], self._buffer[:300]
            self.latencies.append(time.perf_counter() - self._sent)
            self._buffer = b""
            self.is_free = True


async def pace(port: int, request: bytes, rate: float, seconds: float) -> list[float]:
    """Send requests at a constant rate; return their latencies in seconds."""
    loop = asyncio.get_running_loop()
    made = [Paced() for _ in range(CLIENTS)]
    for one in made:
        await loop.create_connection(lambda one=one: one, "127.0.0.1", port)  # type: ignore[misc]
    start = loop.time()
    for number in range(int(rate * seconds)):
        await asyncio.sleep(start + number / rate - loop.time())
        while not (free := [one for one in made if one.is_free]):
            await asyncio.sleep(0.0005)
        free[0].send(request)
    while not all(one.is_free for one in made):
        await asyncio.sleep(0.001)
    for one in made:
        one._transport.close()
    return [latency for one in made for latency in one.latencies]


@contextlib.contextmanager
def stores(folder: str) -> Iterator[dict[str, str]]:
    """Yield the setting `store` for each kind of database that this machine has."""
    found = {"memory": "memory", "sqlite": f"{folder}/store.db"}
    if missing() is not None:
        sys.stdout.write(f"PostgreSQL is left out: it {missing()}\n")
        yield found
        return
    with postgresql() as server, server.database() as url:
        yield {**found, "postgresql": url}


def body(stored: bool) -> bytes:
    """Return a chat request of an ordinary size."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant. " * 5},
        {"role": "user", "content": "Tell me about the weather in Paris. " * 5},
    ]
    request: dict[str, Any] = {"model": "fake", "messages": messages, "max_tokens": 8}
    if stored:
        request |= {"store": True, "metadata": {"project": "benchmark", "user": "somebody"}}
    return http("/v1/chat/completions", request)


def turn(process: int, port: int, stored: bool, rate: float) -> tuple[float, float]:
    """Return the CPU time per request in microseconds, and the median latency in ms."""
    before = on_core(process)
    latencies = asyncio.run(pace(port, body(stored), rate, SECONDS))
    time.sleep(REST)
    return (on_core(process) - before) / len(latencies), quantile(latencies, 0.5)


def speed(turns: int, rate: float) -> None:
    """Compare requests that are stored with requests that are not."""
    with (
        fake_engine(max(CORES)) as engine,
        tempfile.TemporaryDirectory() as folder,
        stores(folder) as places,
    ):
        for kind, place in places.items():
            with served(HERE, engine, "--store", place) as (pid, port):
                for stored in (False, True):
                    asyncio.run(pace(port, body(stored), rate, WARM_UP))
                pairs = []
                for _ in range(turns):
                    found = {
                        stored: turn(pid, port, stored, rate)
                        for stored in random.sample((False, True), 2)
                    }
                    pairs.append((found[False], found[True]))
            report(kind, pairs)


def report(kind: str, pairs: list[tuple[tuple[float, float], tuple[float, float]]]) -> None:
    """Print the medians of the turns."""
    for index, unit in ((0, "us of CPU a request"), (1, "ms at p50")):
        without = statistics.median(one[index] for one, _ in pairs)
        stored = statistics.median(two[index] for _, two in pairs)
        more = sorted(two[index] - one[index] for one, two in pairs)
        sys.stdout.write(
            f"{kind:10} {without:8.2f} without, {stored:8.2f} stored: "
            f"{statistics.median(more):+.2f} {unit} ({more[0]:+.2f} to {more[-1]:+.2f})\n"
        )
    sys.stdout.flush()


def rows(count: int, folder: str) -> None:
    """Fill a store of each durable kind, and time pages."""
    with stores(folder) as places:
        for kind in ("sqlite", "postgresql"):
            if kind in places:
                asyncio.run(fill(kind, places[kind], count))
                # The demo model is never used.
                with served(HERE, None, "--store", places[kind]) as (_, port):
                    pages(kind, port)


async def fill(kind: str, place: str, count: int) -> None:
    """Store completions with ids of past moments, and print the size of a row."""
    from latimer.adapter.store.config import store_config_of
    from latimer.adapter.store.store import Store

    where = store_config_of(place)
    assert where is not None
    store = Store(where)
    database = await store.open()
    start, made = time.perf_counter(), completions(count)
    while batch := [*itertools.islice(made, BATCH)]:
        await store.write(batch)
    seconds = time.perf_counter() - start
    await database.vacuum()
    size = await database.read(SIZES[kind])
    await store.aclose()
    sys.stdout.write(
        f"{kind:10} {count} rows in {seconds:.0f} s, {size / count:.0f} bytes a row "
        f"({size / 2**20:.0f} MiB)\n"
    )


SIZES: dict[str, Callable[[Any], int]] = {
    "sqlite": lambda one: one.exec_driver_sql(
        "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    ).scalar(),
    "postgresql": lambda one: one.exec_driver_sql(
        "SELECT pg_total_relation_size('latimer_objects')"
        " + pg_total_relation_size('latimer_metadata')"
    ).scalar(),
}


def completions(count: int) -> Iterator[Any]:
    """Yield records with common and rare pairs of metadata."""
    from latimer.adapter.store.records import Record

    first = time.time_ns() // 1_000 - count * 1_000
    text = "The weather in Paris is mild and often cloudy. " * 6
    for number in range(count):
        created = first + number * 1_000
        name = f"chatcmpl-{created:014x}{random.getrandbits(40):010x}"
        metadata = {
            "half": str(number % 2),
            "other": str(number % 2),
            "third": str(number % 3),
            "thousand": str(number % 1_000),
            "rare": str(number % 10_000),
        }
        model = MODELS[number % 4]
        reply = {
            "id": name, "object": "chat.completion", "created": created // 1_000_000,
            "model": model, "metadata": metadata,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text},
                         "logprobs": None, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 20, "completion_tokens": 60, "total_tokens": 80},
        }  # fmt: skip
        request = {"model": model, "messages": [{"role": "user", "content": text}], "store": True,
                   "metadata": metadata}  # fmt: skip
        yield Record(name, "chat.completion", "", created, model, "req_0", request, reply, metadata)


def pages(kind: str, port: int) -> None:
    """Print the times of pages with several filters: median and worst of ten."""
    base = f"http://127.0.0.1:{port}/v1/chat/completions?limit=20"

    def get(query: str) -> dict[str, Any]:
        with urllib.request.urlopen(base + query) as reply:  # noqa: S310
            found: dict[str, Any] = json.load(reply)
        return found

    middle = get("&metadata[thousand]=7&order=desc")["last_id"]
    for name, query in {
        "first page": "",
        "newest": "&order=desc",
        "one pair of 1 in 2": "&metadata[half]=1",
        "one pair of 1 in 10,000": "&metadata[rare]=7",
        "pairs of 1 in 2 and 1 in 3": "&metadata[half]=1&metadata[third]=2&order=desc",
        "pairs of 1 in 2 and 1 in 10,000": "&metadata[half]=1&metadata[rare]=7",
        "a model": f"&model={MODELS[2]}&order=desc",
        "a model and a pair of 1 in 1,000": f"&model={MODELS[3]}&metadata[thousand]=7",
        "a pair, from the middle": f"&metadata[half]=1&after={middle}",
        "a pair that no object has": "&metadata[rare]=none",
        "pairs of 1 in 2 that never meet": "&metadata[half]=1&metadata[other]=0",
    }.items():
        times = []
        found = 0
        for _ in range(10):
            start = time.perf_counter()
            found = len(get(query)["data"])
            times.append((time.perf_counter() - start) * 1e3)
        sys.stdout.write(
            f"{kind:10} {name:36} {found:3} found, median {statistics.median(times):7.2f} ms, "
            f"worst {max(times):7.2f} ms\n"
        )
    sys.stdout.flush()


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("what", choices=["speed", "rows"])
    options.add_argument("--turns", type=int, default=7)
    options.add_argument("--rate", type=float, default=500.0)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--folder", help="an empty folder for the file of SQLite")
    arguments = options.parse_args()
    if arguments.what == "speed":
        speed(arguments.turns, arguments.rate)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows(arguments.rows, folder)


if __name__ == "__main__":
    main()
