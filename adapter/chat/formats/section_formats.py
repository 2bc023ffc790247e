"""Tool calls in a section of calls: each a name and arguments as JSON, with markers around both.

Its template shows calls, but no tools. They are described in the system message, as its model card
says: https://huggingface.co/deepseek-ai/DeepSeek-V3.1. The calls of DeepSeek R1 and the first V3
are fenced code between the same markers, which is another format.

`functions.name:0`, the arguments as JSON, and so on; the number counts all calls of a conversation:
https://huggingface.co/moonshotai/Kimi-K2-Instruct, `docs/tool_call_guidance.md`. The template shows
a result with the id of its call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from typing_extensions import override

from ....backends.grammar import literal
from ..parsers import BLANKS, LONGEST_NAME, Broken, CallParser, JsonCallParser, Steps
from .base import GAP, Check, Place, ToolCallFormat
from .base import marker as marker_of

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


_DEEPSEEK = Markers(
    begin="<｜tool▁calls▁begin｜>",
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
_PREFACE = """\
{%- if tools -%}
{%- set described -%}
## Tools
You have access to the following tools:
{% for tool in tools %}

### {{ tool.function.name }}
Description: {{ tool.function.description }}

Parameters: {{ tool.function.parameters | tojson }}
{% endfor %}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments\
<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
{%- endset -%}
{%- set head = messages[:1] if messages[0].role == 'system' else [] -%}
{%- set own = [{'role': 'system', 'content': described}] -%}
{%- set messages = head + own + messages[head | length:] -%}
{%- endif -%}
"""


@dataclass(frozen=True, eq=False)
class DeepSeek(Section):
    """The format of DeepSeek V3.1."""

    @override
    def is_of(self, template: str) -> bool:
        return _DEEPSEEK.arguments in template and "```json" not in template


DEEPSEEK_V3_1 = DeepSeek(
    "deepseek-v3.1", _DEEPSEEK, _DEEPSEEK.begin, _DEEPSEEK.end, in_order=True, preface=_PREFACE
)


_KIMI = Markers(
    begin="<|tool_calls_section_begin|>",
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
)
_RESTARTS = re.compile(r"""[:]['"]\s*[+~]\s*\(?loop\.index0""")


@dataclass(frozen=True, eq=False)
class KimiK2(Section):
    """The format of Kimi K2.

    Args:
        restarts: True if the template numbers the calls of each message from 0.
    """

    restarts: bool = False

    @override
    def is_of(self, template: str) -> bool:
        if _KIMI.begin not in template or _KIMI.arguments not in template:
            return False
        return (_RESTARTS.search(template) is not None) == self.restarts

    @override
    def call_id(self, call_id: str, place: Place) -> str:
        """The name of a call that the template shows by its id."""
        number = place.in_message if self.restarts else place.in_conversation
        return self.header_of(place.name, number)

    @property
    @override
    def header(self) -> re.Pattern[str]:
        # One of the prefix and the number may be missing.
        return re.compile(r"(?=functions\.|.*:)(?:functions\.)?([A-Za-z0-9_.-]+)(?::[0-9]{1,6})?")

    @override
    def header_of(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    @override
    def header_rule(self, name: str) -> str:
        return f"{literal(f'functions.{name}:')} [0-9]{{1,4}}"

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        return (f"functions.{name}:",)


KIMI_K2 = KimiK2("kimi-k2", _KIMI, _KIMI.begin, _KIMI.end, in_order=True, interrupts=True)
# The first template of July 2025.
KIMI_K2_FIRST = KimiK2("kimi-k2-first", _KIMI, _KIMI.begin, _KIMI.end, restarts=True)
