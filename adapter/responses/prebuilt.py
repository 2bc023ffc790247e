"""The events of a response that is one message of text, as bytes with gaps.

Most responses are no more than that. Their events are the same but for the ids, the numbers and the
texts, so that to fill gaps replaces the objects of eight events: 500 instructions of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import orjson

from .output import DATA, END, Event, MessageItem, framed

BEGINNING = ("response.created", "response.in_progress")
# What is between the texts of several frames; JSON has no line ends.
BETWEEN = b"\n"
# Numbers that nothing else in an event is.
_NUMBER = 900_000_000


class Prebuilt(NamedTuple):
    """The events of a message that is the first item of its response.

    The gaps are `%(name)b`, or `%(name)d` for a number.

    Args:
        beginning: the first events, with the `response`.
        opening: the events before the first delta, with the `id` of the message.
        before: the bytes of a delta before its number.
        between: its bytes between the number and the text, with the `id`.
        after: its bytes after the text.
        ending: the events after the last delta, with `id`, `text`, `status` and the numbers `n0`,
            `n1` and `n2`.
        last: the last event, with `status`, the number `n0`, and the `response`.
    """

    beginning: bytes
    opening: bytes
    before: bytes
    between: bytes
    after: bytes
    ending: bytes
    last: bytes


@cache
def prebuilt(first: int, is_named: bool, in_frames: bool) -> Prebuilt:
    """Return the events of a message.

    Args:
        first: the number of the first event of the message.
        is_named: True for a line with the name of each event.
        in_frames: True for the texts of frames, of which several have `BETWEEN` between them.
    """

    def made(events: Sequence[Event], number: int = _NUMBER) -> bytes:
        data = framed(events, number, is_named)
        for index in range(len(events)):
            data = data.replace(b"%d" % (_NUMBER + index), b"%%(n%d)d" % index)
        if in_frames:
            data = data.removeprefix(DATA).removesuffix(END).replace(END + DATA, BETWEEN)
        return data

    item = MessageItem(("%(id)b", 0), None)
    opening = made(item.begin(), first)
    before, rest = made(item.add("%(text)b", ())).split(b"%(n0)d")
    between, after = rest.split(b'"%(text)b"')
    ending = made(item.end("%(status)b"))
    whole = {"response": orjson.Fragment(b"%(response)b")}
    beginning = made([(name, whole) for name in BEGINNING], 0)
    last = made([("response.%(status)b", whole)])
    return Prebuilt(beginning, opening, before, between, after, ending, last)
