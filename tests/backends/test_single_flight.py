"""Tests of work that concurrent callers share."""

from __future__ import annotations

import asyncio
import traceback

import pytest
from latimer.backends.errors import EngineError
from latimer.backends.single_flight import MOMENT, OnceCell, SingleFlight, Throttled
from support.turns import FEW, turns_after_the_first


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
    checks = SingleFlight()
    tasks = [asyncio.create_task(checks.run(engine.look)) for _ in range(64)]
    await asyncio.sleep(0.01)
    assert engine.asked == 1
    engine.go.set()
    await asyncio.gather(*tasks)
    assert engine.asked == 2


async def test_who_waits_for_a_check_wakes_at_once() -> None:
    """The end of a check wakes all callers in one turn of the event loop, not one in each turn."""
    engine = Engine()
    checks = SingleFlight()
    tasks = [asyncio.create_task(checks.run(engine.look)) for _ in range(64)]
    await asyncio.sleep(0.01)
    engine.go.set()
    for _ in range(8):
        await asyncio.sleep(0)
    assert all(task.done() for task in tasks)


async def test_a_running_check_serves_those_to_whom_it_is_fresh_enough() -> None:
    """Of 64 callers, those who do not need a check that begins after their call share the first."""
    engine = Engine()
    checks = SingleFlight()
    tasks = [asyncio.create_task(checks.run(engine.look, fresh=False)) for _ in range(63)]
    await asyncio.sleep(0.01)
    tasks.append(asyncio.create_task(checks.run(engine.look)))
    await asyncio.sleep(0.01)
    engine.go.set()
    await asyncio.gather(*tasks[:63])
    assert engine.asked == 2
    await tasks[63]
    assert engine.asked == 2


async def test_the_error_of_a_check_does_not_grow() -> None:
    """The traceback of a shared error has the frames of one caller, not those of all 64."""
    engine = Engine()
    engine.error = EngineError("gone")
    checks = SingleFlight()
    tasks = [asyncio.create_task(checks.run(engine.look)) for _ in range(64)]
    await asyncio.sleep(0.01)
    engine.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(found[-1], EngineError)
    assert len([*traceback.walk_tb(found[-1].__traceback__)]) < 8


async def test_what_a_check_finds_is_everybodys() -> None:
    """A shared check raises its error to every caller that waits for it."""
    engine = Engine()
    checks = SingleFlight()
    tasks = [asyncio.create_task(checks.run(engine.look)) for _ in range(10)]
    await asyncio.sleep(0.01)
    engine.error = EngineError("another")
    engine.go.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(one) for one in found] == ["None"] + ["another"] * 9
    assert engine.asked == 2


async def test_who_leaves_in_the_middle_has_found_nothing_out() -> None:
    """The next caller runs a check of its own when the caller that checks is cancelled."""
    engine = Engine()
    checks = SingleFlight()
    tasks = [asyncio.create_task(checks.run(engine.look)) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    await asyncio.sleep(0.01)
    engine.go.set()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    await asyncio.gather(*tasks[1:])
    assert engine.asked == 2


class Lesson:
    """A fact that takes a turn of the event loop to learn, or fails before it is known."""

    def __init__(self, *failures: EngineError | None) -> None:
        self.learnt = 0
        self._failures = [*failures]

    async def learn(self) -> int:
        """Return how often it was learnt, or raise the next failure."""
        self.learnt += 1
        failure = self._failures.pop(0) if self._failures else None
        await asyncio.sleep(0.01)
        if failure is not None:
            raise failure
        return self.learnt


async def test_a_fact_is_learnt_by_the_first_that_asks() -> None:
    """Of 64 callers one learns the fact, and all go on at once; a cleared fact is learnt again."""
    cell, lesson = OnceCell[int](), Lesson()
    assert await turns_after_the_first(cell.get(lesson.learn) for _ in range(64)) < FEW
    assert cell.value == lesson.learnt == 1
    cell.value = None
    assert await asyncio.gather(*(cell.get(lesson.learn) for _ in range(3))) == [2, 2, 2]


async def test_the_next_one_learns_what_a_cancelled_one_has_not() -> None:
    """A caller that waits learns the fact when the caller that learns is cancelled."""
    cell, lesson = OnceCell[int](), Lesson()
    tasks = [asyncio.create_task(cell.get(lesson.learn)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    assert await asyncio.gather(*tasks[1:]) == [2, 2]
    assert tasks[0].cancelled()


async def test_who_waits_for_a_fact_tries_once_more() -> None:
    """The first failure is its caller's; those who waited share the next attempt and its error."""
    cell, lesson = OnceCell[int](), Lesson(EngineError("first"), EngineError("second"))
    found = await asyncio.gather(
        *(cell.get(lesson.learn) for _ in range(3)), return_exceptions=True
    )
    assert [str(one) for one in found] == ["first", "second", "second"]
    assert cell.value is None
    assert await cell.get(lesson.learn) == 3


async def test_an_answer_holds_for_a_moment() -> None:
    """Callers share one result or error per interval, even when half of them are cancelled."""
    engine = Engine()
    fresh = Throttled(engine.look, 0.2)
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


async def test_an_error_does_not_hold_for_long() -> None:
    """An engine that was not ready is asked again a moment later, although a result would hold."""
    engine = Engine()
    engine.error = EngineError("not ready")
    engine.go.set()
    fresh = Throttled(engine.look, 60)
    for _ in range(2):
        with pytest.raises(EngineError, match="not ready"):
            await fresh.run()
    assert engine.asked == 1
    await asyncio.sleep(1.1 * MOMENT)
    engine.error = None
    for _ in range(2):
        await fresh.run()
    assert engine.asked == 2


async def test_a_check_ends_with_its_last_caller() -> None:
    """A check is cancelled when all of its callers have left, and the next caller runs another."""
    engine = Engine()
    fresh = Throttled(engine.look)
    tasks = [asyncio.create_task(fresh.run()) for _ in range(3)]
    await asyncio.sleep(0)
    checking = fresh._task
    assert checking is not None
    for task in tasks:
        assert not checking.cancelled()
        task.cancel()
        await asyncio.sleep(0.01)
    assert checking.cancelled()
    engine.go.set()
    await fresh.run()
    assert engine.asked == 2


async def test_a_check_that_is_being_cancelled_serves_nobody() -> None:
    """A caller that comes while a check without callers ends runs another, and is not cancelled."""
    asked = 0
    may_end = asyncio.Event()

    async def look() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            try:
                await asyncio.sleep(60)
            finally:
                await may_end.wait()

    fresh = Throttled(look)
    first = asyncio.create_task(fresh.run())
    await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    second = asyncio.create_task(fresh.run())
    await asyncio.sleep(0.01)
    may_end.set()
    await second
    assert asked == 2


def test_another_event_loop_runs_its_own_check() -> None:
    """A check that has not ended in one event loop holds up no caller in another one."""
    engine, checks = Engine(), SingleFlight()
    first = asyncio.new_event_loop()
    waiting = first.create_task(checks.run(engine.look))
    first.run_until_complete(asyncio.sleep(0))

    async def answer() -> None:
        pass

    asyncio.run(asyncio.wait_for(checks.run(answer, fresh=False), 5))
    engine.go.set()
    first.run_until_complete(waiting)
    first.close()
    assert engine.asked == 1


def test_event_loops_learn_the_same_fact() -> None:
    """A fact that two event loops learn at the same time is one object for both."""
    cell: OnceCell[object] = OnceCell()
    first, go = asyncio.new_event_loop(), asyncio.Event()

    async def slow() -> object:
        await go.wait()
        return object()

    async def fast() -> object:
        return object()

    waiting = first.create_task(cell.get(slow))
    first.run_until_complete(asyncio.sleep(0))
    found = asyncio.run(asyncio.wait_for(cell.get(fast), 5))
    go.set()
    assert first.run_until_complete(waiting) is found
    first.close()
