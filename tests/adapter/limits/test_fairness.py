"""Tests that a key that asks for much delays no other key."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry
from latimer.backends import offload
from latimer.backends.base import Batch, Generation
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from support.clients import client_of
from support.clocks import hurried, now
from support.engines.echo import Echo

BODY = {"model": "demo", "prompt": "Hi", "max_tokens": 8}
KEYS = {name: {"digest": digest_of(f"sk-{name}")} for name in ("greedy", "polite")}
PLACES = 4


class Timed(Echo):
    """An engine whose calls take from 40 to 80 ms, in an order that is always the same."""

    def __init__(self) -> None:
        super().__init__("a word.")
        self.facts = replace(self.facts, places=PLACES)
        self._draw = random.Random(3)

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job."""
        await asyncio.sleep(self._draw.uniform(0.04, 0.08))
        async with super().open(job) as batches:
            yield batches


async def ask(client: httpx2.AsyncClient, key: str) -> float:
    """Send a request, and return the seconds until its response."""
    began = now()
    headers = {"authorization": f"Bearer sk-{key}"}
    reply = await client.post("/v1/completions", json=BODY, headers=headers)
    assert reply.status_code == 200
    return now() - began


def p99(times: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return sorted(times)[int(len(times) * 0.99)]


@asynccontextmanager
async def served() -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a model with one engine of four places."""
    replica = Replica("a", Timed())
    pool = Pool("demo", [replica], 1_024, "prefix")
    await pool.ask(replica)
    app = OpenAIAdapter([ModelEntry(pool, ("demo",))], keys=KEYS)
    # An import in a thread would change the order of the first requests.
    app.load()
    async with client_of(app) as client:
        yield client
    await app.aclose()


@pytest.mark.timed
@hurried
async def test_a_greedy_key_delays_no_other() -> None:
    """With 200 requests of another key waiting, a key waits at most twice as long as alone."""
    async with served() as client:
        alone = [await ask(client, "polite") for _ in range(100)]
        # Each answer makes room for another request, so that 200 are always there.
        is_over = asyncio.Event()

        async def greedy() -> int:
            count = 0
            while not is_over.is_set():
                await ask(client, "greedy")
                count += 1
            return count

        crowd = [asyncio.create_task(greedy()) for _ in range(200)]
        await asyncio.sleep(0.5)
        among = [await ask(client, "polite") for _ in range(100)]
        is_over.set()
        done = sum(await asyncio.gather(*crowd))
        assert p99(among) <= 2 * p99(alone)
        # The places that the polite key leaves are not idle.
        assert done > 100


@hurried
async def test_a_heavier_key_gets_more() -> None:
    """Of two keys that ask for all they can get, one with twice the weight gets twice as much."""
    keys = {name: {**key, "weight": 2 if name == "greedy" else 1} for name, key in KEYS.items()}
    replica = Replica("a", Timed())
    pool = Pool("demo", [replica], 1_024, "prefix")
    await pool.ask(replica)
    app = OpenAIAdapter([ModelEntry(pool, ("demo",))], keys=keys)
    finished: list[str] = []

    async def one(client: httpx2.AsyncClient, key: str) -> None:
        await ask(client, key)
        finished.append(key)

    # An import in a thread would change the order of the first requests.
    app.load()
    async with client_of(app) as client:
        await asyncio.gather(*(one(client, key) for _ in range(60) for key in KEYS))
    await app.aclose()
    while finished[-1] == "polite":
        finished.pop()
    # Until the heavier key has nothing more to ask for, both compete.
    assert 22 <= finished.count("polite") <= 40


class Owned(Echo):
    """An engine that notes whose work it would leave to a thread."""

    def __init__(self) -> None:
        super().__init__("a word.")
        self.owners: list[str] = []

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job."""
        self.owners.append(offload.OWNER.get())
        async with super().open(job) as batches:
            yield batches


async def test_work_in_threads_has_the_owner_of_the_key() -> None:
    """The work of a request belongs to its key, so that keys take turns in threads."""
    engine = Owned()
    app = OpenAIAdapter(engine, keys=KEYS)
    async with client_of(app) as client:
        for key in ("greedy", "polite", "greedy"):
            await ask(client, key)
    await app.aclose()
    first, second, third = engine.owners
    assert first == third
    assert "" not in (first, second)
    assert first != second
