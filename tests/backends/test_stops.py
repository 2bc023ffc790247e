"""Stop strings in byte streams."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.stops import StopMatcher, cut

alphabet = st.text(alphabet="abé🐱", max_size=30)
stop_lists = st.lists(st.text(alphabet="abé🐱", min_size=1, max_size=5), max_size=4)


def naive(text: bytes, stops: list[str]) -> tuple[bytes, str | None]:
    """The cut by definition: the first byte at which a stop ends, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop.encode())]
        if ending:
            longest = max(ending, key=lambda stop: len(stop.encode()))
            return text[: end - len(longest.encode())], longest
    return text, None


def run(parts: list[bytes], stops: list[str]) -> tuple[bytes, str | None]:
    """What a matcher lets through in all."""
    matcher = StopMatcher(stops)
    out = b"".join(matcher.feed(part) for part in parts)
    stop = matcher.stop
    return (out, stop) if stop is not None else (out + matcher.flush(), None)


@given(alphabet, stop_lists, st.lists(st.integers(0, 60), max_size=8))
def test_any_split_gives_the_cut_by_definition(
    text: str, stops: list[str], splits: list[int]
) -> None:
    """However the bytes arrive, the text is cut where the first stop completes."""
    data = text.encode()
    marks = [0, *sorted(min(mark, len(data)) for mark in splits), len(data)]
    parts = [data[a:b] for a, b in pairwise(marks)]
    assert run(parts, stops) == naive(data, stops)


@given(alphabet, stop_lists)
def test_nothing_let_through_is_ever_part_of_a_stop(text: str, stops: list[str]) -> None:
    """At every byte, what has been let through is a prefix of the final text, and all of what no
    stop can reach any more."""
    final, _ = naive(text.encode(), stops)
    matcher = StopMatcher(stops)
    out = b""
    for byte in text.encode():
        out += matcher.feed(bytes([byte]))
        assert final.startswith(out)


def test_a_near_match_is_let_through() -> None:
    """Text that begins like a stop and goes on otherwise comes out whole."""
    matcher = StopMatcher(["3, 4, 5"])
    assert matcher.feed(b"1, 3, 4") == b"1, "
    assert matcher.feed(b", 6") == b"3, 4, 6"


def test_a_stop_that_overlaps_its_own_beginning() -> None:
    """A failed match may be the start of the real one."""
    assert run([b"a", b"a", b"ab"], ["aab"]) == (b"a", "aab")


def test_after_a_match_everything_is_dropped() -> None:
    """Nothing fed after a stop comes out."""
    matcher = StopMatcher(["x"])
    assert matcher.feed(b"axb") == b"a"
    assert matcher.feed(b"more") == b""
    assert matcher.flush() == b""


def test_a_long_stop_costs_linear_time() -> None:
    """A stop string made to be slow is not."""
    stop = "a" * 50_000 + "b"
    matcher = StopMatcher([stop])
    passed = sum(len(matcher.feed(b"a" * 10_000)) for _ in range(20))
    assert passed == 150_000
    assert matcher.feed(b"b") == b""
    assert matcher.stop == stop


def test_cut_tells_where_and_why() -> None:
    """The cut of a whole text is a byte position."""
    assert cut("été, un".encode(), [", "]) == (5, ", ")
    assert cut(b"nothing", ["x"]) == (7, None)
