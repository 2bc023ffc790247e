"""Tests of several streams merged into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from latimer.backends.base import Batch, Piece
from latimer.backends.errors import EngineError
from latimer.backends.queue import AdmissionQueue, Ticket
from latimer.backends.streams import EVENT, MOST_WAITING, map_concurrently, merge_streams

ended: list[int] = []


@asynccontextmanager
async def source(
    number: int, count: int, error: Exception | None = None
) -> AsyncIterator[AsyncIterator[Batch]]:
    """Yield a stream of numbered pieces, with an error at its end if one is given."""

    async def batches() -> AsyncIterator[Batch]:
        for index in range(count):
            await asyncio.sleep(0.001)
            yield [Piece(number, b"%d" % index)]
        if error is not None:
            raise error

    try:
        yield batches()
    finally:
        ended.append(number)


async def test_every_event_of_every_stream_comes_in_its_order() -> None:
    """A merged stream contains every event, in the order of its own stream."""
    async with merge_streams([source(i, 20) for i in range(5)], Ticket()) as batches:
        events = [event async for batch in batches for event in batch]
    for number in range(5):
        data = [e.data for e in events if isinstance(e, Piece) and e.choice == number]
        assert data == [b"%d" % index for index in range(20)]


async def test_streams_are_opened_in_turn() -> None:
    """At most `at_once` streams are open together, and each gets its turn."""
    open_now, most = 0, 0

    @asynccontextmanager
    async def counted(number: int) -> AsyncIterator[AsyncIterator[Batch]]:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        async with source(number, 2) as batches:
            yield batches
        open_now -= 1

    async with merge_streams([counted(i) for i in range(40)], Ticket(), at_once=3) as batches:
        events = [event async for batch in batches for event in batch]
    assert {event.choice for event in events} == set(range(40))
    assert most == 3


async def test_a_reader_that_stops_holds_the_engines_back() -> None:
    """A reader that pauses bounds the waiting events, and later gets every event."""
    made = 0

    @asynccontextmanager
    async def endless(number: int) -> AsyncIterator[AsyncIterator[Batch]]:
        async def batches() -> AsyncIterator[Batch]:
            nonlocal made
            for _ in range(5_000):
                made += 1
                yield [Piece(number, b"x")]
                await asyncio.sleep(0)

        yield batches()

    async with merge_streams([endless(i) for i in range(4)], Ticket()) as batches:
        count = len(await anext(batches))
        for _ in range(3_000):
            await asyncio.sleep(0)
        assert made <= count + MOST_WAITING // EVENT + 8
        count += sum([len(batch) async for batch in batches])
    assert count == made == 20_000


async def test_an_error_ends_all_of_them() -> None:
    """The first error reaches the reader, and all streams are closed."""
    ended.clear()
    with pytest.raises(EngineError, match="broken"):
        broken = source(1, 1, EngineError("broken"))
        async with merge_streams([source(0, 1000), broken], Ticket()) as batches:
            async for _batch in batches:
                pass
    assert sorted(ended) == [0, 1]


@asynccontextmanager
async def refused(after: asyncio.Event) -> AsyncIterator[AsyncIterator[Batch]]:
    """Raise an error when another stream has an event, as an engine that refuses a call."""
    await after.wait()
    raise EngineError("refused")
    yield


@asynccontextmanager
async def noted(begun: asyncio.Event) -> AsyncIterator[AsyncIterator[Batch]]:
    """Yield a stream without an end, which notes its first event."""

    async def batches() -> AsyncIterator[Batch]:
        while True:
            yield [Piece(0, b"x")]
            begun.set()
            await asyncio.sleep(0)

    yield batches()


async def test_an_error_comes_before_the_events_of_others() -> None:
    """A stream that is refused after another has begun is an error before any event."""
    begun = asyncio.Event()
    with pytest.raises(EngineError, match="refused"):
        async with merge_streams([noted(begun), refused(begun)], Ticket()):
            pytest.fail("it was entered")


async def test_a_stream_that_waits_for_a_place_delays_no_other() -> None:
    """The events of a stream come while another one of its request waits for a place."""
    queue, ticket = AdmissionQueue(None), Ticket()

    @asynccontextmanager
    async def placed(number: int) -> AsyncIterator[AsyncIterator[Batch]]:
        await queue.take(ticket)
        try:
            async with source(number, 3) as batches:
                yield batches
        finally:
            queue.release()

    async with merge_streams([placed(0), placed(1)], ticket) as batches:
        assert [event.choice for event in await anext(batches)] == [0]
        assert queue.waiting == 1
        assert {event.choice async for batch in batches for event in batch} == {0, 1}


async def test_a_full_buffer_ends_the_wait_for_other_streams() -> None:
    """Streams that are so far ahead that they pause are read, although another is not accepted."""
    begun, never = asyncio.Event(), asyncio.Event()
    async with merge_streams([noted(begun), refused(never)], Ticket()) as batches:
        assert await anext(batches)


async def test_leaving_ends_all_of_them() -> None:
    """All streams are closed when the reader stops early."""
    ended.clear()
    async with merge_streams([source(i, 1000) for i in range(3)], Ticket()) as batches:
        await anext(batches)
    assert sorted(ended) == [0, 1, 2]


async def test_a_slow_reader_gets_larger_batches() -> None:
    """Events that arrive while the reader is busy form one batch."""
    async with merge_streams([source(0, 10)], Ticket()) as batches:
        await anext(batches)
        await asyncio.sleep(0.1)
        assert len(await anext(batches)) == 9


async def test_many_coroutines_run_few_at_a_time() -> None:
    """Results are in order, and at most `at_once` coroutines have begun and not ended."""
    running = most = 0

    async def one(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1
        return number

    assert await map_concurrently((one(number) for number in range(50)), 4) == list(range(50))
    assert most == 4


async def test_an_error_ends_many_coroutines() -> None:
    """The first error is raised as it is, cancels those that run, and starts no more."""
    begun: list[int] = []
    cancelled: list[int] = []

    async def one(number: int) -> None:
        begun.append(number)
        try:
            await asyncio.sleep(10 if number else 0)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        raise EngineError("broken")

    with pytest.raises(EngineError, match="broken"):
        await map_concurrently((one(number) for number in range(50)), 4)
    assert (begun, sorted(cancelled)) == ([0, 1, 2, 3], [1, 2, 3])
