"""Search for the spellings of special tokens in long texts.

Some vocabularies have hundreds of spellings that begin alike, such as Llama 3's reserved tokens. An
alternation of them tries each one at each beginning: a megabyte of `<|` took it a second. Their
common beginnings are therefore compared once. A call of a regular expression holds the interpreter
lock, so each one searches a bounded part of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import AnyStr, Generic

# The beginnings that are searched in one call, which takes less than a millisecond.
STEP = 8_192
# The groups inside each other, as Python compiles them recursively. Vocabularies with a token for
# each length of a run of spaces have thirty.
_DEEPEST = 60


class Spellings(Generic[AnyStr]):
    """A set of spellings to search for; an empty one is ignored."""

    def __init__(self, spellings: Iterable[AnyStr]) -> None:
        known = {one for one in spellings if one}
        # Each byte is a character of Latin-1.
        words = sorted(one if isinstance(one, str) else one.decode("latin-1") for one in known)
        source = _pattern(words) if words else ""
        is_text = all(isinstance(one, str) for one in known)
        self._pattern: re.Pattern[AnyStr] = re.compile(
            source if is_text else source.encode("latin-1")  # type: ignore[arg-type]
        )
        self._longest = max(map(len, words), default=0)

    def matches(
        self, text: AnyStr, start: int = 0, end: int | None = None
    ) -> Iterator[re.Match[AnyStr]]:
        """Yield the spellings in a part of a text from left to right, at each place the longest.

        They do not overlap. These are the matches of an alternation with the longest one first.
        """
        end = len(text) if end is None else min(end, len(text))
        while self._longest and start < end:
            stop = start + STEP
            # A spelling that begins before the stop may end after it.
            most = min(stop + self._longest - 1, end)
            for match in self._pattern.finditer(text, start, most):
                if match.start() >= stop:
                    break
                yield match
                start = match.end()
            start = max(start, stop)


def _pattern(words: Sequence[str], depth: int = 0) -> str:
    """Return a regular expression that matches the longest of some words at a place.

    Args:
        words: distinct and sorted.
    """
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(words[0], words[-1], strict=False))
    start = "".join(first for first, _ in alike)
    rests = [word[len(start) :] for word in words]
    if depth == _DEEPEST:
        branches = [re.escape(rest) for rest in sorted(rests, key=len, reverse=True)]
    else:
        # Alternatives that begin differently need no order. The empty rest is the last choice.
        longer = groupby(filter(None, rests), itemgetter(0))
        branches = [_pattern([*group], depth + 1) for _, group in longer]
        branches += [""] * ("" in rests)
    inner = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return re.escape(start) + inner
