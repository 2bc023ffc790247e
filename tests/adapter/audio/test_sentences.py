"""Tests of the sentences of a text that arrives in parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latimer.adapter.audio.sentences import LONGEST_PIECE, Sentences, is_speakable, sentences_of

TEXTS: tuple[tuple[str, list[str] | None], ...] = (
    ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
    ("Dr. Smith paid 3.14 dollars. He left.", ["Dr. Smith paid 3.14 dollars.", "He left."]),
    ("J. R. R. Tolkien wrote it. I read it.", ["J. R. R. Tolkien wrote it.", "I read it."]),
    ("It is e.g. Paris, i.e. a city. Next", ["It is e.g. Paris, i.e. a city.", "Next"]),
    ("See No. 5 and fig. 3 there. No. Never.", ["See No. 5 and fig. 3 there.", "No.", "Never."]),
    ("Apples, pears etc. Then more.", ["Apples, pears etc.", "Then more."]),
    ('"What?" he said. "No." She left.', ['"What?" he said.', '"No."', "She left."]),
    ("Wait... what? (Yes.) **Done.** Ok", ["Wait... what?", "(Yes.)", "**Done.**", "Ok"]),
    ("你好。今天很好！「真的吗？」他说。", ["你好。", "今天很好！", "「真的吗？」", "他说。"]),
    ("Всё хорошо. Да! क्या है? हाँ। ठीक।", ["Всё хорошо.", "Да!", "क्या है?", "हाँ।", "ठीक।"]),
    ("1. Apples\n2. Pears\n- one\n* two", ["1. Apples", "2. Pears", "- one", "* two"]),
    ("# Title\n\ntext of it", ["# Title", "text of it"]),
    ("A line that is wrapped\nhere. Ok", ["A line that is wrapped\nhere.", "Ok"]),
    ("Version 2.0.1 of a.b.c is at example.com/x?y=1 now.", None),
    ("  \n ", []),
    ("", []),
)


def in_parts(text: str, *ends: int) -> list[str]:
    """Return the sentences of a text that arrives in parts with these ends."""
    sentences, found, start = Sentences(), [], 0
    for end in (*ends, len(text)):
        found += sentences.feed(text[start:end])
        start = end
    return found + sentences.end()


@pytest.mark.parametrize(("text", "expected"), TEXTS)
def test_each_sentence_is_a_piece(text: str, expected: list[str] | None) -> None:
    """Numbers, abbreviations, initials, quotes and addresses do not end a sentence."""
    assert sentences_of(text) == ([text] if expected is None else expected)


@pytest.mark.parametrize("text", [text for text, _ in TEXTS])
def test_the_sentences_do_not_depend_on_the_parts(text: str) -> None:
    """A text has the same sentences wherever it is cut in two, and character by character."""
    expected = sentences_of(text)
    assert in_parts(text, *range(len(text))) == expected
    for end in range(len(text)):
        assert in_parts(text, end) == expected


@settings(max_examples=300)
@given(
    st.text("aB1 .?!\n,。)\"'-…", max_size=60),
    st.sampled_from(
        ["", "word " * 90, "x" * (LONGEST_PIECE - 3), "a, " * 140, "7 % " * 90, "漢、я" * 90]
    ),
    st.lists(st.integers(0, 600), max_size=4),
)
def test_any_text_in_any_parts(end: str, begin: str, parts: list[int]) -> None:
    """No piece is too long or empty, none has whitespace around it, and nothing is lost."""
    text = begin + end
    found = in_parts(text, *sorted(min(part, len(text)) for part in parts))
    assert found == sentences_of(text)
    assert all(0 < len(piece) <= LONGEST_PIECE and piece == piece.strip() for piece in found)
    assert "".join("".join(found).split()) == "".join(text.split())


def test_a_sentence_is_known_with_the_first_letter_of_the_next() -> None:
    """Speaking begins before the second sentence is written."""
    sentences = Sentences()
    assert sentences.feed("It rains.") == []
    assert sentences.feed(" I") == ["It rains."]
    assert sentences.feed(" stay.\n") == []
    assert sentences.feed("\n") == ["I stay."]


def test_a_long_sentence_is_cut_at_its_best_place() -> None:
    """That is a comma; without one, a space; without one, anywhere."""
    first = "word " * 60 + "end,"
    assert sentences_of(first + " more" * 60)[0] == first
    assert sentences_of("word " * 100)[0] == ("word " * 80).strip()
    assert [len(piece) for piece in sentences_of("x" * 1_000)] == [
        LONGEST_PIECE,
        LONGEST_PIECE,
        200,
    ]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("a = % # … " * 400, 100), ("%" * 400, 34), ("\N{GRINNING FACE}" * 400, 34),
        ("7" * 400, 80), ("漢" * 400, 50), ("я" * 400, 200), ("é" * 400, LONGEST_PIECE),
        ("e\u0301" * 400, LONGEST_PIECE),
    ],
)  # fmt: skip
def test_pieces_are_as_short_as_they_are_slow_to_speak(text: str, most: int) -> None:
    """Signs are words when they are spoken, so that a piece has fewer of them than letters."""
    found = sentences_of(text)
    assert max(map(len, found)) <= most
    assert "".join("".join(found).split()) == "".join(text.split())
    assert in_parts(text, *range(0, len(text), 7)) == found


def test_a_text_without_letters_has_nothing_to_speak() -> None:
    """Marks, rules and emojis are not speakable; letters and digits of any script are."""
    assert not any(map(is_speakable, ("", "---", "…!", "\N{GRINNING FACE}")))
    assert all(map(is_speakable, ("a", "7", "你", "**Ja**")))
