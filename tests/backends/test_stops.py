"""Tests of stop sequences in byte streams."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.stops import StopMatcher, cut

alphabet = st.text(alphabet="abé🐱", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé🐱", min_size=1, max_size=5), max_size=12)


def naive(text: bytes, stops: list[str]) -> tuple[bytes, str | None]:
    """Cut a text at the first byte at which a stop sequence ends, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop.encode())]
        if ending:
            longest = max(ending, key=lambda stop: len(stop.encode()))
            return text[: end - len(longest.encode())], longest
    return text, None


def run(parts: list[bytes], stops: list[str]) -> tuple[bytes, str | None]:
    """Return all that a matcher lets through, and the stop sequence that matched."""
    matcher = StopMatcher(stops)
    out = b"".join(matcher.feed(part) for part in parts)
    stop = matcher.stop
    return (out, stop) if stop is not None else (out + matcher.flush(), None)


@given(alphabet, stop_lists, st.lists(st.integers(0, 60), max_size=8))
def test_any_split_gives_the_cut_by_definition(
    text: str, stops: list[str], splits: list[int]
) -> None:
    """The first stop sequence to complete cuts the text for every split of the bytes."""
    data = text.encode()
    marks = [0, *sorted(min(mark, len(data)) for mark in splits), len(data)]
    parts = [data[a:b] for a, b in pairwise(marks)]
    assert run(parts, stops) == naive(data, stops)


@given(alphabet, stop_lists)
def test_nothing_let_through_is_ever_part_of_a_stop(text: str, stops: list[str]) -> None:
    """After every byte, the matcher has let through only a prefix of the final text."""
    final, _ = naive(text.encode(), stops)
    matcher = StopMatcher(stops)
    out = b""
    for byte in text.encode():
        out += matcher.feed(bytes([byte]))
        assert final.startswith(out)


def test_a_near_match_is_let_through() -> None:
    """Text that only begins like a stop sequence passes complete."""
    matcher = StopMatcher(["3, 4, 5"])
    assert matcher.feed(b"1, 3, 4") == b"1, "
    assert matcher.feed(b", 6") == b"3, 4, 6"


def test_a_stop_that_overlaps_its_own_beginning() -> None:
    """A failed match can contain the start of the real one."""
    assert run([b"a", b"a", b"ab"], ["aab"]) == (b"a", "aab")


def test_after_a_match_everything_is_dropped() -> None:
    """The matcher drops all bytes after a stop sequence."""
    matcher = StopMatcher(["x"])
    assert matcher.feed(b"axb") == b"a"
    assert matcher.feed(b"more") == b""
    assert matcher.flush() == b""


def test_a_long_stop_costs_linear_time() -> None:
    """A long stop sequence of repeated characters is matched in linear time."""
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher([stop])
    passed = sum(len(matcher.feed(b"a" * 10_000)) for _ in range(20))
    assert passed == 150_000
    assert matcher.feed(b"b") == b""
    assert matcher.stop == stop


@given(alphabet, stop_lists)
def test_a_cut_is_that_by_definition(text: str, stops: list[str]) -> None:
    """`cut` finds the same stop sequence in the same place as a matcher of streams."""
    data = text.encode()
    kept, stop = naive(data, stops)
    assert cut(data, stops) == (len(kept), stop)


@pytest.mark.timed
def test_a_cut_of_a_long_text_costs_little() -> None:
    """`cut` finds that a text of 400 KB has no stop sequence in less than a millisecond."""
    text, seconds = b"the words ### " * 30_000, []
    for _ in range(5):
        begin = time.perf_counter()
        assert cut(text, ["\n\n", "####"]) == (len(text), None)
        seconds.append(time.perf_counter() - begin)
    assert min(seconds) < 0.001


def test_cut_tells_where_and_why() -> None:
    """`cut` returns the byte position of the cut and the stop sequence that matched."""
    assert cut("été, un".encode(), [", "]) == (5, ", ")
    assert cut(b"nothing", ["x"]) == (7, None)


def test_a_stop_does_not_match_across_an_interruption() -> None:
    """After the held bytes were taken out, a stop sequence has to begin again to match."""
    matcher = StopMatcher(["END"])
    assert matcher.feed(b"xEN") == b"x"
    assert matcher.flush() == b"EN"
    assert matcher.feed(b"D or END") == b"D or "
    assert matcher.stop == "END"
