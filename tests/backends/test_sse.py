"""Tests of the parser for server-sent events."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.errors import EngineError
from latimer.backends.sse import EventParser


def feed(*chunks: bytes) -> list[bytes]:
    """Return all events of some chunks."""
    parser = EventParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), max_size=5
    ),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_every_line_ending_and_every_split(
    texts: list[str], ending: str, splits: list[int]
) -> None:
    """Only LF, CRLF and CR end a line; U+2028 and U+0085 do not."""
    data = "".join(f"data: {text}{ending}{ending}" for text in texts).encode() + b": end\n"
    marks = [0, *sorted(min(mark, len(data)) for mark in splits), len(data)]
    chunks = [data[a:b] for a, b in pairwise(marks)]
    assert feed(*chunks) == [text.encode() for text in texts]


def test_pings_and_other_fields_are_skipped() -> None:
    """The parser skips comments, event names and ids."""
    assert feed(b":\n\nevent: message\nid: 1\ndata: x\n\n:\n\n") == [b"x"]


@pytest.mark.parametrize(
    "line", [b"xdata: b", b" data: b", b"[data: b", b"\xef\xbb\xbfdata: b", b"error: {}", b"datab"]
)
def test_a_line_that_is_no_events_is_an_error(line: bytes) -> None:
    """A stray byte before a field raises an error instead of dropping the event's text."""
    with pytest.raises(EngineError, match="an invalid event line"):
        feed(b"data: a\n\n" + line + b"\n\ndata: c\n\n")


def test_lines_of_one_event_are_joined() -> None:
    """The parser joins several data lines into one event."""
    assert feed(b"data: a\ndata:b\ndata\n\n") == [b"a\nb\n"]


def test_an_event_without_its_blank_line_is_no_event() -> None:
    """The parser does not return an event that the end of the stream cuts off."""
    assert feed(b"data: x\n") == []


def test_an_endless_event_is_an_error() -> None:
    """An event beyond the size limit raises an error."""
    parser = EventParser(max_event_size=10)
    with pytest.raises(EngineError, match="more than 10 bytes"):
        parser.feed(b"data: 123456789")


def test_a_long_line_in_small_chunks_is_read_once() -> None:
    """Parsing a line of 3 MiB in chunks of 64 bytes takes less than half a second."""
    parser = EventParser()
    start = time.thread_time()
    parser.feed(b"data: ")
    for _ in range(3 * 2**14):
        parser.feed(b"a" * 64)
    assert len(parser.feed(b"\n\n")[0]) == 3 * 2**20
    assert time.thread_time() - start < 0.5


@pytest.mark.parametrize("noise", [b"\n", b":\n", b": ping\n\n", b"\n\n:\n"])
def test_floods_that_say_nothing_are_skipped_at_once(noise: bytes) -> None:
    """Parsing a megabyte of blank lines or comments takes less than a quarter of a second."""
    start = time.thread_time()
    assert feed(b"data: a\n", noise * (2**20 // len(noise)), b"data: b\n\n")[-1].endswith(b"b")
    assert time.thread_time() - start < 0.25


def test_an_endless_event_of_empty_lines_is_an_error() -> None:
    """Empty data lines count towards the size limit of an event."""
    parser = EventParser(max_event_size=10_000)
    with pytest.raises(EngineError, match="more than 10000 bytes"):
        for _ in range(200):
            parser.feed(b"data:\n" * 100)
