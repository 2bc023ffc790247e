"""Tests of the log of events that readers follow."""

from __future__ import annotations

import asyncio

import pytest
from latimer.adapter.responses.background import EventLog

EVENTS = [b'event: a\ndata: {"n":%d}\n\n' % number for number in range(4)]


async def read(log: EventLog, after: int = -1, seconds: float = 0.0) -> list[bytes]:
    """Return what a reader gets until the log ends."""
    return [data async for data in log.read(after, seconds)]


async def test_readers_follow_from_any_event() -> None:
    """Readers get the events after a number, those that are there and those that come."""
    log = EventLog()
    log.add(EVENTS[0] + EVENTS[1])
    readers = [asyncio.create_task(read(log, after)) for after in (-1, 0, 1, 2, 9)]
    await asyncio.sleep(0)
    for event in EVENTS[2:]:
        log.add(event)
        await asyncio.sleep(0)
    log.end()
    found = [b"".join(await reader) for reader in readers]
    assert found == [b"".join(EVENTS[first:]) for first in (0, 1, 2, 3, 10)]
    assert (log.count, log.size) == (4, len(b"".join(EVENTS)))
    assert b"".join(await read(log)) == b"".join(EVENTS)


async def test_comments_are_no_events() -> None:
    """A comment between events has no number."""
    log = EventLog()
    log.add(b": keep-alive\n\n")
    log.add(EVENTS[0] + b": keep-alive\n\n" + EVENTS[1])
    log.end()
    assert b"".join(await read(log, 0)) == EVENTS[1]


@pytest.mark.parametrize("seconds", [0.0, 0.01])
async def test_a_silent_log_shows_that_it_is_there(seconds: float) -> None:
    """Without an event for some time a reader gets empty bytes, unless the time is 0."""
    log = EventLog()
    reader = asyncio.create_task(read(log, seconds=seconds))
    await asyncio.sleep(0.1)
    log.end()
    found = await reader
    assert (b"" in found) == (seconds > 0)
    assert b"".join(found) == b""
