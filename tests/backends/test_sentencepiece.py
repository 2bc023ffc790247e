"""Tests of the spaces that a tokenizer adds before words, which no prompt contains."""

from __future__ import annotations

import pytest
from latimer.backends.sentencepiece import decode_piece

S = (b"<s>", True)


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        ([(b" Hello", False), (b" world", False)], b"Hello world", [b"Hello", b" world"]),
        ([(b" ", False), (b" two", False)], b" two", [b" ", b"two"]),
        ([S, (b" Hello", False)], b"<s>Hello", [b"<s>", b"Hello"]),
        ([(b" a", False), S, (b" b", False)], b"a<s>b", [b"a", b"<s>", b"b"]),
        ([(b" a", False), S, (b" b", False)], b"a<s> b", [b"a", b"<s>", b" b"]),
        ([(b" Hello", False), (b" world", False)], None, [b"Hello", b" world"]),
        ([S, (b" Hello", False)], None, [b"<s>", b"Hello"]),
        ([(b"xyz", False), (b" b", False)], b"XYZ b", [b"xyz", b" b"]),
    ],
)
def test_what_tokens_show(
    tokens: list[tuple[bytes, bool]], text: bytes | None, expected: list[bytes]
) -> None:
    """A space of the text remains, and one that the tokenizer added is removed. Without the text,
    the tokenizer's rule decides."""
    assert decode_piece(tokens, True, text) == expected


def test_other_tokenisers_put_nothing() -> None:
    """Every token keeps its bytes when the tokenizer adds no spaces."""
    assert decode_piece([(b" a", False), S], False, b" a<s>") == [b" a", b"<s>"]
