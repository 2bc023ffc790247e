"""Tests of the queue of a store, over a database that fails on request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from latimer.adapter.store import queue as queues
from latimer.adapter.store.errors import StoreUnavailable, Unwritable
from latimer.adapter.store.queue import Writer
from latimer.adapter.store.records import Record, pack, rows_of
from support.stored import record


class Database:
    """A database that takes batches, or fails."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def write(self, records: Sequence[Record]) -> Sequence[Record]:
        """Take a batch."""
        await self.gate.wait()
        if self.error is not None and not all(one.is_withdrawn for one in records):
            raise self.error
        self.batches.append([one.id for one in records])
        return ()


async def test_objects_are_written_in_one_batch_after_a_delay() -> None:
    """Objects of a moment are written together, without a flush."""
    database = Database()
    queue = Writer(database.write)
    ids = [one.id for one in (record(), record(), record()) if queue.add(one)]
    assert database.batches == []
    await asyncio.sleep(2 * queues.DELAY)
    assert database.batches == [ids]


async def test_a_flush_waits_for_what_was_added_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush ends when all objects before it are written, in batches of a bounded size."""
    monkeypatch.setattr(queues, "BATCH", 2)
    database = Database()
    queue = Writer(database.write)
    ids = [one.id for one in [record() for _ in range(5)] if queue.add(one)]
    await queue.flush()
    assert database.batches == [ids[:2], ids[2:4], ids[4:]]
    await queue.flush()
    assert (queue.waiting, queue.state) == (0, "ok")


async def test_a_failed_batch_stays_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Objects that the database cannot take are written later, and the log says both once."""
    monkeypatch.setattr(queues, "FIRST_PAUSE", 0.02)
    database = Database()
    database.error = StoreUnavailable("the disk is full", "SQLITE_FULL: disk is full")
    queue = Writer(database.write)
    made = record()
    queue.add(made)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="the disk is full"):
            await queue.flush()
    assert (queue.waiting, queue.state, queue.lost) == (1, "unavailable", 0)
    database.error = None
    await asyncio.sleep(0.1)
    assert database.batches == [[made.id]]
    assert (queue.waiting, queue.state, queue.lost) == (0, "ok", 0)
    assert caplog.messages == [
        "the store is not available: SQLITE_FULL: disk is full; 1 object waits",
        "the store is available again; 0 objects were lost",
    ]


async def test_a_full_queue_takes_nothing_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Objects above the bounds are lost and counted; the log has one line and no text of them."""
    monkeypatch.setattr(queues, "MOST", 2)
    database = Database()
    database.gate.clear()
    queue = Writer(database.write)
    assert [queue.add(record("secret")) for _ in range(4)] == [True, True, False, False]
    assert (queue.waiting, queue.state, queue.lost) == (2, "full", 2)
    database.gate.set()
    await queue.flush()
    assert (queue.waiting, queue.state, queue.lost) == (0, "ok", 2)
    assert len(caplog.messages) == 1
    assert "because its queue is full" in caplog.text
    assert "secret" not in caplog.text


async def test_the_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large objects fill the queue earlier, and leave room when they are written."""
    monkeypatch.setattr(queues, "MOST_BYTES", 1_000)
    database = Database()
    queue = Writer(database.write)
    assert [queue.add(record("x" * 600)) for _ in range(2)] == [True, False]
    await queue.flush()
    assert queue.add(record("x" * 600))
    await queue.flush()


async def test_an_unexpected_error_ends_neither_the_queue_nor_a_flush(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A batch that cannot be written for an unknown reason is lost, and the next one is written."""
    database = Database()
    database.error = ValueError("secret")
    queue = Writer(database.write)
    queue.add(record())
    await queue.flush()
    database.error = None
    made = record()
    queue.add(made)
    await queue.flush()
    assert database.batches == [[made.id]]
    assert queue.lost == 1
    assert "secret" not in caplog.text


async def test_an_answer_of_the_database_shortens_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When a client gets an answer, what waits is tried again soon, not after the long pause."""
    monkeypatch.setattr(queues, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(queues, "LONGEST_PAUSE", 60.0)
    database = Database()
    database.error = StoreUnavailable("gone")
    queue = Writer(database.write)
    made = record()
    queue.add(made)
    with pytest.raises(StoreUnavailable):
        await queue.flush()
    database.error = None
    monkeypatch.setattr(queues, "FIRST_PAUSE", 0.02)
    for _ in range(2):
        queue.hurry()
        assert database.batches == []
    await asyncio.sleep(0.1)
    assert database.batches == [[made.id]]
    assert queue.state == "ok"


async def test_closing_tries_once_and_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    """At the end of the process, objects that the database cannot take are lost and logged."""
    caplog.set_level(logging.ERROR)
    database = Database()
    database.error = StoreUnavailable("gone")
    queue = Writer(database.write)
    queue.add(record())
    await queue.aclose()
    assert "1 object is lost" in caplog.text


async def test_nothing_is_tried_after_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a last attempt that has failed, no timer begins another one until an object comes."""
    monkeypatch.setattr(queues, "FIRST_PAUSE", 0.01)
    database = Database()
    database.error = StoreUnavailable("down", "It is down.")
    queue = Writer(database.write)
    queue.add(record())
    await queue.aclose()
    database.error = None
    await asyncio.sleep(0.1)
    assert database.batches == []
    queue.add(record())
    await queue.flush()
    assert len(database.batches[0]) == 2


def test_an_event_loop_that_has_ended_does_not_hold_objects_back() -> None:
    """Objects that were added in an event loop which has ended are written in the next one."""
    written = asyncio.Event()

    async def write(records: Sequence[Record]) -> Sequence[Record]:
        assert len(records) == 2
        written.set()
        return ()

    queue = Writer(write)

    async def add(waits: bool) -> None:
        assert queue.add(record())
        if waits:
            await asyncio.wait_for(written.wait(), 10)

    asyncio.run(add(waits=False))
    asyncio.run(add(waits=True))


class Loops:
    """Two event loops that run in turns, and a database for both.

    Attributes:
        busy: the event loop whose batches end when the gate is open.
        written: the ids of all objects that were written.
    """

    def __init__(self) -> None:
        self.busy, self.other = asyncio.new_event_loop(), asyncio.new_event_loop()
        self.gate = asyncio.Event()
        self.written: list[str] = []

    async def write(self, records: Sequence[Record]) -> Sequence[Record]:
        """Take a batch."""
        if asyncio.get_running_loop() is self.busy:
            await self.gate.wait()
        self.written += [one.id for one in records]
        return ()

    def turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the tasks of an event loop go on."""
        for _ in range(5):
            loop.run_until_complete(asyncio.sleep(0))

    def close(self) -> None:
        """End the event loops."""
        for loop in (self.busy, self.other):
            if not loop.is_closed():
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()


@pytest.fixture
def loops() -> Iterator[Loops]:
    """Return two event loops, and end them."""
    made = Loops()
    yield made
    made.close()


def test_one_event_loop_writes_at_a_time(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A timer that another thread's flush cancels too late writes nothing a second time."""
    queue = Writer(loops.write)
    made = record()
    due: list[Callable[[], object]] = []
    later = loops.other.call_later

    def call_later(seconds: float, call: Any, *values: Any) -> asyncio.TimerHandle:
        due.append(partial(call, *values))
        return later(seconds, call, *values)

    monkeypatch.setattr(loops.other, "call_later", call_later)

    async def add() -> None:
        assert queue.add(made)

    async def timer() -> None:
        due.pop(0)()

    loops.other.run_until_complete(add())
    flush = loops.busy.create_task(queue.flush())
    loops.turn(loops.busy)
    loops.other.run_until_complete(timer())
    loops.turn(loops.other)
    loops.gate.set()
    loops.busy.run_until_complete(flush)
    assert loops.written == [made.id]
    assert (queue.waiting, caplog.messages) == (0, [])


@pytest.mark.parametrize("cancels", [True, False], ids=["cancelled", "closed"])
def test_another_event_loop_writes_what_one_leaves(loops: Loops, cancels: bool) -> None:
    """A flush that waits for another event loop writes itself when that one ends before."""
    queue = Writer(loops.write, delay=0.01)
    made = record()

    async def add() -> None:
        assert queue.add(made)
        await queue.flush()

    begun = loops.busy.create_task(add())
    loops.turn(loops.busy)
    flush = loops.other.create_task(queue.flush())
    loops.turn(loops.other)
    assert {begun.done(), flush.done()} == {False}
    for task in asyncio.all_tasks(loops.busy):
        if cancels:
            task.cancel()
        # Its end as garbage is not what is tested.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    if cancels:
        loops.turn(loops.busy)
    loops.busy.close()
    loops.other.run_until_complete(asyncio.wait_for(flush, 2))
    assert loops.written == [made.id]


def test_an_object_is_written_whole_while_it_is_packed() -> None:
    """A thread that writes an object gets all of it, also if another one packs it meanwhile."""
    made = record("text")
    packs = [pack]

    class Meanwhile(Record):
        """A record that is packed right after somebody has looked for its JSON."""

        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in ("rows", "item_rows") and packs:
                packs.pop()([self])
            return value

    made.__class__ = Meanwhile
    row, _, _ = rows_of(made)
    assert "text" in row["reply"]
    assert not made.reply


async def _unwritten(queue: Writer, database: Database) -> None:
    """Let the disk of a database be full for one object, which is withdrawn."""
    database.error = Unwritable("the disk is full", "SQLITE_FULL: disk is full")
    made = record()
    queue.add(made)
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        await queue.flush()
    made.is_withdrawn = True


@pytest.mark.parametrize("frees", [True, False])
async def test_objects_behind_a_withdrawn_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, frees: bool
) -> None:
    """Objects that come while a withdrawn one is tried again are written as soon as they can be."""
    monkeypatch.setattr(queues, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(queues, "LONGEST_PAUSE", 0.2)
    database = Database()
    queue = Writer(database.write, delay=0.01)
    await _unwritten(queue, database)
    database.gate.clear()
    await asyncio.sleep(0.05)
    queue.add(record())
    if frees:
        database.error = None
    database.gate.set()
    await asyncio.sleep(0.01)
    assert queue.state == ("ok" if frees else "unavailable")
    queue.add(record())
    await asyncio.sleep(0.1 if frees else 0.3)
    database.error = None
    await asyncio.sleep(0.0 if frees else 0.3)
    assert (queue.waiting, queue.state) == (0, "ok")
    assert [one for one in caplog.records if one.name == "asyncio"] == []


def test_a_full_disk_is_forgotten_by_all_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that was full is available again after a while, also if the event loop has ended."""
    monkeypatch.setattr(queues, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(queues, "LONGEST_PAUSE", 0.1)

    async def fail() -> Writer:
        database = Database()
        queue = Writer(database.write)
        await _unwritten(queue, database)
        await asyncio.sleep(0.05)
        assert (queue.waiting, queue.state) == (0, "unavailable")
        return queue

    queue = asyncio.run(fail())
    time.sleep(0.1)
    assert queue.state == "ok"
