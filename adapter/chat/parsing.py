"""Markers between reasoning, content and tool calls (sans-I/O).

Parsers take bytes, because a token may end inside a character. Each part has the number of bytes
of the text that it accounts for, which places log-probabilities and stop sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from ..generation.parts import Parser, Part

BLANKS = b" \t\r\n"


class Plain(Parser):
    """A parser that returns all text as content."""

    in_call = False

    @override
    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """A control token is not part of the content."""
        return [Part("nothing" if mark else "content", b"" if mark else data, len(data))]

    @override
    def end(self) -> list[Part]:
        return []


class MarkerFinder:
    """A search for the first of several markers in a text.

    Args:
        markers: the markers, none of which contains another.
        special: markers that are tokens of the model: text with the same spelling is not a marker.
    """

    def __init__(self, markers: Sequence[str], special: frozenset[str]) -> None:
        self.all = frozenset(marker.encode() for marker in markers)
        self._texts = [marker.encode() for marker in markers if marker not in special]

    def take_texts(self) -> None:
        """Accept text with the spelling of any marker as that marker from now on."""
        self._texts = sorted(self.all)

    def find(self, text: bytes) -> tuple[int, bytes] | None:
        """Return the position of the first marker and the marker, or None."""
        found = [(at, one) for one in self._texts if (at := text.find(one)) >= 0]
        return min(found) if found else None

    def held(self, text: bytes) -> int:
        """Return how many bytes at the end of a text may be the beginning of a marker."""
        longest = 0
        for one in self._texts:
            for size in range(min(len(one) - 1, len(text)), longest, -1):
                if text.endswith(one[:size]):
                    longest = size
                    break
        return longest


class Blanks:
    """A buffer that holds back whitespace at the end of content until more content follows."""

    def __init__(self) -> None:
        self._held = b""

    def content(self, data: bytes) -> list[Part]:
        """Add content; return the known part without the whitespace at its end."""
        data = self._held + data
        sure = data.rstrip(BLANKS)
        self._held = data[len(sure) :]
        return [Part("content", sure, len(sure))] if sure else []

    def drop(self) -> list[Part]:
        """Return the held whitespace as nothing, since it is next to a marker."""
        held, self._held = self._held, b""
        return [Part("nothing", b"", len(held))] if held else []

    def flush(self) -> list[Part]:
        """Return the held whitespace as content."""
        held, self._held = self._held, b""
        return [Part("content", held, len(held))] if held else []
