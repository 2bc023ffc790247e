"""Values that are not written as JSON, parsed byte by byte and returned as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import orjson

from ..json_call import Broken, Bytes, JsonCallParser, Steps
from ..parsing import BLANKS

_CLOSING = {ord("{"): ord("}"), ord("["): ord("]")}
_TUPLE = {ord("("): ord(")")}
_ENDS = frozenset(b",)]}" + BLANKS)
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONGEST_WORD = 400
_ESCAPED = {
    code: (b"\\" + bytes([code]) if code in b'"\\' else b"\\u%04x" % code)
    for code in (*range(0x20), *b'"\\', 0x7F)
}


class ValueParser(JsonCallParser):
    """A parser of values; subclasses parse strings, names, and what is around the values.

    Args:
        words: the JSON of each word.
        check: see `JsonCallParser`.
        python: True if a comma may follow the last value of a list or object, and tuples are lists.
    """

    def __init__(
        self,
        words: Mapping[bytes, bytes],
        check: Callable[[str], bool] | None = None,
        python: bool = False,
    ) -> None:
        self._words = words
        self._python = python
        self._closing = {**_CLOSING, **_TUPLE} if python else _CLOSING
        # Where in the fragment parentheses begin that have no comma yet, by their depth. Without
        # one, they are around a single value.
        self._plain: dict[int, int] = {}
        super().__init__(check=check)

    def _string_begins(self, byte: int) -> bool:
        """Return True if a string begins with a byte."""
        raise NotImplementedError

    def _text(self, byte: int) -> Steps:
        """Parse a string, whose first byte is given, and add it to the arguments as JSON."""
        raise NotImplementedError

    def _key(self, byte: int) -> Steps:
        """Parse the name of a property up to the colon, and add it to the arguments as JSON."""
        raise NotImplementedError

    def _number(self, word: bytes) -> bytes | None:
        """Return the JSON of a number, or None for another word."""
        return word if _NUMBER.fullmatch(word) else None

    def _converted(self, byte: int) -> Steps:
        """Parse a value of any kind, whose first byte is given, and add its JSON."""
        open_ones: list[int] = []
        while True:
            if byte in self._closing:
                self._open(byte, open_ones)
                byte = yield from self._next()
                if byte != open_ones[-1]:
                    if open_ones[-1] == ord("}"):
                        byte = yield from self._named(byte)
                    continue
                self._plain.pop(len(open_ones), None)
                self._close(open_ones)
            elif self._string_begins(byte):
                yield from self._text(byte)
            else:
                yield from self._word(byte)
            while True:
                if not open_ones:
                    return
                byte = yield from self._next()
                if byte == ord(","):
                    self._plain.pop(len(open_ones), None)
                    byte = yield from self._next()
                    if not self._python or byte != open_ones[-1]:
                        break
                if byte != open_ones[-1]:
                    raise Broken
                self._close(open_ones)
            self._fragment += b","
            if open_ones[-1] == ord("}"):
                byte = yield from self._named(byte)

    def _open(self, byte: int, open_ones: list[int]) -> None:
        open_ones.append(self._closing[byte])
        if byte in _TUPLE:
            self._plain[len(open_ones)] = len(self._fragment)
            byte = ord("[")
        self._fragment.append(byte)

    def _close(self, open_ones: list[int]) -> None:
        begun = self._plain.pop(len(open_ones), None)
        close = open_ones.pop()
        if begun is not None:
            del self._fragment[begun]
        else:
            self._fragment.append(ord("]") if close == ord(")") else close)

    def _flush(self) -> None:
        if not self._plain:
            super()._flush()

    def _named(self, byte: int) -> Bytes:
        """Parse the name of a property, and return the first byte of its value."""
        yield from self._key(byte)
        self._fragment += b":"
        return (yield from self._next())

    def _word(self, byte: int) -> Steps:
        """Parse a number or a word, which ends at the byte after it."""
        word = bytearray()
        while byte not in _ENDS:
            word.append(byte)
            if len(word) > _LONGEST_WORD:
                raise Broken
            byte = yield
        self._peeked = byte
        known = self._words.get(bytes(word)) or self._number(bytes(word))
        if known is None:
            raise Broken
        self._fragment += known

    def _put_text(self, data: bytes) -> None:
        """Add a part of a string without escapes, as JSON."""
        for byte in data:
            self._fragment += _ESCAPED.get(byte, bytes([byte]))

    def _put_name(self, name: bytes | bytearray) -> None:
        """Add the name of a property, as JSON."""
        self._fragment += orjson.dumps(bytes(name).decode(errors="replace"))
