"""Tool calls in a section of calls: each a name and arguments as JSON, with markers around both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from typing_extensions import override

from ....backends.grammar.regex import literal
from ..parsers import BLANKS, LONGEST_NAME, CallParser, ParseFailed, Steps
from .base import CallPosition, Check, ToolCallFormat, as_json, marker

_NAME = re.compile(r"([A-Za-z0-9_.-]+)")
# One of the prefix and the number may be missing.
_NUMBERED = re.compile(r"(?=functions\.|.*:)(?:functions\.)?([A-Za-z0-9_.-]+)(?::[0-9]{1,6})?")
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


class SectionParser(CallParser):
    """A parser of a section; its last marker may be missing, and so may that of the last call.

    Args:
        header: matches the text before the arguments; its first group is the function's name.
    """

    def __init__(self, markers: Markers, header: re.Pattern[str], check: Check | None) -> None:
        self._markers = [one.encode() for one in markers]
        self._header = header
        super().__init__(check)

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
                raise ParseFailed
        header = text.removesuffix(arguments).decode(errors="replace")
        match = self._header.fullmatch(header.strip(BLANKS.decode()))
        if match is None:
            raise ParseFailed
        self._begin(match[1])
        yield from self._object((yield from self._next()))


@dataclass(frozen=True, eq=False)
class Section(ToolCallFormat):
    """A format with a section of calls; `tokens` are `Markers`.

    Args:
        numbered: the calls that a number after the name counts; the text before the arguments is
            then `functions.name:0`, and otherwise the name. It is also the id of an earlier call.
    """

    block: Literal["", "list", "section"] = field(default="section", kw_only=True)
    numbered: Literal["", "message", "conversation"] = ""

    @property
    def _own(self) -> Markers:
        return Markers(*self.tokens)

    @override
    def make_parser(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return SectionParser(self._own, _NUMBERED if self.numbered else _NAME, check)

    @override
    def call_id(self, call_id: str, place: CallPosition) -> str:
        if not self.numbered:
            return super().call_id(call_id, place)
        in_message = self.numbered == "message"
        return self._header(place.name, place.in_message if in_message else place.in_conversation)

    @override
    def name_spellings(self, name: str) -> tuple[str, ...]:
        return (f"functions.{name}:" if self.numbered else f"{name}{self._own.arguments}",)

    @override
    def write(self, name: str, arguments: Any, index: int) -> str:
        own = self._own
        given = f"{own.arguments}{as_json(arguments)}{own.call_end}"
        return f"{own.call}{self._header(name, index)}{given}"

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        own = self._own
        begin, given = marker(own.call, special), marker(own.arguments, special)
        header = f"{literal(f'functions.{name}:')} [0-9]{{1,4}}" if self.numbered else literal(name)
        return f"{begin} {header} {given} {arguments} {marker(own.call_end, special)}"

    def _header(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}" if self.numbered else name


# The template of DeepSeek V3.1 shows calls, but no tools. They are described in the system message,
# as its model card says: https://huggingface.co/deepseek-ai/DeepSeek-V3.1.
DEEPSEEK_PREFACE = """\
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
