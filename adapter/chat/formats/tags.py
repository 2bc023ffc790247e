"""Tool calls as tags: one for the function, and one or two for each argument.

A value is text as it is, or JSON; the function's schema says which, and in some formats the tag.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import orjson

from ....backends.grammar import literal
from ..calls import CallParser
from ..json_call import Broken, JsonCallParser, Steps
from .base import Check, ToolCallFormat
from .rules import GAP, FunctionSchema
from .rules import marker as marker_of
from .tag_rules import LINES, NO_TAGS, Tags, rules_of, types_of, types_of_value

_WORD = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_LONGEST = 256
_QUOTE, _BACKSLASH = b'"\\'

Text: TypeAlias = Generator[None, int, bytes]


class _Bytes(NamedTuple):
    """The texts of `Tags` in bytes."""

    function: bytes
    named: bytes
    key: bytes
    text: bytes
    json: bytes
    value: bytes
    value_end: bytes
    end: bytes


class TagParser(JsonCallParser):
    """A parser of functions with their arguments; an argument is returned when it is complete.

    Args:
        functions: the schemas of the offered functions' arguments, by function name.
        last: the marker after several calls; empty if one call follows a marker.
        enforced: True if a grammar guarantees valid calls.
    """

    def __init__(self, tags: Tags, functions: Mapping[str, Any], last: str, enforced: bool) -> None:
        self._tags = _Bytes(*(getattr(tags, name).encode() for name in _Bytes._fields))
        self._lines = tags.lines
        self._functions = functions
        self._last = last.encode()
        self._enforced = enforced
        super().__init__(check=functions.__contains__)

    def _run(self) -> Steps:
        yield from self._marker(self._tags.function)
        while True:
            yield from self._function()
            if not self._last:
                return
            # The marker after the last call may be missing.
            self._may_end = True
            if (yield from self._marker(self._tags.function, self._last)) == self._last:
                return

    def _function(self) -> Steps:
        tags = self._tags
        name = (yield from self._word()).decode()
        yield from self._exactly(tags.named)
        self._begin(name)
        schema = self._functions[name]
        properties = schema.get("properties") if isinstance(schema, dict) else None
        keys: set[str] = set()
        while (yield from self._marker(tags.key, tags.end)) == tags.key:
            key = (yield from self._key()).decode(errors="replace")
            found = yield from self._marker(tags.text, tags.json)
            yield from self._marker(tags.value)
            is_text = None if tags.text == tags.json else found == tags.text
            value = yield from self._value_of((properties or {}).get(key), is_text)
            if key in keys:
                # Where the schema names no properties, the grammar allows one twice.
                if not self._enforced:
                    raise Broken
                continue
            before = b"," if keys else b"{"
            self._put("arguments", before + orjson.dumps(key) + b":" + value)
            keys.add(key)
        self._put("arguments", b"}" if keys else b"{}")

    def _word(self) -> Text:
        """Parse the name of a function, which ends at the first byte that no name has."""
        name = bytearray()
        byte = yield from self._next()
        while byte in _WORD and len(name) < _LONGEST:
            name.append(byte)
            byte = yield
        self._peeked = byte
        return bytes(name)

    def _key(self) -> Text:
        """Parse the name of an argument, which ends at the tag after it."""
        key = bytearray()
        byte = yield from self._next()
        while byte != self._tags.text[0] and len(key) < _LONGEST:
            key.append(byte)
            byte = yield
        self._peeked = byte
        if not key:
            raise Broken
        return bytes(key).rstrip()

    def _exactly(self, text: bytes) -> Steps:
        """Parse a text without whitespace before it."""
        for one in text:
            byte, self._peeked = self._peeked, None
            if (byte if byte is not None else (yield)) != one:
                raise Broken

    def _value_of(self, schema: object, is_text: bool | None) -> Text:
        """Parse a value and the tag after it, and return the value as JSON.

        Args:
            is_text: True for text and False for JSON; None if only the schema says it.
        """
        types = types_of(schema)
        may_be_text = types is not None and "string" in types
        is_json = not may_be_text if is_text is None else not is_text
        end = self._tags.value_end
        if not self._enforced:
            raw = yield from self._until(end, False)
            if self._lines:
                raw = raw.removeprefix(b"\n").removesuffix(b"\n")
        elif self._lines:
            # A text can contain the tag after it, unless it is at the beginning of a line.
            yield from self._exactly(b"\n")
            raw = yield from self._until(b"\n" + end, is_json)
        else:
            raw = yield from self._until(end, is_json)
        text = raw.decode(errors="replace")
        return orjson.dumps(text) if is_text else self._as_json(text, types, is_text is None)

    def _until(self, end: bytes, in_json: bool) -> Text:
        """Parse up to a text; in JSON, a string can contain it."""
        text = bytearray()
        quoted = escaped = False
        while quoted or not text.endswith(end):
            byte = yield
            text.append(byte)
            if in_json and byte == _QUOTE and not escaped:
                quoted = not quoted
            escaped = quoted and byte == _BACKSLASH and not escaped
        return bytes(text.removesuffix(end))

    def _as_json(self, text: str, types: frozenset[str] | None, is_either: bool) -> bytes:
        """Return a value as JSON.

        Args:
            types: the types that its schema allows; None for a schema that says more.
            is_either: True if a text is not marked as one.
        """
        may_be_text = types is not None and "string" in types
        others = (types or frozenset()) - {"string"}
        if may_be_text and is_either and not others:
            return orjson.dumps(text)
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            if types is None or may_be_text or self._enforced:
                return orjson.dumps(text)
            raise Broken from None
        if may_be_text and is_either and not types_of_value(value) & others:
            return orjson.dumps(text)
        return text.strip().encode()


@dataclass(frozen=True, eq=False)
class Tagged(ToolCallFormat):
    """A format with tags; `in_list` is True if several calls are between two markers.

    Args:
        tags: the texts of a call.
    """

    tags: Tags = NO_TAGS

    def is_of(self, template: str) -> bool:
        """See `ToolCallFormat.is_of`."""
        tags = self.tags
        return all(one in template for one in (self.begin, tags.function, tags.key, tags.value))

    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """See `ToolCallFormat.one`."""
        return TagParser(self.tags, functions, self.end if self.in_list else "", check is None)

    def spelled(self, name: str) -> tuple[str, ...]:
        """See `ToolCallFormat.spelled`."""
        before = self.tags.function or self.begin
        return (f"{before}{name}{self.tags.named}",)

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """See `ToolCallFormat.written`."""
        each = [self._written(name, arguments) for name, arguments in calls]
        if self.in_list:
            return "\n".join([self.begin, *each, self.end])
        line = "\n" if self.tags.function else ""
        end = "" if self._ends_itself else f"\n{self.end}"
        return "\n".join(f"{self.begin}{line}{one}{end}" for one in each)

    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        """See `ToolCallFormat.rules`."""
        return rules_of(self.tags, function, name, prefix, index)

    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        """See `ToolCallFormat.call`."""
        tags = self.tags
        begin = literal(f"{tags.function}{name}{tags.named}")
        return f"{begin} {tags.gap} {arguments} {literal(tags.end)}"

    def around(self, parallel: bool, special: frozenset[str]) -> tuple[str, str]:
        """See `ToolCallFormat.around`."""
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
