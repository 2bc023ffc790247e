"""Tool calls whose arguments are not JSON: Python for LFM2, and the notation of Gemma 4.

If the system prompt asks for JSON, the list of LFM2 has objects, `{"name": …, "arguments": {…}}`.
"""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ....backends.grammar.notation import MARK, as_gemma, as_python
from ..parsers import BLANKS, LONGEST_NAME, Bytes, CallParser, ParseFailed, Steps
from .base import Check, named_arguments

_CLOSING = {ord("{"): ord("}"), ord("["): ord("]")}
_TUPLE = {ord("("): ord(")")}
_ENDS = frozenset(b",)]}" + BLANKS)
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONGEST_WORD = 400
_ESCAPED = {
    code: (b"\\" + bytes([code]) if code in b'"\\' else b"\\u%04x" % code)
    for code in (*range(0x20), *b'"\\', 0x7F)
}


class ValueParser(CallParser):
    """A parser of values; subclasses parse strings, names, and what is around the values.

    Args:
        words: the JSON of each word.
        check: see `CallParser`.
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
        super().__init__(check)

    def _string_begins(self, byte: int) -> bool:
        """Return True if a string begins with a byte."""
        raise NotImplementedError

    def _text(self, byte: int) -> Steps:
        """Parse a string, whose first byte is given, and add it to the arguments as JSON."""
        raise NotImplementedError

    def _key(self, byte: int) -> Steps:
        """Parse the name of a property and the colon, and add the name to the arguments as JSON."""
        if not self._string_begins(byte):
            raise ParseFailed
        yield from self._text(byte)
        if (yield from self._next()) != ord(":"):
            raise ParseFailed

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
                    raise ParseFailed
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
                raise ParseFailed
            byte = yield
        self._peeked = byte
        known = self._words.get(bytes(word)) or self._number(bytes(word))
        if known is None:
            raise ParseFailed
        self._fragment += known

    def _put_text(self, data: bytes) -> None:
        """Add a part of a string without escapes, as JSON."""
        for byte in data:
            self._fragment += _ESCAPED.get(byte, bytes([byte]))

    def _put_name(self, name: bytes | bytearray) -> None:
        """Add the name of a property, as JSON."""
        self._fragment += orjson.dumps(bytes(name).decode(errors="replace"))


_PYTHON_WORDS = {
    b"True": b"true", b"False": b"false", b"None": b"null",
    b"true": b"true", b"false": b"false", b"null": b"null",
}  # fmt: skip
# Escapes of Python as JSON; hexadecimal ones follow by their length.
_ESCAPES = {
    ord("n"): b"\\n", ord("t"): b"\\t", ord("r"): b"\\r", ord("b"): b"\\b", ord("f"): b"\\f",
    ord("\\"): b"\\\\", ord('"'): b'\\"', ord("'"): b"'", ord("\n"): b"", ord("/"): b"/",
    ord("a"): b"\\u0007", ord("v"): b"\\u000b",
}  # fmt: skip
_OCTAL = b"01234567"
_LONGEST_CHARACTER = 100
# Numbers of Python, also those that JSON lacks: `1_000`, `.5`, `0x1F`.
_PYTHON_NUMBER = re.compile(rb"[+-]?[0-9.][0-9a-fA-FxXoO_.+-]*")
_HEXADECIMAL = {ord("x"): 2, ord("u"): 4, ord("U"): 8}


class PythonCallParser(ValueParser):
    """A parser of a list of calls, which is complete at its closing bracket."""

    def __init__(self, check: Check | None) -> None:
        super().__init__(_PYTHON_WORDS, check, python=True)

    def _run(self) -> Steps:
        if (yield from self._next()) != ord("["):
            raise ParseFailed
        byte = yield from self._next()
        while True:
            yield from self._call(byte) if byte == ord("{") else self._one(byte)
            if (yield from self._more(ord("]"))):
                return
            byte = yield from self._next()
            if byte == ord("]"):
                return

    def _one(self, byte: int) -> Steps:
        self._begin((yield from self._function_name(byte, ord("("))))
        self._fragment += b"{"
        byte = yield from self._next()
        names: set[bytes] = set()
        while byte != ord(")"):
            byte = yield from self._keyword(byte, names)
        self._fragment += b"}"
        self._check_whole()

    def _keyword(self, byte: int, names: set[bytes]) -> Bytes:
        """Parse an argument and the comma after it; return the byte that follows.

        Args:
            names: the names so far; a second argument of one name is an error, as in Python.
        """
        key = bytearray()
        while byte != ord("="):
            key.append(byte)
            if byte in b"\"'(),[]{}\n":
                raise ParseFailed
            byte = yield
        name = bytes(key.strip())
        if name in names and self._check is not None:
            raise ParseFailed
        names.add(name)
        self._put_name(name)
        self._fragment += b":"
        yield from self._converted((yield from self._next()))
        byte = yield from self._next()
        if byte == ord(","):
            byte = yield from self._next()
            if byte != ord(")"):
                self._fragment += b","
        elif byte != ord(")"):
            raise ParseFailed
        return byte

    def _string_begins(self, byte: int) -> bool:
        return byte in b"\"'"

    def _number(self, word: bytes) -> bytes | None:
        known = super()._number(word)
        if known is not None or _PYTHON_NUMBER.fullmatch(word) is None:
            return known
        try:
            value = ast.literal_eval(word.decode())
        except (SyntaxError, ValueError):
            return None
        is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        return json.dumps(value).encode() if is_number else None

    def _text(self, byte: int) -> Steps:
        quote = byte
        self._fragment += b'"'
        byte = yield
        while byte != quote:
            if byte == ord("\\"):
                byte = yield from self._escape((yield))
            else:
                self._put_text(bytes([byte]))
                byte = yield
        self._fragment += b'"'

    def _escape(self, byte: int) -> Bytes:
        """Parse an escape, whose first byte after the backslash is given; return the next byte."""
        if byte in _OCTAL:
            return (yield from self._octal(byte))
        if byte == ord("N"):
            return (yield from self._named_character())
        size = _HEXADECIMAL.get(byte)
        if size is None:
            known = _ESCAPES.get(byte)
            if known is None:
                # Python keeps the backslash of an unknown escape.
                self._put_text(bytes([ord("\\"), byte]))
            else:
                self._fragment += known
            return (yield)
        digits = bytearray()
        while len(digits) < size:
            digits.append((yield))
        try:
            code = int(digits, 16)
            # A pair of surrogates is one character in JSON.
            self._fragment += b"\\u%04x" % code if code < 0x10000 else chr(code).encode()
        except ValueError:
            raise ParseFailed from None
        return (yield)

    def _octal(self, byte: int) -> Bytes:
        digits = bytearray()
        while byte in _OCTAL and len(digits) < 3:
            digits.append(byte)
            byte = yield
        self._fragment += b"\\u%04x" % int(digits, 8)
        return byte

    def _named_character(self) -> Bytes:
        """Parse the name of a character, `{…}`; without one, the text is kept."""
        text = bytearray()
        byte = yield
        if byte != ord("{"):
            self._put_text(b"\\N")
            return byte
        while (byte := (yield)) != ord("}"):
            text.append(byte)
            if len(text) > _LONGEST_CHARACTER:
                raise ParseFailed
        try:
            self._put_text(unicodedata.lookup(text.decode()).encode())
        except (KeyError, ValueError):
            raise ParseFailed from None
        return (yield)


def keywords(arguments: Any) -> str:
    """Write arguments as those of a Python call."""
    pairs = (f"{key}={as_python(value)}" for key, value in named_arguments(arguments).items())
    return f"({', '.join(pairs)})"


CALL = "call:"
_MARK = MARK.encode()
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}")
# The template writes null as Jinja does.
_WORDS = {b"true": b"true", b"false": b"false", b"null": b"null", b"None": b"null"}
_LONGEST_HEADER = len(CALL) + LONGEST_NAME


class Gemma4Parser(ValueParser):
    """A parser of one call."""

    def __init__(self, check: Check | None) -> None:
        super().__init__(_WORDS, check)

    def _run(self) -> Steps:
        byte = yield from self._next()
        header = bytearray()
        while byte != ord("{"):
            header.append(byte)
            if len(header) > _LONGEST_HEADER:
                raise ParseFailed
            byte = yield
        text = header.decode(errors="replace").strip()
        name = text.removeprefix(CALL)
        if name == text or _NAME.fullmatch(name) is None:
            raise ParseFailed
        self._begin(name)
        yield from self._converted(byte)
        self._check_whole()

    def _string_begins(self, byte: int) -> bool:
        return byte == _MARK[0]

    def _text(self, byte: int) -> Steps:
        yield from self._opened(byte)
        self._fragment += b'"'
        held = b""
        while held != _MARK:
            held += bytes([(yield)])
            if not _MARK.startswith(held):
                # Only the first byte of the mark can begin it again.
                kept = held[-1:] if held[-1:] == _MARK[:1] else b""
                self._put_text(held.removesuffix(kept))
                held = kept
        self._fragment += b'"'

    def _opened(self, byte: int) -> Steps:
        """Parse the mark before a string."""
        for expected in _MARK[1:]:
            if byte != _MARK[0] or (yield) != expected:
                raise ParseFailed

    def _key(self, byte: int) -> Steps:
        if self._string_begins(byte):
            yield from super()._key(byte)
            return
        name = bytearray()
        while byte != ord(":"):
            name.append(byte)
            if byte in b"{}[]<\n":
                raise ParseFailed
            byte = yield
        self._put_name(name.strip())


def as_gemma_arguments(arguments: Any) -> str:
    """Write arguments in the notation of Gemma 4."""
    return as_gemma(named_arguments(arguments))
