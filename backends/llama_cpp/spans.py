"""Media in a sequence: a chunk is kept whole, and may have fewer positions than tokens.

With M-RoPE a picture of nx by ny embeddings takes max(nx, ny) positions, and the text after it
continues at the next one. All of its embeddings have the same first position, so llama.cpp, which
removes and copies by position, cannot take a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """The embeddings of one chunk of media in a sequence.

    Args:
        start: the number of tokens before it.
        end: the number of tokens up to its end.
        positions: the number of positions that it takes.
    """

    start: int
    end: int
    positions: int


def whole(spans: Sequence[Span], length: int) -> int:
    """Return the largest length up to `length` at which a sequence can be cut."""
    for span in spans:
        if span.start < length < span.end:
            return span.start
    return length


def surplus(spans: Sequence[Span]) -> int:
    """Return how many more tokens than positions some spans have."""
    return sum(span.end - span.start - span.positions for span in spans)


def before(spans: Sequence[Span], length: int) -> tuple[Span, ...]:
    """Return the spans among the first `length` tokens, which must not end inside one."""
    return tuple(span for span in spans if span.end <= length)
