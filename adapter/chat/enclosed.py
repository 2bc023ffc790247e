"""Tags around an answer, which are not content."""

from __future__ import annotations

from typing_extensions import override

from ..generation.parts import Parser, Part
from .parsing import BLANKS, MarkerFinder


class Enclosed(Parser):
    """A parser that drops the tags around the answer, and the whitespace next to them.

    Args:
        begin, end: the tags. An answer without the first keeps the second, too.
        answer: the parser of the text between the tags.
    """

    def __init__(self, begin: str, end: str, answer: Parser) -> None:
        self._begin, self._end = begin.encode(), end.encode()
        self._ends = MarkerFinder([end], frozenset())
        self._answer = answer
        self._held = b""
        # A plain function, because a bound method would make a reference cycle.
        self._read = Enclosed._starts

    @property
    @override
    def in_call(self) -> bool:
        return self._answer.in_call

    @override
    def feed(self, data: bytes, mark: bool = False) -> list[Part]:
        """No tag is a control token."""
        if mark:
            return [*self._rest(), *self._answer.feed(data, True)]
        text, self._held = self._held + data, b""
        return self._read(self, text)

    @override
    def end(self) -> list[Part]:
        return [*self._rest(), *self._answer.end()]

    def _rest(self) -> list[Part]:
        """Return the held text: the last tag is dropped, other text belongs to the answer."""
        held, self._held = self._held, b""
        inside = self._read is Enclosed._inside
        if not held or (inside and held.strip(BLANKS) == self._end):
            return [Part("nothing", b"", len(held))] if held else []
        return self._answer.feed(held)

    def _starts(self, text: bytes) -> list[Part]:
        bare = text.lstrip(BLANKS)
        if bare.startswith(self._begin):
            self._read = Enclosed._leads
            size = len(text) - len(bare) + len(self._begin)
            return [Part("nothing", b"", size), *self._leads(text[size:])]
        if self._begin.startswith(bare):
            self._held = text
            return []
        self._read = Enclosed._passes
        return self._answer.feed(text)

    def _leads(self, text: bytes) -> list[Part]:
        """Drop the whitespace after the first tag."""
        bare = text.lstrip(BLANKS)
        parts = [Part("nothing", b"", len(text) - len(bare))] if len(bare) < len(text) else []
        if not bare:
            return parts
        self._read = Enclosed._inside
        return parts + self._inside(bare)

    def _inside(self, text: bytes) -> list[Part]:
        """Hold back the last tag, which is only known at the end of the text."""
        at = text.rfind(self._end)
        if at < 0 or text[at + len(self._end) :].strip(BLANKS):
            at = len(text) - self._ends.held(text)
        sure = text[:at].rstrip(BLANKS)
        self._held = text[len(sure) :]
        return self._answer.feed(sure) if sure else []

    def _passes(self, text: bytes) -> list[Part]:
        return self._answer.feed(text)
