"""Tests of the mailbox in which the engine's thread leaves a job's events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from latimer.backends.base import Batch, Event, Finish, Piece
from latimer.backends.errors import EngineError
from latimer.backends.llama_cpp.tasks import Mailbox

ONE, TWO, END = Piece(0, b"one"), Piece(0, b"two"), Finish(0, "end", None, 1, 2)


class Reader:
    """A reader of a mailbox, which notes what is pushed."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.pushed: list[Event | str] = []
        self.batches: list[Batch] = []
        self.takes = True
        self.error: Exception | None = None
        self._mailbox = mailbox
        pushed = mailbox.push_to(self._push, as_text=False)
        self.translate = None if pushed is None else pushed.translate

    def _push(self, data: Any) -> bool:
        if self.error is not None:
            raise self.error
        if self.takes and self.translate is not None:
            self.pushed += self.translate(data) or ()
        return self.takes

    async def read(self) -> None:
        """Read all batches."""
        async for batch in self._mailbox:
            self.batches.append(batch)


async def delivered(mailbox: Mailbox, *found: Sequence[Event]) -> None:
    """Deliver events, each in a turn of the event loop of its own."""
    for events in found:
        await asyncio.sleep(0)
        mailbox.deliver(events)
    await asyncio.sleep(0)


async def test_events_are_pushed_while_the_reader_waits() -> None:
    """The events before the end are pushed; the end, and what waits with it, is for the reader."""
    mailbox = Mailbox(asyncio.get_running_loop())
    reader = Reader(mailbox)
    mailbox.deliver([ONE])
    work = asyncio.ensure_future(reader.read())
    await delivered(mailbox, [TWO], [ONE, TWO], [TWO, END])
    await work
    assert reader.batches == [[ONE], [TWO, END]]
    assert reader.pushed == [TWO, ONE, TWO]
    assert mailbox.is_over


async def test_what_is_not_taken_is_for_the_reader() -> None:
    """Events that the receiver leaves are the reader's, and so is all that follows meanwhile."""
    mailbox = Mailbox(asyncio.get_running_loop())
    reader = Reader(mailbox)
    work = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    reader.takes = False
    mailbox.deliver([ONE])
    reader.takes = True
    mailbox.deliver([TWO])
    await delivered(mailbox, [ONE], [END])
    await work
    assert reader.batches == [[ONE, TWO], [END]]
    assert reader.pushed == [ONE]


@pytest.mark.parametrize("where", ["the engine", "the receiver"])
async def test_an_error_is_raised_by_the_reader(where: str) -> None:
    """The error that ends a job, or that the receiver raises, is raised where batches are read."""
    mailbox = Mailbox(asyncio.get_running_loop())
    reader = Reader(mailbox)
    work = asyncio.ensure_future(reader.read())
    await delivered(mailbox, [ONE])
    error = EngineError("lost power")
    if where == "the engine":
        mailbox.deliver(error)
    else:
        reader.error = error
        mailbox.deliver([TWO])
    with pytest.raises(EngineError, match="lost power"):
        await work
    assert reader.pushed == [ONE]


async def test_a_cancelled_reader_gets_no_pushes() -> None:
    """Nothing is pushed for a reader that is being cancelled."""
    mailbox = Mailbox(asyncio.get_running_loop())
    reader = Reader(mailbox)
    work = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    work.cancel()
    mailbox.deliver([ONE])
    with suppress(asyncio.CancelledError):
        await work
    assert not reader.pushed


def test_several_choices_are_not_pushed() -> None:
    """The events of several choices wait for the reader, since each has an end."""
    loop = asyncio.new_event_loop()
    assert Mailbox(loop, 2).push_to(bool, as_text=False) is None
    loop.close()
