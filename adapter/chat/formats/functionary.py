"""Tool calls as Functionary v3.1 and v3.2 write them.

v3.1: `<function=name>{…}</function>`, and code of the Python interpreter after `<|python_tag|>`.
v3.2: every part of a turn begins with its recipient after `>>>`, which the prompt already has:
`all` and content, or a function's name and its arguments: https://github.com/MeetKai/functionary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from typing_extensions import override

from ....backends.grammar import literal
from ...generation.parts import Parser, Part
from ..parsers import LONGEST_NAME, Broken, CallParser, Calls, JsonCallParser, Steps
from .base import GAP, Check, ToolCallFormat
from .json_formats import INTERPRETERS
from .json_formats import PYTHON_TAG as MARKER

BEGIN, END = "<function=", "</function>"
NEXT, CONTENT = ">>>", "all"
_LINE = literal("\n")
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}".encode())


class FunctionParser(JsonCallParser):
    """A parser of a name, the mark after it, and arguments.

    Args:
        after: the mark after the name.
        check: see `JsonCallParser`.
        interpreter: the name of the function that gets code; None for the one that is named.
    """

    def __init__(self, after: int, check: Check | None, interpreter: str | None = None) -> None:
        self._after = after
        self._interpreter = interpreter
        self._code: bytearray | None = None
        super().__init__(check=check)

    @override
    def end(self) -> list[Part]:
        """Code extends to the end of the text."""
        text = (self._code or b"").decode(errors="replace").strip()
        if not text:
            raise Broken
        self._fragment += orjson.dumps({"code": text})
        return self.taken()

    def _run(self) -> Steps:
        name = self._interpreter
        if name is None:
            name = yield from self._header()
            if name == CONTENT and self._after == ord("\n"):
                return
        self._begin(name)
        byte = yield from self._next()
        if byte == ord("{"):
            yield from self._value(byte, self._fragment)
            self._check_whole()
            return
        if name not in INTERPRETERS:
            raise Broken
        self._code = bytearray([byte])
        while True:
            self._code.append((yield))

    def _header(self) -> Generator[None, int, str]:
        name = bytearray()
        while (byte := (yield)) != self._after:
            name.append(byte)
            if _NAME.fullmatch(name) is None:
                raise Broken
        return name.decode()


class _Marked(Calls):
    """A parser in which the calls after each marker have a kind of their own.

    Args:
        makers: makes the parser of a call, by the marker.
    """

    def __init__(self, makers: Mapping[bytes, Callable[[bool], CallParser]], *given: Any) -> None:
        super().__init__(next(iter(makers.values())), [one.decode() for one in makers], *given)
        self._makers = makers

    def _begin(self, marker: bytes) -> None:
        self._make = self._makers[marker]
        super()._begin(marker)


class _Headed(Calls):
    """A parser of text that begins without the first marker, which the prompt already has."""

    def __init__(self, make: Callable[[bool], CallParser], *given: Any) -> None:
        super().__init__(make, *given)
        self._begin(b"")


@dataclass(frozen=True, eq=False)
class Functionary31(ToolCallFormat):
    """The format of v3.1."""

    @override
    def is_of(self, template: str) -> bool:
        """Other formats have parameters in tags after the same tag."""
        return BEGIN in template and "<parameter=" not in template and "tools" in template

    @override
    def parser(
        self, functions: Mapping[str, Any], special: frozenset[str], enforced: bool, forced: bool
    ) -> Parser:
        check = functions.__contains__
        interpreter = next((one for one in INTERPRETERS if check(one)), INTERPRETERS[0])

        def make(checked: bool) -> CallParser:
            return FunctionParser(ord(">"), check if checked else None)

        def code(_: bool) -> CallParser:
            return FunctionParser(0, check, interpreter)

        makers = {BEGIN.encode(): make, MARKER.encode(): code}
        own = frozenset() if forced else special
        return _Marked(makers, self.end, False, own, enforced, (), "", forced)

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"{BEGIN}{name}>",)

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(
            f"{BEGIN}{name}>{json.dumps(arguments, ensure_ascii=False)}{END}"
            for name, arguments in calls
        )

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        return f"{literal(name)} {literal('>')} {arguments} {literal(END)}"

    @override
    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        begin = literal(BEGIN)
        return begin, f"call ({GAP} {begin} call)*" if parallel else "call"


@dataclass(frozen=True, eq=False)
class Functionary32(ToolCallFormat):
    """The format of v3.2."""

    calls = _Headed

    @override
    def is_of(self, template: str) -> bool:
        return NEXT + CONTENT in template

    @property
    @override
    def begins(self) -> tuple[str, ...]:
        return (NEXT,)

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return FunctionParser(ord("\n"), check)

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"{NEXT}{name}\n",)

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        return "".join(
            f"{NEXT}{name}\n{json.dumps(arguments, ensure_ascii=False)}"
            for name, arguments in calls
        )

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        return f"{literal(name)} {_LINE} {arguments}"

    @override
    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """The prompt has the marker of the first call."""
        return "", f"call ({literal(NEXT)} call)*" if parallel else "call"


FORMAT_3_1 = Functionary31("functionary-v3.1", (MARKER,), BEGIN, END, in_order=True)
FORMAT_3_2 = Functionary32(
    "functionary-v3.2", answer=f"{CONTENT}\n", recipient=f"{CONTENT}\n", in_order=True
)
