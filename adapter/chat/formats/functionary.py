"""Tool calls as Functionary v3.1 and v3.2 write them.

v3.1: `<function=name>{…}</function>`, and code of the Python interpreter after `<|python_tag|>`.
v3.2: every part of a turn begins with its recipient after `>>>`, which the prompt already has:
`all` and content, or a function's name and its arguments: https://github.com/MeetKai/functionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from typing_extensions import override

from ....backends.grammar.regex import literal
from ...generation.choice import Parser, Part
from ..parsers import CallParser, ParseFailed, Steps, ToolCallParser
from .base import Check, NamedFormat
from .json_formats import INTERPRETERS, PYTHON_TAG, CodeParser

CONTENT = "all"


class FunctionParser(CodeParser):
    """A parser of a name, the mark after it, and arguments.

    Args:
        after: the mark after the name.
        check: see `CallParser`.
        interpreter: the name of the function that gets code; None for the one that is named.
    """

    def __init__(self, after: int, check: Check | None, interpreter: str | None = None) -> None:
        self._after = after
        self._interpreter = interpreter
        super().__init__(check)

    @override
    def end(self) -> list[Part]:
        text = (self._code or b"").decode(errors="replace").strip()
        if not text:
            raise ParseFailed
        self._fragment += orjson.dumps({"code": text})
        return self.taken()

    def _run(self) -> Steps:
        name = self._interpreter
        if name is None:
            name = yield from self._function_name((yield), self._after)
            if name == CONTENT and self._after == ord("\n"):
                return
        self._begin(name)
        byte = yield from self._next()
        if byte != ord("{") and name not in INTERPRETERS:
            raise ParseFailed
        yield from self._object(byte) if byte == ord("{") else self._rest(byte)


class _Marked(ToolCallParser):
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


class _Headed(ToolCallParser):
    """A parser of text that begins without the first marker, which the prompt already has."""

    def __init__(self, make: Callable[[bool], CallParser], *given: Any) -> None:
        super().__init__(make, *given)
        self._begin(b"")


class Functionary31(NamedFormat):
    """Calls as `<function=name>{…}</function>`, and code of the interpreter after its marker."""

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

        makers = {self.begin.encode(): make, PYTHON_TAG.encode(): code}
        own = frozenset() if forced else special
        return _Marked(makers, self.end, False, own, enforced, (), "", forced)


class Functionary32(NamedFormat):
    """Parts of a turn that begin with a recipient, which is a function or `all` for content."""

    calls = _Headed

    @override
    def make_parser(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return FunctionParser(ord("\n"), check)

    @override
    def write(self, name: str, arguments: Any, index: int) -> str:
        return f"{self.optional_begin}{super().write(name, arguments, index)}"

    @override
    def envelope(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """The prompt has the marker of the first call."""
        return "", f"call ({literal(self.optional_begin)} call)*" if parallel else "call"
