"""Tool calls as Kimi K2 writes them: a section of calls, each with an id that names the function.

`functions.name:0`, the arguments as JSON, and so on; the number counts all calls of a conversation:
https://huggingface.co/moonshotai/Kimi-K2-Instruct, `docs/tool_call_guidance.md`. The template shows
a result with the id of its call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....backends.grammar import literal
from ...generation.parts import Part
from ..calls import CallParser
from ..json_call import Broken, JsonCallParser, Steps
from ..parsing import BLANKS
from .base import Check, Place, ToolCallFormat
from .rules import GAP
from .rules import marker as marker_of

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
MARKERS = (BEGIN, CALL, ARGUMENTS, CALL_END, END)
_ID = re.compile(r"(?:functions\.)?([A-Za-z0-9_.-]{1,64}):[0-9]{1,6}")
_LONGEST = 128 + len(ARGUMENTS)
_RESTARTS = re.compile(r"""[:]['"]\s*[+~]\s*\(?loop\.index0""")


class SectionParser(JsonCallParser):
    """A parser of a section; its last marker may be missing, and so may that of the last call."""

    def __init__(self, check: Check | None) -> None:
        # True while the text may end: a call is complete, and no other has begun.
        self._may_end = False
        super().__init__(check=check)

    def end(self) -> list[Part]:
        """See `CallParser.end`."""
        if not self._may_end:
            raise Broken
        return self.taken()

    def _run(self) -> Steps:
        marker = yield from self._marker((CALL,))
        while marker != END:
            follow: tuple[str, ...] = (CALL, END)
            if marker == CALL:
                yield from self._one()
                follow = (CALL_END, *follow)
            self._may_end = True
            marker = yield from self._marker(follow)
            self._may_end = False

    def _one(self) -> Steps:
        header = bytearray()
        while not header.endswith(ARGUMENTS.encode()):
            header.append((yield))
            if len(header) > _LONGEST:
                raise Broken
        text = header.decode(errors="replace").removesuffix(ARGUMENTS)
        match = _ID.fullmatch(text.strip(BLANKS.decode()))
        if match is None:
            raise Broken
        self._begin(match[1])
        byte = yield from self._next()
        if byte != ord("{"):
            raise Broken
        yield from self._value(byte, self._fragment)
        self._check_whole()

    def _marker(self, markers: Sequence[str]) -> Generator[None, int, str]:
        """Parse one of several markers, none of which begins another, and return it."""
        byte = yield from self._next()
        text = ""
        while True:
            text += chr(byte)
            if text in markers:
                return text
            if not any(one.startswith(text) for one in markers):
                raise Broken
            self._may_end = False
            byte = yield


@dataclass(frozen=True, eq=False)
class KimiK2(ToolCallFormat):
    """The format of Kimi K2.

    Args:
        restarts: True if the template numbers the calls of each message from 0.
    """

    restarts: bool = False

    def is_of(self, template: str) -> bool:
        """See `ToolCallFormat.is_of`."""
        if BEGIN not in template or ARGUMENTS not in template:
            return False
        return (_RESTARTS.search(template) is not None) == self.restarts

    def call_id(self, call_id: str, place: Place) -> str:
        """See `ToolCallFormat.call_id`; the name of a call that the template shows by its id."""
        number = place.in_message if self.restarts else place.in_conversation
        return f"functions.{place.name}:{number}"

    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """See `ToolCallFormat.one`."""
        return SectionParser(check)

    def spelled(self, name: str) -> tuple[str, ...]:
        """See `ToolCallFormat.spelled`."""
        return (f"functions.{name}:",)

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """See `ToolCallFormat.written`."""
        parts = [
            f"{CALL}functions.{name}:{index}{ARGUMENTS}"
            f"{json.dumps(arguments, ensure_ascii=False)}{CALL_END}"
            for index, (name, arguments) in enumerate(calls)
        ]
        return f"{BEGIN}{''.join(parts)}{END}"

    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        """See `ToolCallFormat.call`."""
        begin, own = marker_of(CALL, special), literal(f"functions.{name}:")
        given, end = marker_of(ARGUMENTS, special), marker_of(CALL_END, special)
        return f"{begin} {own} [0-9]{{1,4}} {given} {arguments} {end}"

    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """See `ToolCallFormat.around`."""
        calls = f"call ({GAP} call)*" if parallel else "call"
        return marker_of(BEGIN, special), f"{GAP} {calls} {GAP} {marker_of(END, special)}"


FORMAT = KimiK2("kimi-k2", MARKERS, BEGIN, in_order=True)
# The first template of July 2025.
FIRST = KimiK2("kimi-k2-first", MARKERS, BEGIN, restarts=True)
