"""Values that are not written as JSON, parsed byte by byte and returned as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import orjson

from ..json_call import Broken, Bytes, JsonCallParser, Steps
from ..parsing import BLANKS

_CLOSING = {ord("{"): ord("}"), ord("["): ord("]")}
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
        trailing: True if a comma may follow the last value of a list or object.
    """

    def __init__(
        self,
        words: Mapping[bytes, bytes],
        check: Callable[[str], bool] | None = None,
        trailing: bool = False,
    ) -> None:
        self._words = words
        self._trailing = trailing
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

    def _converted(self, byte: int) -> Steps:
        """Parse a value of any kind, whose first byte is given, and add its JSON."""
        open_ones: list[int] = []
        while True:
            if byte in _CLOSING:
                self._fragment.append(byte)
                open_ones.append(_CLOSING[byte])
                byte = yield from self._next()
                if byte != open_ones[-1]:
                    if open_ones[-1] == ord("}"):
                        byte = yield from self._named(byte)
                    continue
                self._fragment.append(open_ones.pop())
            elif self._string_begins(byte):
                yield from self._text(byte)
            else:
                yield from self._word(byte)
            while True:
                if not open_ones:
                    return
                byte = yield from self._next()
                if byte == ord(","):
                    byte = yield from self._next()
                    if not self._trailing or byte != open_ones[-1]:
                        break
                if byte != open_ones[-1]:
                    raise Broken
                self._fragment.append(open_ones.pop())
            self._fragment += b","
            if open_ones[-1] == ord("}"):
                byte = yield from self._named(byte)

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
        known = self._words.get(bytes(word))
        if known is None and _NUMBER.fullmatch(word) is None:
            raise Broken
        self._fragment += word if known is None else known

    def _put_text(self, data: bytes) -> None:
        """Add a part of a string without escapes, as JSON."""
        for byte in data:
            self._fragment += _ESCAPED.get(byte, bytes([byte]))

    def _put_name(self, name: bytes | bytearray) -> None:
        """Add the name of a property, as JSON."""
        self._fragment += orjson.dumps(bytes(name).decode(errors="replace"))
