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
def prebuilt(is_named: bool, first: int, data: bytes, end: bytes) -> Prebuilt:
    """Return the events of a message.

    Args:
        is_named: True for a line with the name of each event.
        first: the number of the first event of the message.
        data, end: what is before and after the JSON of a delta.
    """
    item = MessageItem(("%(id)b", 0), None)
    opening = framed(item.begin(), first, is_named)
    delta = _numbered(item.add("%(text)b", ()), is_named)
    before, rest = delta.replace(DATA, data).replace(END, end).split(b"%(n0)d")
    between, after = rest.split(b'"%(text)b"')
    ending = _numbered(item.end("%(status)b"), is_named)
    whole = {"response": orjson.Fragment(b"%(response)b")}
    beginning = framed([(name, whole) for name in BEGINNING], 0, is_named)
    last = _numbered([("response.%(status)b", whole)], is_named)
    return Prebuilt(beginning, opening, before, between, after, ending, last)


def _numbered(events: Sequence[Event], is_named: bool) -> bytes:
    """Return events with gaps instead of their numbers."""
    data = framed(events, _NUMBER, is_named)
    for index in range(len(events)):
        data = data.replace(b"%d" % (_NUMBER + index), b"%%(n%d)d" % index)
    return data
