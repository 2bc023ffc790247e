"""Tests of the search for the spellings of special tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, AnyStr

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends import spellings
from latimer.backends.spellings import Spellings

RESERVED = [f"<|reserved_special_token_{number}|>" for number in range(248)]
LLAMA = [*RESERVED, "<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"]

# Few different characters, so that spellings begin alike, overlap, and occur in texts.
words = st.text("<|a", min_size=1, max_size=5)
texts = st.text("<|a", max_size=40)


def expected(known: Iterable[AnyStr], text: AnyStr, start: int, end: int) -> list[Any]:
    """Return the spans that an alternation with the longest spelling first finds."""
    longest = sorted(known, key=len, reverse=True)
    empty: Any = text[:0]
    bar: Any = "|" if isinstance(text, str) else b"|"
    pattern = re.compile((empty + bar).join(map(re.escape, longest)))
    return [match.span() for match in pattern.finditer(text, start, end)]


@given(known=st.sets(words, min_size=1, max_size=12), text=texts, data=st.data())
def test_the_matches_are_those_of_an_alternation(
    known: set[str], text: str, data: st.DataObject
) -> None:
    """With spellings that begin alike, every division of a text has the alternation's matches."""
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text) + 3))
    wanted = expected(known, text, start, end)
    encoded, own = text.encode(), {word.encode() for word in known}
    for step in range(1, len(text) + 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spellings, "STEP", step)
            found = [match.span() for match in Spellings(known).matches(text, start, end)]
            assert found == wanted
            found = [match.span() for match in Spellings(own).matches(encoded, start, end)]
            assert found == wanted


@given(known=st.sets(st.text(min_size=1), min_size=1), text=st.text())
def test_any_characters_may_be_spelled(known: set[str], text: str) -> None:
    """A character with a meaning in regular expressions stands for itself."""
    text = "".join([text, *known, text])
    found = [match.span() for match in Spellings(known).matches(text)]
    assert found == expected(known, text, 0, len(text))


def test_many_lengths_of_a_run() -> None:
    """A vocabulary with a token for each length of a run has the longest one at each place."""
    known = ["\n" * count for count in range(1, 500)]
    text = "a\n" + "\n" * 700 + "a"
    found = [match.span() for match in Spellings(known).matches(text)]
    assert found == expected(known, text, 0, len(text))


@pytest.mark.parametrize("text", ["", "a", b"", b"a"])
def test_nothing_is_spelled_without_spellings(text: str | bytes) -> None:
    """Without a spelling, or with only an empty one, there is no match."""
    for known in ([], [text[:0]]):
        assert not list(Spellings[Any](known).matches(text))


class Counted:
    """A pattern that notes how many characters each of its calls may search."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self.spans: list[int] = []

    def finditer(self, text: str, start: int, end: int) -> Any:
        """Search as the pattern does."""
        self.spans.append(end - start)
        return self._pattern.finditer(text, start, end)


@pytest.mark.parametrize("part", ["<|", "<", "<|reserved_special_token_", "a ", "<|eot_id|>"])
def test_each_step_is_bounded(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call searches more than a step and a spelling, also in a text of beginnings only."""
    known = Spellings(LLAMA)
    counted = Counted(known._pattern)
    monkeypatch.setattr(known, "_pattern", counted)
    text = part * 50_000
    assert len(list(known.matches(text))) == (50_000 if part in LLAMA else 0)
    assert max(counted.spans) < spellings.STEP + max(map(len, LLAMA))
    assert len(counted.spans) <= len(text) / spellings.STEP + 1


def test_common_beginnings_are_compared_once() -> None:
    """The pattern has the common beginning of many spellings once, so a text of it is cheap."""
    source = Spellings(LLAMA)._pattern.pattern
    assert source.count("reserved") == 1
    assert source.count("<") == 1
