"""Measure what a request with limits costs the Redis or the PostgreSQL that counts it.

    python tests/benchmarks/limits.py [--requests 20000] [--concurrent 64]

Each request reserves and settles tokens of one of 100 keys, as a request to Latimer does. The CPU
time is that of the server's processes, without the client's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parent.parent))

from latimer.adapter.limits.config import AdmissionConfig, store_of
from latimer.adapter.limits.leases import Grant, Lease, Rates
from redis import Redis
from support.postgresql import PostgreSQL, postgresql
from support.redis_server import RedisServer, running

KEYS = 100


def redis_seconds(server: RedisServer) -> float:
    """Return the CPU seconds of a Redis."""
    with Redis.from_url(server.url) as client:
        facts = client.info("cpu")
    assert isinstance(facts, dict)
    return float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])


def _stat(process: int) -> list[int]:
    """Return the numbers of a process, from its parent's id on; empty if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return []
    return [int(word) for word in text.rpartition(")")[2].split()[1:]]


def postgresql_seconds(server: PostgreSQL) -> float:
    """Return the CPU seconds of the processes of a PostgreSQL, and of those that have ended."""
    with psycopg.connect(server.url()) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        main = _stat(row[0])[0]
    processes = [(int(path.name), _stat(int(path.name))) for path in Path("/proc").glob("[0-9]*")]
    ticks = 0
    for process, numbers in processes:
        if numbers and main in (process, numbers[0]):
            # Its own time, and that of the children that have ended.
            ticks += sum(numbers[10:14])
    return ticks / os.sysconf("SC_CLK_TCK")


async def reserve(url: str, requests: int, concurrent: int) -> float:
    """Reserve and settle; return the seconds that it took."""
    store = store_of(AdmissionConfig(store=url))
    await store.open()
    grants = [Grant(f"key-{index}", Rates(10**6, 10**9, 10**4)) for index in range(KEYS)]
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
            lease = await store.reserve(grants[number % KEYS], 100)
            assert isinstance(lease, Lease)
            lease.settle(80)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrent)))
    await store.aclose()
    return time.perf_counter() - start


def measure(name: str, url: str, cpu: Callable[[], float], options: argparse.Namespace) -> None:
    """Print a row of the table."""
    asyncio.run(reserve(url, options.concurrent, options.concurrent))
    before = cpu()
    seconds = asyncio.run(reserve(url, options.requests, options.concurrent))
    micros = (cpu() - before) / options.requests * 1e6
    print(f"| {name} | {micros:.0f} | {options.requests / seconds:,.0f} |", flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--concurrent", type=int, default=64)
    options = parser.parse_args()
    print(
        "| store | CPU µs of the store for a request | requests/s of one process |\n|---|--:|--:|"
    )
    with running() as redis:
        measure("Redis", redis.url, lambda: redis_seconds(redis), options)
    with postgresql() as server, server.database() as url:
        measure("PostgreSQL", url, lambda: postgresql_seconds(server), options)


if __name__ == "__main__":
    main()
