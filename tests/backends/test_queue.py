"""Tests of the order in which tiers have their turns."""

from __future__ import annotations

import asyncio
import gc
import random
import threading

import pytest
from latimer.backends.errors import Busy
from latimer.backends.queue import MOST_PASSED, AdmissionQueue, FairOrder, Ticket, Tier


def test_the_highest_tier_is_next() -> None:
    """The highest tier that waits is next, in every set of waiting tiers."""
    order = FairOrder()
    assert order.next([Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY]) is Tier.PRIORITY
    assert order.next([Tier.FLEX, Tier.DEFAULT]) is Tier.DEFAULT
    assert order.next([Tier.FLEX]) is Tier.FLEX


def test_a_tier_is_passed_over_a_number_of_times() -> None:
    """A waiting tier has its turn after that number of turns of another, and then waits again."""
    order, served = FairOrder(), []
    both = (Tier.DEFAULT, Tier.FLEX)
    for _ in range(3 * MOST_PASSED):
        served.append(order.next(both))
        order.count(served[-1], both)
    once = [Tier.DEFAULT] * (MOST_PASSED - 1) + [Tier.FLEX]
    assert served == once * 3


def test_an_empty_tier_does_not_save_turns() -> None:
    """A tier that had no waiting requests has waited for no turn."""
    order = FairOrder()
    for _ in range(MOST_PASSED - 1):
        order.count(Tier.PRIORITY, [Tier.FLEX])
    order.count(Tier.PRIORITY, [])
    assert order.next([Tier.PRIORITY, Tier.FLEX]) is Tier.PRIORITY


@pytest.mark.parametrize("seed", range(20))
def test_no_tier_waits_longer_than_the_bound(seed: int) -> None:
    """In random traffic, the first request of a tier waits for at most `MOST_PASSED` turns."""
    chance = random.Random(seed)
    weights = [chance.random() for _ in Tier]
    order, most = FairOrder(), 0
    waiting = dict.fromkeys(Tier, 0)
    since = dict.fromkeys(Tier, 0)
    for _ in range(5_000):
        for tier in chance.choices([*Tier], weights, k=chance.randrange(3)):
            waiting[tier] += 1
        left = [tier for tier in Tier if waiting[tier]]
        if not left:
            continue
        served = order.next(left)
        waiting[served] -= 1
        order.count(served, [tier for tier in left if waiting[tier]])
        for tier in Tier:
            since[tier] = since[tier] + 1 if waiting[tier] and tier is not served else 0
        most = max(most, *since.values())
    assert most <= MOST_PASSED


async def test_turns_come_in_the_order_of_asking() -> None:
    """The queue serves requests one at a time, in the order of their arrival."""
    turns, order, running = AdmissionQueue(100), [], 0

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
    """A full queue rejects one more request and gives a time to retry after."""
    turns = AdmissionQueue(2)
    await turns.take()
    waiting = [asyncio.create_task(turns.take()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Busy) as caught:
        await turns.take()
    assert 0 < (caught.value.retry_after or 0) <= 60
    for task in waiting:
        turns.release()
        await task
    turns.release()


async def test_giving_up_leaves_the_queue() -> None:
    """A request that is cancelled while it waits is removed from the queue and takes no turn."""
    turns = AdmissionQueue(1)
    await turns.take()
    waiting = asyncio.create_task(turns.take())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    turns.check()
    turns.release()
    await asyncio.wait_for(turns.take(), 1)
    turns.release()


async def held(turns: AdmissionQueue, places: int) -> None:
    """Take every place."""
    for _ in range(places):
        await turns.take()


async def test_as_many_calls_run_as_there_are_places() -> None:
    """Never more calls run than there are places, and more places let waiting calls run."""
    turns, running, most = AdmissionQueue(100, 3), 0, 0

    async def work() -> None:
        nonlocal running, most
        async with turns:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(work() for _ in range(30)))
    assert most == 3
    await held(turns, 3)
    waiting = [asyncio.create_task(turns.take()) for _ in range(2)]
    await asyncio.sleep(0)
    turns.resize(5)
    await asyncio.wait_for(asyncio.gather(*waiting), 1)


async def test_requests_come_in_turn_not_calls() -> None:
    """A small request does not wait for all calls of a request of 300 calls."""
    turns, order = AdmissionQueue(4), []
    large, small = Ticket(), [Ticket(), Ticket()]
    await turns.take(large)

    async def work(ticket: Ticket, name: str) -> None:
        await turns.take(ticket)
        order.append(name)
        turns.release()

    tasks = [asyncio.create_task(work(large, "large")) for _ in range(300)]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(work(ticket, "small")) for ticket in small]
    await asyncio.sleep(0)
    turns.release()
    await asyncio.gather(*tasks)
    assert order[:4] == ["large", "small", "small", "large"]
    assert len(order) == 302


async def test_a_request_that_was_let_in_is_never_refused() -> None:
    """Further calls of an admitted request wait in a full queue, and count as one."""
    turns, mine = AdmissionQueue(1), Ticket()
    await turns.take(mine)
    waiting = [asyncio.create_task(turns.take(mine)) for _ in range(50)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await turns.take(Ticket())
    turns.check(mine)
    for task in waiting:
        turns.release()
        await task
    turns.release()
    await turns.take()


async def test_a_queue_of_none_still_serves() -> None:
    """A queue with a limit of 0 still gives free places to requests."""
    turns = AdmissionQueue(0, 2)
    await held(turns, 2)
    with pytest.raises(Busy):
        turns.check()
    turns.release()
    turns.check()
    await turns.take()


async def test_no_place_is_lost_by_leaving() -> None:
    """No place is lost when calls are cancelled at any moment, also just after their turn came."""
    chance = random.Random(14)
    turns, running = AdmissionQueue(1_000, 3), 0

    async def work(ticket: Ticket) -> None:
        nonlocal running
        await turns.take(ticket)
        running += 1
        try:
            assert running <= 3
            await asyncio.sleep(chance.random() * 0.002)
        finally:
            running -= 1
            turns.release()

    tickets = [Ticket.of(chance.choice([*Tier])) for _ in range(20)]
    tasks = []
    for _ in range(600):
        tasks.append(asyncio.create_task(work(chance.choice(tickets))))
        if chance.random() < 0.7:
            await asyncio.sleep(0)
        for task in chance.sample(tasks, min(2, len(tasks))):
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (running, turns.taken, len(turns._waiting)) == (0, 0, 0)
    await asyncio.wait_for(held(turns, 3), 1)


async def test_a_free_place_needs_no_task_and_no_future() -> None:
    """Taking a free place does not yield to the event loop."""
    turns = AdmissionQueue(1, 1)
    taking = turns.take(Ticket())
    with pytest.raises(StopIteration):
        taking.send(None)


def queued(turns: AdmissionQueue, order: list[str], name: str, tier: Tier) -> asyncio.Task[None]:
    """Queue a request that notes its name in its turn and then releases its place."""

    async def work() -> None:
        await turns.take(Ticket.of(tier))
        order.append(name)
        turns.release()

    return asyncio.create_task(work())


async def test_a_higher_tier_goes_first() -> None:
    """Requests have their turns by tier, and in the order of their arrival inside a tier."""
    turns = AdmissionQueue(100)
    order: list[str] = []
    await turns.take()
    tasks = [
        queued(turns, order, tier.name[0] + number, tier)
        for number in "12"
        for tier in (Tier.FLEX, Tier.DEFAULT, Tier.PRIORITY)
    ]
    await asyncio.sleep(0)
    turns.release()
    await asyncio.gather(*tasks)
    assert order == ["P1", "P2", "D1", "D2", "F1", "F2"]


async def test_a_flex_request_waits_for_a_bounded_number_of_turns() -> None:
    """Requests of lower tiers have their turns while a hundred requests with priority wait."""
    turns = AdmissionQueue(1_000)
    order: list[str] = []
    await turns.take()
    tasks = [queued(turns, order, tier.name, tier) for tier in (Tier.FLEX, Tier.DEFAULT)]
    tasks += [queued(turns, order, "priority", Tier.PRIORITY) for _ in range(100)]
    await asyncio.sleep(0)
    turns.release()
    await asyncio.gather(*tasks)
    assert (order.index("DEFAULT"), order.index("FLEX")) == (MOST_PASSED - 1, MOST_PASSED)


async def test_each_tier_fills_the_queue() -> None:
    """The limit of the queue counts the requests of all tiers together."""
    turns = AdmissionQueue(2)
    await turns.take()
    waiting = [
        asyncio.create_task(turns.take(Ticket.of(tier))) for tier in (Tier.DEFAULT, Tier.FLEX)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await turns.take(Ticket.of(Tier.PRIORITY))
    for task in waiting:
        turns.release()
        await task


async def test_a_place_goes_to_another_thread() -> None:
    """A call that waits in the event loop of another thread gets the place that is released."""
    queue, waits = AdmissionQueue(None), threading.Event()

    async def take() -> None:
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        waits.set()
        await asyncio.wait_for(taking, 5)
        queue.release()

    await queue.take()
    # Debugging rejects calls of an event loop from another thread that would not wake it.
    other = asyncio.create_task(asyncio.to_thread(asyncio.run, take(), debug=True))
    assert await asyncio.to_thread(waits.wait, 10)
    queue.release()
    await asyncio.wait_for(other, 10)
    assert (queue.taken, queue.waiting) == (0, 0)


def waiting_in(loop: asyncio.AbstractEventLoop, queue: AdmissionQueue) -> asyncio.Task[None]:
    """Return a call that waits in an event loop for the only place; it may end as garbage."""
    loop.run_until_complete(queue.take())
    left = loop.create_task(queue.take())
    loop.run_until_complete(asyncio.sleep(0))
    # Its end as garbage is not what is tested.
    left._log_destroy_pending = False  # type: ignore[attr-defined]
    return left


def test_a_call_of_a_closed_event_loop_gets_no_place() -> None:
    """A released place goes past the calls of an event loop that was closed while they waited."""
    queue, closed = AdmissionQueue(None), asyncio.new_event_loop()
    left = waiting_in(closed, queue)
    closed.close()

    async def take() -> None:
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        queue.release()
        await asyncio.wait_for(taking, 5)
        queue.release()

    asyncio.run(take())
    assert not left.done()
    assert (queue.taken, queue.waiting) == (0, 0)


def test_a_call_that_ends_with_its_closed_event_loop_gives_its_place_back() -> None:
    """A call that becomes garbage with its event loop gives back the place that it has got."""
    queue, closed = AdmissionQueue(None), asyncio.new_event_loop()
    left = waiting_in(closed, queue)
    closed.call_soon(queue.release)
    closed.call_soon(closed.stop)
    closed.run_forever()
    assert queue.taken == 1
    closed.close()
    del left
    gc.collect()
    assert (queue.taken, queue.waiting) == (0, 0)
