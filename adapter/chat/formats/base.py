"""A tool call format: an object that detects it, and parses, constrains and writes its calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from ....backends.grammar import literal
from ...generation.parts import Parser
from ..calls import CallParser, Calls
from ..json_call import ARGUMENTS, NAME, JsonCallParser
from .rules import GAP, FunctionSchema, marker
from .rules import arguments as json_arguments

Check: TypeAlias = Callable[[str], bool]


class Place(NamedTuple):
    """An earlier call of a conversation.

    Args:
        name: the name of its function.
        in_conversation: the number of calls before it.
        in_message: the same, counted in its own message.
    """

    name: str
    in_conversation: int
    in_message: int


@dataclass(frozen=True, eq=False)
class ToolCallFormat:
    """Tool calls as JSON objects, between markers or alone; subclasses implement other formats.

    Args:
        markers: the strings of the format that can be tokens of the model.
        begin, end: the markers around calls; empty if the whole answer is a call.
        name, arguments: the keys of a call's object.
        in_list: True if a list of objects is between the markers, False for one object.
        bare: True if JSON at the beginning of an answer is a call.
        id_size: the length of call ids that the template requires; None for any.
        answer: the text before the answer, if a turn of the model has several messages.
        recipient: the same text, if an answer always begins with it.
        reasons: True if such a message can be reasoning.
        in_order: True if the template takes the results of calls in the order of the calls.
        preface: Jinja to put before a template that shows calls, but no tools.
        again: see `Calls`.
        interrupts: True if the token that begins calls also ends reasoning that has no end tag.
    """

    title: str
    markers: tuple[str, ...] = ()
    begin: str = ""
    end: str = ""
    name: str = NAME
    arguments: str = ARGUMENTS[0]
    in_list: bool = False
    bare: bool = False
    id_size: int | None = None
    answer: str = ""
    recipient: str = ""
    reasons: bool = False
    in_order: bool = False
    preface: str = ""
    again: str = ""
    interrupts: bool = False
    # The class of the parser that separates calls from content.
    calls: ClassVar[type[Calls]] = Calls

    def is_of(self, template: str) -> bool:
        """Return True if a chat template has calls in this format."""
        return self.begin in template and "tools" in template

    def parser(
        self, functions: Mapping[str, Any], special: frozenset[str], enforced: bool, forced: bool
    ) -> Parser:
        """Return a parser that separates the calls in an answer from its content.

        Args:
            functions: the schemas of the offered functions' arguments, by function name.
            special: the markers that are tokens of the model.
            enforced: True if a grammar guarantees valid calls.
            forced: True if the answer has only calls, so that text with the spelling of a marker
                is the marker.
        """
        check = functions.__contains__

        def make(checked: bool) -> CallParser:
            return self.one(functions, check if checked else None)

        own = frozenset() if forced else special
        return self.calls(
            make, self.begins, self.end, self.bare, own, enforced, self.markers, self.again, forced
        )

    @property
    def begins(self) -> tuple[str, ...]:
        """The markers that can begin a call."""
        return (self.begin,) if self.begin else ()

    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """Return a parser of the text after a marker.

        Args:
            check: returns True if a function is offered; None if a grammar guarantees it.
        """
        return JsonCallParser(self.name, (self.arguments, *ARGUMENTS), check)

    def call_id(self, call_id: str, place: Place) -> str:
        """Return the id that the template gets for an earlier call and its result."""
        if self.id_size is None:
            return call_id
        letters = "".join(one for one in call_id if one.isascii() and one.isalnum())
        return letters[-self.id_size :].rjust(self.id_size, "0")

    def spelled(self, name: str) -> tuple[str, ...]:
        """Return the forms in which a function's name can appear in a call."""
        key = json.dumps(self.name)
        return (f'{key}: "{name}"', f'{key}:"{name}"')

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Write calls, each a name and arguments, as the model does."""
        objects = [
            json.dumps({self.name: name, self.arguments: arguments}, ensure_ascii=False)
            for name, arguments in calls
        ]
        if self.in_list:
            return f"{self.begin}[{', '.join(objects)}]{self.end}"
        return "".join(f"{self.begin}{one}{self.end}" for one in objects)

    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        """Return GBNF rules for a function's arguments (`rules.arguments`)."""
        return json_arguments(function, name, prefix, index)

    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        """Return the GBNF of one call, without the markers around it.

        Args:
            arguments: the name of the rule for its arguments.
        """
        keys = [f'{literal(json.dumps(key))} ws ":" ws' for key in (self.name, self.arguments)]
        own = literal(json.dumps(name))
        return f'"{{" ws {keys[0]} {own} ws "," ws {keys[1]} {arguments} ws "}}"'

    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """Return the GBNF of the marker that begins calls, and of everything after it."""
        if not self.begin:
            return "", "call"
        begin = marker(self.begin, special)
        end = f" {GAP} {marker(self.end, special)}" if self.end else ""
        if self.in_list:
            more = f' ({GAP} "," {GAP} call)*' if parallel else ""
            return begin, f'{GAP} "[" {GAP} call{more} {GAP} "]"{end}'
        more = f" ({GAP} {begin} {GAP} call{end})*" if parallel else ""
        return begin, f"{GAP} call{end}{more}"
