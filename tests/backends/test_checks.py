"""Tests of checks that concurrent callers share."""

from __future__ import annotations

import asyncio

import pytest
from latimer.backends.checks import Checks, Fresh
from latimer.backends.errors import EngineError


class Engine:
    """An engine whose check waits for an event."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: EngineError | None = None
        self.go = asyncio.Event()

    async def look(self) -> None:
        """Count the check, wait, and raise the engine's error if it has one."""
        self.asked += 1
        error = self.error
        await self.go.wait()
        if error is not None:
            raise error


async def test_who_asks_at_once_shares_a_check_that_began_after() -> None:
    """Of 64 concurrent callers, the first runs a check and the other 63 share a second one."""
    engine = Engine()
    checks = Checks(engine.look)
    tasks = [asyncio.create_task(checks.run()) for _ in range(64)]
    await asyncio.sleep(0.01)
    assert engine.asked == 1
    engine.go.set()
    await asyncio.gather(*tasks)
    assert engine.asked == 2


async def test_what_a_check_finds_is_everybodys() -> None:
    """A shared check raises its error to every caller that waits for it."""
    engine = Engine()
    checks = Checks(engine.look)
    tasks = [asyncio.create_task(checks.run()) for _ in range(10)]
    await asyncio.sleep(0.01)
    engine.error = EngineError("another")
    engine.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(one) for one in found] == ["None"] + ["another"] * 9
    assert engine.asked == 2


async def test_who_leaves_in_the_middle_has_found_nothing_out() -> None:
    """The next caller runs a check of its own when the caller that checks is cancelled."""
    engine = Engine()
    checks = Checks(engine.look)
    tasks = [asyncio.create_task(checks.run()) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    engine.go.set()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    await asyncio.gather(*tasks[1:])
    assert engine.asked == 2


async def test_an_answer_holds_for_a_moment() -> None:
    """Callers share one result or error per interval, even when half of them are cancelled."""
    engine = Engine()
    fresh = Fresh(engine.look, 0.2)
    tasks = [asyncio.create_task(fresh.run()) for _ in range(64)]
    await asyncio.sleep(0)
    for task in tasks[:32]:
        task.cancel()
    engine.go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[32:] == [None] * 32
    await fresh.run()
    assert engine.asked == 1
    await asyncio.sleep(0.25)
    engine.error = EngineError("gone")
    for _ in range(3):
        with pytest.raises(EngineError, match="gone"):
            await fresh.run()
    assert engine.asked == 2
    await asyncio.sleep(0.25)
    engine.error = None
    await fresh.run()
    assert engine.asked == 3
