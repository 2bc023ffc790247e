"""A way to write calls, all of it in one object: how it is known, read, constrained and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ....backends.grammar import literal
from ...generation.parts import Parser
from ..calls import CallParser, Calls
from ..json_call import ARGUMENTS, NAME, JsonCallParser
from .rules import GAP, FunctionSchema, marker
from .rules import arguments as json_arguments

Check: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True, eq=False)
class ToolCallFormat:
    """Calls as JSON objects, between markers or alone; other ways are its subclasses.

    Args:
        markers: what of it may be tokens of the model's.
        begin, end: what stands around calls; none where a call is all that an answer is.
        name, arguments: the keys of a call's object.
        in_list: whether a list of objects stands between the markers, or one object.
        bare: whether JSON at the beginning of an answer is a call.
        id_size: how long the ids of calls must be that the template is given, None for any.
        answer: what stands before an answer where that is one of several messages.
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

    def is_of(self, template: str) -> bool:
        """Whether a chat template writes calls so."""
        return self.begin in template and "tools" in template

    def parser(
        self, functions: Mapping[str, Any], special: frozenset[str], enforced: bool, forced: bool
    ) -> Parser:
        """What takes calls out of an answer.

        Args:
            functions: the schemas of the arguments of those that are offered, by their names.
            special: markers that are tokens of the model's.
            enforced: whether a grammar makes calls that cannot be broken.
            forced: whether there is nothing but calls, so that the spelling of a marker is one.
        """
        check = functions.__contains__

        def make(checked: bool) -> CallParser:
            return self.one(functions, check if checked else None)

        own = frozenset() if forced else special
        return Calls(make, self.begins, self.end, self.bare, own, enforced)

    @property
    def begins(self) -> tuple[str, ...]:
        """The markers that may begin a call."""
        return (self.begin,) if self.begin else ()

    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """What reads what stands behind a marker.

        Args:
            check: says whether a function is offered, None where that is sure.
        """
        return JsonCallParser(self.name, (self.arguments, *ARGUMENTS), check)

    def spelled(self, name: str) -> tuple[str, ...]:
        """How a function's name may stand in a call."""
        key = json.dumps(self.name)
        return (f'{key}: "{name}"', f'{key}:"{name}"')

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model writes them; each: name and arguments."""
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
        """GBNF rules for a function's arguments (`rules.arguments`)."""
        return json_arguments(function, name, prefix, index)

    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        """GBNF of one call, as it stands between the markers.

        Args:
            arguments: the rule of its arguments.
        """
        keys = [f'{literal(json.dumps(key))} ws ":" ws' for key in (self.name, self.arguments)]
        own = literal(json.dumps(name))
        return f'"{{" ws {keys[0]} {own} ws "," ws {keys[1]} {arguments} ws "}}"'

    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """GBNF of the marker that begins calls, and of all that comes behind it."""
        if not self.begin:
            return "", "call"
        begin = marker(self.begin, special)
        end = f" {GAP} {marker(self.end, special)}" if self.end else ""
        if self.in_list:
            more = f' ({GAP} "," {GAP} call)*' if parallel else ""
            return begin, f'{GAP} "[" {GAP} call{more} {GAP} "]"{end}'
        more = f" ({GAP} {begin} {GAP} call{end})*" if parallel else ""
        return begin, f"{GAP} call{end}{more}"
