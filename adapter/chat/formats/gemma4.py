"""Tool calls as Gemma 4 writes them: names without quotes, and strings between tokens.

`call:name{key:<|"|>text<|"|>,other:5}`, the arguments sorted by name:
https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....backends.grammar import GEMMA, MARK, as_gemma, literal
from ..calls import CallParser
from ..json_call import LONGEST_NAME, Broken, Steps
from .base import Check, ToolCallFormat
from .rules import FunctionSchema
from .rules import arguments as arguments_of
from .values import ValueParser

BEGIN, END = "<|tool_call>", "<tool_call|>"
CALL = "call:"
_MARK = MARK.encode()
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}")
# The template writes null as Jinja does.
_WORDS = {b"true": b"true", b"false": b"false", b"null": b"null", b"None": b"null"}
_LONGEST = len(CALL) + LONGEST_NAME


class Gemma4Parser(ValueParser):
    """A parser of one call."""

    def __init__(self, check: Check | None) -> None:
        super().__init__(_WORDS, check)

    def _run(self) -> Steps:
        byte = yield from self._next()
        header = bytearray()
        while byte != ord("{"):
            header.append(byte)
            if len(header) > _LONGEST:
                raise Broken
            byte = yield
        text = header.decode(errors="replace").strip()
        name = text.removeprefix(CALL)
        if name == text or _NAME.fullmatch(name) is None:
            raise Broken
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
                raise Broken

    def _key(self, byte: int) -> Steps:
        if self._string_begins(byte):
            yield from self._text(byte)
            if (yield from self._next()) != ord(":"):
                raise Broken
            return
        name = bytearray()
        while byte != ord(":"):
            name.append(byte)
            if byte in b"{}[]<\n":
                raise Broken
            byte = yield
        self._put_name(name.strip())


@dataclass(frozen=True, eq=False)
class Gemma4(ToolCallFormat):
    """The format of Gemma 4."""

    @override
    def is_of(self, template: str) -> bool:
        return BEGIN + CALL in template

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return Gemma4Parser(check)

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"{CALL}{name}{{",)

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(
            f"{BEGIN}{CALL}{name}{as_gemma(_as_object(arguments))}{END}"
            for name, arguments in calls
        )

    @override
    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        return arguments_of(function, name, prefix, index, GEMMA)

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        return f"{literal(CALL + name)} {arguments}"


def _as_object(arguments: Any) -> Any:
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


FORMAT = Gemma4("gemma4", (BEGIN, END, MARK), BEGIN, END, in_order=True, again=CALL)
