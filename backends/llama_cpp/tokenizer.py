"""llama.cpp's tokeniser over long texts.

llama.cpp looks for control tokens one after the other and copies what is left each time: 400 KB of
them take 2.5 s, four times as much sixteen times as long, and no call can be ended before it is
done. So a long text is cut before such tokens, where that changes nothing, and tokenised in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import llama_cpp

# Bytes of a piece, at least.
PIECE = 4_096


def tokenize(
    vocabulary: object, data: bytes, add_special: bool, parse_special: bool
) -> tuple[int, ...]:
    """Token ids of a text in UTF-8, in one call of llama.cpp's.

    Args:
        vocabulary: llama.cpp's pointer.
    """
    # Hardly a token is shorter than a byte; BOS, EOS and a space may be added. Blanks that a
    # vocabulary does not know take three each, and then it is asked once more.
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
    """Cuts texts before control tokens.

    Args:
        special: what the tokeniser takes for one token wherever it stands: each spelling, and
            whether it also takes the blanks before it.
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
        """Pieces of a text that can be tokenised one by one."""
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
    """Whether another token could stand over one of a spelling's edges, or hold all of it."""
    size = len(spelling)
    return (
        any(spelling[start:] in beginnings for start in range(1, size))
        or any(spelling[:end] in ends for end in range(1, size))
        or any(spelling in other for other in others if other != spelling)
    )
