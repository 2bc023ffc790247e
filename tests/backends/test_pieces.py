"""The spaces that a tokeniser puts in front of words are in no prompt."""

from __future__ import annotations

import pytest
from latimer.backends.pieces import shown

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
    """A space that the text has stays, one that was put there goes; ids alone go by the rule."""
    assert shown(tokens, True, text) == expected


def test_other_tokenisers_put_nothing() -> None:
    """Where no spaces are added, every piece is shown as it is."""
    assert shown([(b" a", False), S], False, b" a<s>") == [b" a", b"<s>"]
