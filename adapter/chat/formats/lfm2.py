"""Tool calls as LFM2 and LFM2.5 write them: a list of Python calls between two tokens.

`[name(key="value", other=5), other()]`: https://docs.liquid.ai/lfm/key-concepts/tool-use. If the
system prompt asks for JSON, the list has JSON objects, `{"name": …, "arguments": {…}}`.
"""

from __future__ import annotations

import ast
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....backends.grammar import PYTHON_CALL, as_python, literal
from ..calls import CallParser
from ..json_call import LONGEST_NAME, Broken, Bytes, Steps
from .base import Check, ToolCallFormat
from .rules import FunctionSchema
from .rules import arguments as arguments_of
from .values import ValueParser

BEGIN, END = "<|tool_call_start|>", "<|tool_call_end|>"
_LIST = "<|tool_list_start|>"
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}".encode())
_WORDS = {
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
_NUMBER = re.compile(rb"[+-]?[0-9.][0-9a-fA-FxXoO_.+-]*")
_HEXADECIMAL = {ord("x"): 2, ord("u"): 4, ord("U"): 8}


class PythonCallParser(ValueParser):
    """A parser of a list of calls, which is complete at its closing bracket."""

    def __init__(self, check: Check | None) -> None:
        super().__init__(_WORDS, check, python=True)

    def _run(self) -> Steps:
        if (yield from self._next()) != ord("["):
            raise Broken
        byte = yield from self._next()
        while True:
            yield from self._call(byte) if byte == ord("{") else self._one(byte)
            if (yield from self._more(ord("]"))):
                return
            byte = yield from self._next()
            if byte == ord("]"):
                return

    def _one(self, byte: int) -> Steps:
        name = bytearray()
        while byte != ord("("):
            name.append(byte)
            if _NAME.fullmatch(name) is None:
                raise Broken
            byte = yield
        self._begin(name.decode())
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
                raise Broken
            byte = yield
        name = bytes(key.strip())
        if name in names and self._check is not None:
            raise Broken
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
            raise Broken
        return byte

    def _string_begins(self, byte: int) -> bool:
        return byte in b"\"'"

    def _number(self, word: bytes) -> bytes | None:
        known = super()._number(word)
        if known is not None or _NUMBER.fullmatch(word) is None:
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
            raise Broken from None
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
                raise Broken
        try:
            self._put_text(unicodedata.lookup(text.decode()).encode())
        except (KeyError, ValueError):
            raise Broken from None
        return (yield)

    def _key(self, byte: int) -> Steps:
        if not self._string_begins(byte):
            raise Broken
        yield from self._text(byte)
        if (yield from self._next()) != ord(":"):
            raise Broken


@dataclass(frozen=True, eq=False)
class Lfm2(ToolCallFormat):
    """The format of LFM2; some of its templates mention only the tokens of the list of tools."""

    @override
    def is_of(self, template: str) -> bool:
        """The template of LFM2.5 has none of the tokens."""
        if "tools" not in template:
            return False
        return any(one in template for one in (BEGIN, _LIST, "List of tools: ["))

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return PythonCallParser(check)

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"{name}(",)

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return f"{BEGIN}[{', '.join(_written(*one) for one in calls)}]{END}"

    @override
    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        return arguments_of(function, name, prefix, index, PYTHON_CALL)

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        return f"{literal(name)} {arguments}"


FORMAT = Lfm2("lfm2", (BEGIN, END), BEGIN, END, in_list=True, in_order=True)


def _written(name: str, arguments: Any) -> str:
    values = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    pairs = (f"{key}={as_python(value)}" for key, value in values.items())
    return f"{name}({', '.join(pairs)})"
