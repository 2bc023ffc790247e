"""Tests of decoding bytes to text and of turning events into a choice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.generation.choice import Choice, Delta
from latimer.adapter.generation.sinks import detailed_usage_of, usage_of
from latimer.backends.base import Finish, Piece
from latimer.backends.errors import EngineError


def finish(reason: str = "end", stop: str | None = None) -> Finish:
    """Return a final event."""
    return Finish(0, reason, stop, 3, 2)  # type: ignore[arg-type]


def pieces_of(data: bytes, splits: list[int]) -> list[Piece]:
    """Return data in pieces."""
    marks = [0, *sorted(min(mark, len(data)) for mark in splits), len(data)]
    return [Piece(0, data[start:end]) for start, end in pairwise(marks)]


def fed(stops: Sequence[str], data: bytes, splits: list[int]) -> list[str]:
    """Return the texts of the deltas of a choice that takes data in pieces."""
    choice = Choice(stops)
    deltas = [one for piece in pieces_of(data, splits) for one in choice.take([piece])]
    return [one.text for one in (*deltas, *choice.end(finish())[0])]


@given(st.text(max_size=30), st.lists(st.integers(0, 100), max_size=8))
def test_text_comes_out_as_it_went_in(text: str, splits: list[int]) -> None:
    """Text is the same at every split of its bytes and is never retracted."""
    shown = ""
    for part in fed((), text.encode(), splits):
        shown += part
        assert text.startswith(shown)
    assert shown == text


@given(
    st.binary(max_size=20),
    st.lists(st.integers(0, 20), max_size=5),
    st.sampled_from(["end", "length"]),
)
def test_a_whole_choice_is_what_its_pieces_are(data: bytes, splits: list[int], reason: str) -> None:
    """A choice that is read as a whole has the same text and reason as one in pieces."""
    pieces, event = pieces_of(data, splits), finish(reason)
    whole, apart = Choice(()), Choice(())
    deltas, own = whole.whole(pieces, event)
    assert whole.is_bare
    assert deltas == apart.take(pieces)
    assert ((), own) == apart.end(event)
    assert (whole.finish, whole.reason) == (apart.finish, apart.reason)


def test_a_whole_choice_has_no_unknown_stop_sequence() -> None:
    """An engine that stops at a string which the request does not name has failed."""
    with pytest.raises(EngineError, match="not a stop sequence"):
        Choice(()).whole([], finish("stop", "END"))


@given(st.binary(max_size=20), st.lists(st.integers(0, 20), max_size=5))
def test_broken_bytes_do_not_depend_on_splits(data: bytes, splits: list[int]) -> None:
    """Invalid UTF-8 gives the same text at every split."""
    assert "".join(fed((), data, splits)) == "".join(fed((), data, []))


@given(
    st.text("ab,é", max_size=20).map(str.encode),
    st.lists(st.integers(0, 30), max_size=8),
    st.lists(st.text("b,é", min_size=1, max_size=3), max_size=2),
)
def test_texts_of_pieces_are_their_deltas(data: bytes, splits: list[int], stops: list[str]) -> None:
    """The text of many pieces together is the same as that of their deltas, piece by piece."""
    together, apart = Choice(stops), Choice(stops)
    pieces = pieces_of(data, splits)
    assert together.texts(pieces) == [one.text for piece in pieces for one in apart.take([piece])]
    assert together.end(finish()) == apart.end(finish())


def test_an_incomplete_character_at_the_end_is_dropped() -> None:
    """An incomplete character at the end is dropped, not shown as U+FFFD."""
    assert fed((), "é".encode()[:1], []) == []


def test_what_was_held_back_comes_at_the_end() -> None:
    """The start of a stop sequence that was never completed is sent at the end."""
    choice = Choice(("3, 4",))
    assert choice.take([Piece(0, b"1, 2, 3, ")]) == (Delta("1, 2, "),)
    assert choice.end(finish("length")) == ((Delta("3, "),), "length")


def test_a_stop_wins_over_a_limit() -> None:
    """A stop sequence that completes with the last token gives the finish reason `stop`."""
    choice = Choice((",",))
    assert choice.take([Piece(0, b"1,")]) == (Delta("1"),)
    assert choice.end(finish("length")) == ((), "stop")


def test_a_stop_that_nobody_asked_for_is_an_error() -> None:
    """A reverse prompt of the engine that the client did not request is an error."""
    choice = Choice((",",))
    choice.take([Piece(0, b"1")])
    with pytest.raises(EngineError, match="reverse prompt"):
        choice.end(finish("stop", "###"))


def test_a_control_token_may_be_a_stop_without_text() -> None:
    """A control token that the engine matched as a stop, and that has no text, counts as a stop."""
    choice = Choice(("<|im_end|>",))
    assert choice.take([Piece(0, b"1")]) == (Delta("1"),)
    assert choice.end(finish("stop", "<|im_end|>")) == ((), "stop")


def test_usage_counts_prompts_once() -> None:
    """Usage counts each prompt once and each completion separately."""
    finishes = [Finish(i, "end", None, 10 + i // 2, 3, 4) for i in range(4)]
    usage = usage_of(finishes, 2)
    assert usage == {"prompt_tokens": 21, "completion_tokens": 12, "total_tokens": 33}
    details = detailed_usage_of(finishes, 2)
    assert details["prompt_tokens_details"] == {
        "cached_tokens": 8, "cache_write_tokens": 0, "audio_tokens": 0,
    }  # fmt: skip
