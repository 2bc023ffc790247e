"""Tool calls as tags: one for the function, and one or two for each argument.

A value is text as it is, or JSON; the function's schema says which, and in some formats the tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from ....backends.grammar import literal
from ..calls import CallParser
from .base import Check, ToolCallFormat
from .rules import GAP, FunctionSchema
from .rules import marker as marker_of
from .tag_parser import TagParser
from .tag_rules import LINES, NO_TAGS, Tags, rules_of


@dataclass(frozen=True, eq=False)
class Tagged(ToolCallFormat):
    """A format with tags; `in_list` is True if several calls are between two markers.

    Args:
        tags: the texts of a call.
    """

    tags: Tags = NO_TAGS

    @override
    def is_of(self, template: str) -> bool:
        tags = self.tags
        return all(one in template for one in (self.begin, tags.function, tags.key, tags.value))

    @override
    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        return TagParser(self.tags, functions, self.end if self.in_list else "", check is None)

    @override
    def spelled(self, name: str) -> tuple[str, ...]:
        before = self.tags.function or self.begin
        return (f"{before}{name}{self.tags.named}",)

    @override
    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        each = [self._written(name, arguments) for name, arguments in calls]
        if self.in_list:
            return "\n".join([self.begin, *each, self.end])
        line = "\n" if self.tags.function else ""
        end = "" if self._ends_itself else f"\n{self.end}"
        return "\n".join(f"{self.begin}{line}{one}{end}" for one in each)

    @override
    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        return rules_of(self.tags, function, name, prefix, index)

    @override
    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        tags = self.tags
        begin = literal(f"{tags.function}{name}{tags.named}")
        return f"{begin} {tags.gap} {arguments} {literal(tags.end)}"

    @override
    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        begin, end = marker_of(self.begin, special), marker_of(self.end, special)
        if self.in_list:
            more = f" ({LINES} call)*" if parallel else ""
            return begin, f"{LINES} call{more} {LINES} {end}"
        first = f"{GAP} call" if self.tags.function else "call"
        first = first if self._ends_itself else f"{first} {GAP} {end}"
        return begin, f"{first} ({GAP} {begin} {first})*" if parallel else first

    @property
    def _ends_itself(self) -> bool:
        """True if the marker after a call is its last tag."""
        return self.tags.end == self.end

    def _written(self, name: str, arguments: Any) -> str:
        tags = self.tags
        line = "\n" if tags.lines else ""
        lines = [f"{tags.function}{name}{tags.named}"]
        values = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        for key, value in values.items():
            is_text = isinstance(value, str)
            text = value if is_text else json.dumps(value, ensure_ascii=False)
            if tags.value:
                lines.append(f"{tags.key}{key}{tags.text}")
                lines.append(f"{tags.value}{text}{tags.value_end}")
            else:
                after = tags.text if is_text else tags.json
                lines.append(f"{tags.key}{key}{after}{line}{text}{line}{tags.value_end}")
        return "\n".join([*lines, tags.end])
