"""Tool calls in a section of calls: each a name and arguments as JSON, with markers around both."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from ....backends.grammar import literal
from ..calls import CallParser
from ..json_call import LONGEST_NAME, Broken, JsonCallParser, Steps
from ..parsing import BLANKS
from .base import Check, ToolCallFormat
from .rules import GAP
from .rules import marker as marker_of

# A name, and around it a prefix, a number, whitespace, and the marker after it.
_LONGEST = LONGEST_NAME + 64


class Markers(NamedTuple):
    """The markers of a section.

    Args:
        begin, end: around all calls.
        call, call_end: around one call.
        arguments: between the name and the arguments.
    """

    begin: str
    call: str
    arguments: str
    call_end: str
    end: str


class SectionParser(JsonCallParser):
    """A parser of a section; its last marker may be missing, and so may that of the last call.

    Args:
        header: matches the text before the arguments; its first group is the function's name.
    """

    def __init__(self, markers: Markers, header: re.Pattern[str], check: Check | None) -> None:
        self._markers = [marker.encode() for marker in markers]
        self._header = header
        super().__init__(check=check)

    def _run(self) -> Steps:
        _, call, _, call_end, end = self._markers
        marker = yield from self._marker(call)
        while marker != end:
            follow: tuple[bytes, ...] = (call, end)
            if marker == call:
                yield from self._one()
                follow = (call_end, *follow)
            self._may_end = True
            marker = yield from self._marker(*follow)
            if marker == call_end:
                self._settle()

    def _one(self) -> Steps:
        arguments = self._markers[2]
        text = bytearray()
        while not text.endswith(arguments):
            text.append((yield))
            if len(text) > _LONGEST:
                raise Broken
        header = text.removesuffix(arguments).decode(errors="replace")
        match = self._header.fullmatch(header.strip(BLANKS.decode()))
        if match is None:
            raise Broken
        self._begin(match[1])
        byte = yield from self._next()
        if byte != ord("{"):
            raise Broken
        yield from self._value(byte, self._fragment)
        self._check_whole()


@dataclass(frozen=True, eq=False)
class Section(ToolCallFormat):
    """A format with a section of calls, whose header is the name; `markers` are `Markers`."""

    @property
    def _own(self) -> Markers:
        return Markers(*self.markers)

    @property
    def header(self) -> re.Pattern[str]:
        """The pattern of the text before the arguments; its first group is the name."""
        return re.compile(r"([A-Za-z0-9_.-]+)")

    def header_of(self, name: str, index: int) -> str:
        """Return the text before the arguments of the call with an index."""
        return name

    def header_rule(self, name: str) -> str:
        """Return the GBNF of the text before the arguments."""
        return literal(name)

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return SectionParser(self._own, self.header, check)

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"{name}{self._own.arguments}",)

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        begin, call, given, call_end, end = self._own
        parts = [
            f"{call}{self.header_of(name, index)}{given}"
            f"{json.dumps(arguments, ensure_ascii=False)}{call_end}"
            for index, (name, arguments) in enumerate(calls)
        ]
        return f"{begin}{''.join(parts)}{end}"

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        own = self._own
        begin, given = marker_of(own.call, special), marker_of(own.arguments, special)
        end = marker_of(own.call_end, special)
        return f"{begin} {self.header_rule(name)} {given} {arguments} {end}"

    @override
    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        calls = f"call ({GAP} call)*" if parallel else "call"
        return marker_of(self.begin, special), f"{GAP} {calls} {GAP} {marker_of(self.end, special)}"
