"""Tokenization of long texts with llama.cpp.

llama.cpp searches for control tokens one by one, and copies the rest of the text each time. 400 KB
of control tokens take 2.5 s, and four times as much takes sixteen times as long. A call cannot be
interrupted. So a long text is split before control tokens, where this does not change the result,
and tokenized in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import llama_cpp

# The minimum size of a piece in bytes; the last piece may be smaller.
PIECE = 4_096


def tokenize(
    vocabulary: object, data: bytes, add_special: bool, parse_special: bool
) -> tuple[int, ...]:
    """Return the token ids of a UTF-8 text, without splitting it.

    Args:
        vocabulary: llama.cpp's pointer.
    """
    # There is rarely more than one token per byte, and BOS, EOS and a space may be added. Spaces
    # that are not in the vocabulary take three tokens each; then a second call is needed.
    capacity = len(data) + 3
    while True:
        buffer = (llama_cpp.llama_token * capacity)()
        count: int = llama_cpp.llama_tokenize(
            vocabulary, data, len(data), buffer, capacity, add_special, parse_special
        )
        if count >= 0:
            return tuple(buffer[:count])
        capacity = -count


class Cutter:
    """A splitter of texts before control tokens.

    Args:
        special: the tokens that the tokenizer finds anywhere in a text: the spelling of each, and
            True if the token includes the whitespace before it.
    """

    def __init__(self, special: Iterable[tuple[bytes, bool]]) -> None:
        spellings = dict(special)
        beginnings = {text[:end] for text in spellings for end in range(1, len(text) + 1)}
        ends = {text[start:] for text in spellings for start in range(len(text))}
        safe = [
            spelling
            for spelling, takes_blanks in spellings.items()
            if not takes_blanks and not _may_overlap(spelling, spellings, beginnings, ends)
        ]
        self._pattern = re.compile(b"|".join(map(re.escape, safe)) or rb"(?!)")

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces of a text, which can be tokenized one by one."""
        start = 0
        while len(data) - start > PIECE:
            found = self._pattern.search(data, start + PIECE)
            if found is None:
                break
            yield data[start : found.start()]
            start = found.start()
        yield data[start:]


def _may_overlap(
    spelling: bytes, others: Iterable[bytes], beginnings: set[bytes], ends: set[bytes]
) -> bool:
    """Return True if another token could overlap an edge of a spelling, or contain all of it."""
    size = len(spelling)
    return (
        any(spelling[start:] in beginnings for start in range(1, size))
        or any(spelling[:end] in ends for end in range(1, size))
        or any(spelling in other for other in others if other != spelling)
    )
