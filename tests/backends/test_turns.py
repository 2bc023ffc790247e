"""The queue in front of an engine."""

from __future__ import annotations

import asyncio

import pytest
from latimer.backends.errors import Busy
from latimer.backends.turns import Turns


async def test_turns_come_in_the_order_of_asking() -> None:
    """First come, first served, one at a time."""
    turns, order, running = Turns(100), [], 0

    async def work(number: int) -> None:
        nonlocal running
        await turns.take()
        running += 1
        assert running == 1
        await asyncio.sleep(0.001)
        order.append(number)
        running -= 1
        turns.release()

    await asyncio.gather(*(work(number) for number in range(20)))
    assert order == list(range(20))


async def test_a_full_queue_is_busy() -> None:
    """One more than may wait is refused, with a time to come back in."""
    turns = Turns(2)
    await turns.take()
    waiting = [asyncio.create_task(turns.take()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Busy) as caught:
        await turns.take()
    assert 0 < caught.value.retry_after <= 60
    for task in waiting:
        turns.release()
        await task
    turns.release()


async def test_giving_up_leaves_the_queue() -> None:
    """Who is cancelled while waiting takes no turn."""
    turns = Turns(1)
    await turns.take()
    waiting = asyncio.create_task(turns.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    turns.check()
    turns.release()
    await asyncio.wait_for(turns.take(), 1)
    turns.release()
