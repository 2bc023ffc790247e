"""Ids of responses and of their items.

The id of an item contains that of its response, and its place. So a reference to an item needs no
table, and a stream, a plain response and the stored response have the same ids.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..store.records import new_id

# An id has 48 hexadecimal digits. Those of a response: the time, random digits, and a zero place.
_RANDOM, _PLACE = 30, 4
# The places of a response's input items follow those of its output items.
_INPUT = 0x8000
_ITEM = re.compile(rf"[a-z]+_([0-9a-f]{{44}})([0-9a-f]{{{_PLACE}}})")


class Place(NamedTuple):
    """The place of an item: its response, its index there, and if it is an item of the input."""

    response: str
    index: int  # type: ignore[assignment]
    is_input: bool


def new_response_id() -> tuple[str, int]:
    """Return the id of a new response, and its time in microseconds since 1970."""
    start, created_at = new_id("resp_", _RANDOM)
    return f"{start}{0:0{_PLACE}x}", created_at


def item_id(prefix: str, response: str, index: int, is_input: bool = False) -> str:
    """Return the id of an item of a response.

    Args:
        prefix: `msg_`, `rs_`, `fc_`, `ctc_` …
        index: its index in the output, or in the input.
    """
    place = index + (_INPUT if is_input else 1)
    return f"{prefix}{response.removeprefix('resp_')[:-_PLACE]}{place:0{_PLACE}x}"


def place_of(item: str) -> Place | None:
    """Return the place of an item; None if the id is not one of ours."""
    match = _ITEM.fullmatch(item)
    place = 0 if match is None else int(match[2], 16)
    if match is None or not place:
        return None
    response = f"resp_{match[1]}{0:0{_PLACE}x}"
    if place >= _INPUT:
        return Place(response, place - _INPUT, True)
    return Place(response, place - 1, False)
