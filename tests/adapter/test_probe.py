"""Tests of the probe of a database that nobody uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from latimer.adapter import probe as probes
from latimer.adapter.probe import Probe


class Database:
    """A database that answers at once, fails, or is silent until its gate opens."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.heard: list[Exception | None] = []
        self.probe = Probe(self.ask, self.heard.append)

    async def ask(self) -> None:
        """Answer a question."""
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error


@pytest.fixture
async def database(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    """Yield a database whose probe asks often."""
    monkeypatch.setattr(probes, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(probes, "LOST_SECONDS", 0.02)
    monkeypatch.setattr(probes, "PROBE_SECONDS", 0.04)
    made = Database()
    yield made
    made.probe.cancel()


async def test_an_idle_database_is_asked(database: Database) -> None:
    """A database that nobody uses is asked again and again, and each answer is reported."""
    database.probe.start()
    async with asyncio.timeout(5):
        while len(database.heard) < 2:
            await asyncio.sleep(0.01)
        assert database.asked == len(database.heard)
        for error in (OSError("gone"), None):
            database.error = error
            while database.heard[-1] is not error:
                await asyncio.sleep(0.01)


async def test_a_database_in_use_is_not_asked(database: Database) -> None:
    """A database that others use successfully gets no question."""
    database.probe.start()
    for _ in range(20):
        database.probe.used_at = time.monotonic()
        await asyncio.sleep(0.02)
    assert database.asked == 0


async def test_a_silent_database_has_one_question(database: Database) -> None:
    """A database that does not answer is reported after a time limit, and is not asked again."""
    database.probe.start()
    database.gate.clear()
    await asyncio.sleep(0.3)
    assert database.asked == 1
    assert [type(one) for one in database.heard] == [TimeoutError]
    waiting = asyncio.create_task(database.probe.now())
    await asyncio.sleep(0)
    assert database.asked == 1
    database.gate.set()
    assert await waiting is None
    await asyncio.sleep(0)
    assert database.heard[-1] is None


async def test_a_database_that_answers_others_is_not_late(database: Database) -> None:
    """A question that waits behind the work of others does not fail while these succeed."""
    database.probe.start()
    database.gate.clear()
    for _ in range(20):
        await asyncio.sleep(0.02)
        if database.asked:
            database.probe.used_at = time.monotonic()
    assert database.asked == 1
    assert database.heard == []


async def test_a_cancelled_probe_asks_nothing(database: Database) -> None:
    """After its end a probe asks nothing, and a caller who waits gets an error."""
    database.probe.start()
    database.gate.clear()
    waiting = asyncio.create_task(database.probe.now())
    await asyncio.sleep(0.02)
    database.probe.cancel()
    assert isinstance(await waiting, TimeoutError)
    await asyncio.sleep(0.3)
    assert database.asked == 1
