"""Tests of tokens in both of OpenAI's logprobs formats, at every split of a stream."""

from __future__ import annotations

import math
from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.generation.choice import Choice, Echo
from latimer.adapter.generation.logprobs import FLOOR, Entry, TokenAligner, mean, to_chat, to_legacy
from latimer.backends.base import Alternative, Finish, Piece, PromptTokens, Token


def token(data: bytes, logprob: float | None = -1.0, *top: Alternative) -> Token:
    """Return a text token."""
    return Token(7, data, data, False, logprob, top)


def control(name: bytes) -> Token:
    """Return a control token, which adds no text."""
    return Token(2, b"", name, True, -0.5)


def finish(reason: str = "length", end: Token | None = None) -> Finish:
    """Return a final event."""
    return Finish(0, reason, None, 3, 2, end=end)  # type: ignore[arg-type]


def run(choice: Choice, groups: Sequence[Sequence[Token]], last: Finish) -> tuple[str, list[Entry]]:
    """Return the text and logprobs entries of a choice fed in groups of tokens."""
    text, entries = "", list[Entry]()
    for group in groups:
        for delta in choice.take([Piece(0, b"".join(t.data for t in group), group)]):
            assert delta.text
            text += delta.text
            entries += delta.entries
    rest, _reason = choice.end(last)
    for delta in rest:
        text += delta.text
        entries += delta.entries
    return text, entries


PIECES = [token(p) for p in (b"1", b", ", b"2", "é".encode()[:1], "é".encode()[1:], b" x", b"\xe6")]
TOKENS = st.lists(st.sampled_from([*PIECES, control(b"<|c|>")]), max_size=12)
STOPS = st.lists(st.sampled_from([", 2", "é", "x", " x1", "2é", ","]), max_size=3, unique=True)


@given(TOKENS, STOPS, st.lists(st.integers(0, 12), max_size=6), st.sampled_from(["length", "end"]))
def test_streamed_entries_are_the_unstreamed_ones(
    tokens: list[Token], stops: list[str], cuts: list[int], reason: str
) -> None:
    """Streamed text and entries equal those of the whole, at every split."""
    marks = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    groups = [tokens[a:b] for a, b in pairwise(marks)]
    streamed = run(Choice(stops), groups, finish(reason))
    assert streamed == run(Choice(stops), [tokens], finish(reason))
    assert streamed == run(Choice(stops), [[one] for one in tokens], finish(reason))


@given(TOKENS, STOPS)
def test_tokens_that_begin_before_a_cut_are_kept(tokens: list[Token], stops: list[str]) -> None:
    """An entry is kept, with the token's whole text, if its first byte is before the cut."""
    choice = Choice(stops)
    _text, entries = run(choice, [tokens], finish())
    data = b"".join(t.data for t in tokens)
    ends = [(data.find(s.encode()) + len(s.encode()), -len(s.encode())) for s in stops]
    ends = [(end, size) for end, size in ends if end + size >= 0]
    end, size = min(ends) if ends else (len(data), 0)
    starts = [sum(len(t.data) for t in tokens[:i]) for i in range(len(tokens))]
    kept = [t for t, at in zip(tokens, starts, strict=True) if at < end + size or not ends]
    assert [entry.token for entry in entries] == kept


@given(st.text(max_size=12), st.lists(st.integers(0, 30), max_size=8), st.integers(0, 5))
def test_offsets_count_completed_characters(text: str, cuts: list[int], base: int) -> None:
    """A token's offset is the number of characters completed before its first byte."""
    data = text.encode()
    marks = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(marks)]
    entries = TokenAligner(base).place([token(piece) for piece in pieces])
    for entry, start in zip(entries, marks, strict=False):
        assert entry.offset == base + len(data[:start].decode(errors="ignore"))


BYTES = st.lists(
    st.sampled_from([b"a", b"\xe6", b"\x97", b"\xa5", b"\xf0\x9f", b"\xff"]), max_size=8
)


@given(BYTES, st.integers(0, 8))
def test_a_token_after_an_incomplete_character_begins_after_it(
    pieces: list[bytes], prompt: int
) -> None:
    """An abandoned character counts in the offset of the next token, with or without an echo."""
    aligner = TokenAligner(0)
    entries = aligner.place([token(piece) for piece in pieces])
    data = b"".join(pieces)
    for at, entry in enumerate(entries):
        before = b"".join(pieces[:at])
        start, rest, whole = (
            len(one.decode(errors="replace")) for one in (before, data[len(before) :], data)
        )
        # The parts of one character are one replacement character more, each for itself.
        assert entry.offset == start - (start + rest > whole)
    before = b"".join(pieces[:prompt])
    text, size = utf_8_decode(before, "replace", False)
    without = TokenAligner(len(text), incomplete=before[size:])
    generated = without.place([token(piece) for piece in pieces[prompt:]])
    assert generated == entries[prompt:]


def test_an_echoed_prompt_and_what_follows_are_one_text() -> None:
    """A character that begins in the echoed prompt and ends in the completion stays whole."""
    choice = Choice((), Echo(keep_end=True))
    first, rest = "é".encode()[:1], "é".encode()[1:]
    (start,) = choice.prompt(PromptTokens(0, [token(b"a", None), token(first)]))
    assert start.text == "a"
    (delta,) = choice.take([Piece(0, rest, [token(rest)])])
    assert delta.text == "é"
    (end,), _ = choice.end(finish("end", control(b"<|end|>")))
    entries = [*start.entries, *delta.entries, *end.entries]
    assert [entry.offset for entry in entries] == [0, 1, 1, 2]
    legacy = to_legacy(entries, 0)
    assert legacy["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|end|>"]


def test_an_end_token_has_an_entry_only_under_echo() -> None:
    """The end token has a logprobs entry only with `echo`."""
    end = finish("end", control(b"<|end|>"))
    assert len(run(Choice(()), [[token(b"a")]], end)[1]) == 1
    assert len(run(Choice((), Echo(keep_end=True)), [[token(b"a")]], end)[1]) == 2


def test_the_legacy_shape() -> None:
    """The completions format has null for the first token and a floor for -inf."""
    top = (Alternative(1, b"b", False, -0.25), Alternative(2, b"", True, -math.inf))
    entries = [
        Entry(token(b"a", None), 0),
        Entry(token(b"c", -2.5, *top), 1),
        Entry(token(b"d", -math.inf), 2),
    ]
    assert to_legacy(entries, 2) == {
        "tokens": ["a", "c", "d"],
        "token_logprobs": [None, -2.5, FLOOR],
        "top_logprobs": [None, {"b": -0.25, "": FLOOR, "c": -2.5}, {"d": FLOOR}],
        "text_offset": [0, 1, 2],
    }
    assert to_legacy(entries, 0)["top_logprobs"] is None
    assert b"nan" not in orjson.dumps(to_legacy(entries, 2)).lower()


def test_of_tokens_spelled_alike_the_likelier_counts() -> None:
    """Of alternatives with the same text, the one with the larger log-probability is kept."""
    top = (Alternative(1, b"a", False, -0.25), Alternative(2, b"a", False, -3.0))
    legacy = to_legacy([Entry(token(b"a", -3.0, *top), 0)], 2)
    assert legacy["top_logprobs"] == [{"a": -0.25}]
    assert legacy["token_logprobs"] == [-3.0]


def test_the_chat_shape() -> None:
    """The chat format has exact bytes, escaped fragments, and null bytes for control tokens."""
    entries = [
        Entry(token(b"\xf0\x9f", -1.5, Alternative(1, b"<|x|>", True, -math.inf)), 0),
        Entry(control(b"<|c|>"), 0),
    ]
    expected: Any = [
        {
            "token": "\\xf0\\x9f", "logprob": -1.5, "bytes": [240, 159],
            "top_logprobs": [{"token": "<|x|>", "logprob": FLOOR, "bytes": None}],
        },
        {"token": "<|c|>", "logprob": -0.5, "bytes": None, "top_logprobs": []},
    ]  # fmt: skip
    assert to_chat(entries) == {"content": expected, "refusal": None}


def test_candidates_are_ranked_per_token() -> None:
    """The mean log-probability counts the end token and is the floor for no tokens."""
    entries = [Entry(token(b"a", -1.0), 0), Entry(token(b"b", -2.0), 1)]
    assert mean(entries, None) == -1.5
    assert mean(entries, control(b"<|end|>")) == (-1.0 - 2.0 - 0.5) / 3
    assert mean([], None) == FLOOR
