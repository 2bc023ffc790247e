"""The markers between what a model thinks, says and calls (sans-I/O).

Parsers take bytes, because a token may end inside a character, and tell of each part how many
bytes of the text it settles: so log-probabilities and stops find their places again.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..generation.parts import Part

BLANKS = b" \t\r\n"


class Plain:
    """A reader for which all is content."""

    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """See `Parser.feed`; a token that is no text is not shown."""
        return [Part("nothing" if mark else "content", b"" if mark else data, len(data))]

    def end(self) -> list[Part]:
        """See `Parser.end`."""
        return []


class MarkerFinder:
    """Looks for the first of some markers in text.

    Args:
        markers: none of them may stand in another.
        special: those that are tokens of the model's, so that no text is one.
    """

    def __init__(self, markers: Sequence[str], special: frozenset[str]) -> None:
        self.all = frozenset(marker.encode() for marker in markers)
        self._texts = [marker.encode() for marker in markers if marker not in special]

    def take_texts(self) -> None:
        """From here on text that is spelled like a marker is one."""
        self._texts = sorted(self.all)

    def find(self, text: bytes) -> tuple[int, bytes] | None:
        """Where the first one begins, and which it is."""
        found = [(at, one) for one in self._texts if (at := text.find(one)) >= 0]
        return min(found) if found else None

    def held(self, text: bytes) -> int:
        """How many bytes at a text's end may be the beginning of one."""
        longest = 0
        for one in self._texts:
            for size in range(min(len(one) - 1, len(text)), longest, -1):
                if text.endswith(one[:size]):
                    longest = size
                    break
        return longest


class Blanks:
    """Content without the blanks at its end, until it is known that more follows."""

    def __init__(self) -> None:
        self._held = b""

    def content(self, data: bytes) -> list[Part]:
        """Take content; what is sure of it."""
        data = self._held + data
        sure = data.rstrip(BLANKS)
        self._held = data[len(sure) :]
        return [Part("content", sure, len(sure))] if sure else []

    def drop(self) -> list[Part]:
        """What was held stands beside a marker: nobody sees it."""
        held, self._held = self._held, b""
        return [Part("nothing", b"", len(held))] if held else []

    def flush(self) -> list[Part]:
        """What was held is content."""
        held, self._held = self._held, b""
        return [Part("content", held, len(held))] if held else []
