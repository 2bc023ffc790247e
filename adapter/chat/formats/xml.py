"""Tool calls as Qwen3-Coder and related models write them: tags for the function and arguments.

`<function=name>`, then `<parameter=key>`, a newline, the value, a newline and `</parameter>` for
each argument, then `</function>`: the chat template of https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct.
Values are text if the function's schema requires a string, otherwise JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ....backends.grammar import PLAIN, Unenforced, embedded, literal, until
from ...generation.parts import Part
from ..calls import CallParser
from ..json_call import INPUT, Broken
from ..parsing import BLANKS
from .base import Check, ToolCallFormat
from .rules import FunctionSchema, Path
from .rules import value as value_rules

FUNCTION, PARAMETER = "<function=", "<parameter="
END_PARAMETER, END_FUNCTION = b"</parameter>", b"</function>"
_OPENING = re.compile(rb"\s*<(function|parameter)=([A-Za-z0-9_.-]{1,64})>")
_LONGEST = 64 + 32


def takes_text(schema: object) -> bool:
    """Return True if a value of a schema is written as text, not as JSON."""
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    if kind is None:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return bool(values) and all(isinstance(value, str) for value in values)
    return bool(kind == "string")


class XmlParser:
    """A parser of one function with its arguments; each argument is returned when it is complete.

    Args:
        functions: the schemas of the offered functions' arguments, by function name.
    """

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        self._properties: Mapping[str, Any] = {}
        self._text = bytearray()
        self._size = 0
        self._parts: list[Part] = []
        self._named = False
        self._key: str | None = None
        self._keys: set[str] = set()
        self.done = False

    def feed(self, data: bytes) -> tuple[int, list[Part]]:
        """See `CallParser.feed`; reads single bytes, to take nothing after the end of the call."""
        for position in range(len(data)):
            self._text.append(data[position])
            self._size += 1
            try:
                self._read()
            except Broken as error:
                error.at = position
                raise
            if self.done:
                return position + 1, self.taken()
        return len(data), self.taken()

    def taken(self) -> list[Part]:
        """See `CallParser.taken`."""
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[Part]:
        """See `CallParser.end`; a function without its closing tag is not a call."""
        raise Broken

    def _read(self) -> None:
        if self._key is not None:
            if self._text.endswith(END_PARAMETER):
                self._argument(self._key, bytes(self._text.removesuffix(END_PARAMETER)))
            return
        if not self._text.endswith(b">"):
            self._check_start()
            return
        text = self._text.strip(BLANKS)
        if self._named and text == END_FUNCTION:
            self._put("arguments", b"}" if self._keys else b"{}")
            self.done = True
            return
        match = _OPENING.fullmatch(self._text)
        if match is None or (match[1] == b"parameter") != self._named:
            raise Broken
        name = match[2].decode()
        if not self._named:
            self._begin(name)
        elif name in self._keys:
            raise Broken
        else:
            self._key = name
        self._text = bytearray()

    def _check_start(self) -> None:
        """Raise `Broken` for anything but tags between values."""
        text = self._text.lstrip(BLANKS)
        if (text and text[:1] != b"<") or len(text) > _LONGEST:
            raise Broken

    def _begin(self, name: str) -> None:
        if name not in self._functions:
            raise Broken
        schema = self._functions[name]
        self._properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
        self._named = True
        self._put("call", name.encode())

    def _argument(self, key: str, raw: bytes) -> None:
        text = raw.decode(errors="replace").removeprefix("\n").removesuffix("\n")
        schema = self._properties.get(key)
        value = orjson.dumps(text)
        if not takes_text(schema):
            try:
                orjson.loads(text)
                value = text.strip().encode()
            except orjson.JSONDecodeError:
                if isinstance(schema, dict) and schema.get("type") not in (None, "string"):
                    raise Broken from None
        before = b"," if self._keys else b"{"
        self._put("arguments", before + orjson.dumps(key) + b":" + value)
        self._keys.add(key)
        self._key, self._text = None, bytearray()

    def _put(self, kind: str, data: bytes) -> None:
        self._parts.append(Part(kind, data, self._size))  # type: ignore[arg-type]
        self._size = 0


@dataclass(frozen=True, eq=False)
class Xml(ToolCallFormat):
    """The format with tags."""

    def is_of(self, template: str) -> bool:
        """See `ToolCallFormat.is_of`."""
        return all(one in template for one in (self.begin, FUNCTION, PARAMETER))

    def spelled(self, name: str) -> tuple[str, ...]:
        """See `ToolCallFormat.spelled`."""
        return (f"{FUNCTION}{name}>",)

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """See `ToolCallFormat.written`."""
        return "\n".join(self._written(name, arguments) for name, arguments in calls)

    def rules(
        self, function: FunctionSchema, name: str, prefix: str, index: int
    ) -> Mapping[str, str]:
        """See `ToolCallFormat.rules`."""
        return _tags(function, name, prefix, index)

    def call(self, name: str, arguments: str, special: frozenset[str]) -> str:
        """See `ToolCallFormat.call`."""
        return f'{literal(f"{FUNCTION}{name}>")} "\\n" {arguments} "</function>"'

    def one(self, functions: Mapping[str, Any], check: Check | None) -> CallParser:
        """See `ToolCallFormat.one`."""
        return XmlParser(functions)

    def _written(self, name: str, arguments: Any) -> str:
        lines = [self.begin, f"{FUNCTION}{name}>"]
        values = arguments if isinstance(arguments, dict) else {"arguments": arguments}
        for key, value in values.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            lines += [f"{PARAMETER}{key}>", text, "</parameter>"]
        return "\n".join([*lines, "</function>", self.end])


_NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$id"})
_OBJECT_KEYS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs"}
_TEXT_KEYS = _NOTES | {"type"}


def _tags(function: FunctionSchema, name: str, prefix: str, index: int) -> Mapping[str, str]:
    """Return the rules for arguments in tags: the properties of the schema, in its order."""
    if function.input is not None:
        text = f"{prefix}text"
        rule = f'{literal(f"{PARAMETER}{INPUT}>")} "\\n" {text} "\\n</parameter>\\n"'
        return {**embedded(function.input, text, f"{prefix}i", PLAIN), name: rule}
    strict = function.strict
    schema = {} if function.schema is None else orjson.loads(function.schema)
    properties = schema.get("properties") or {}
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    if strict:
        _check_writable(schema, _OBJECT_KEYS, (index,))
    required = frozenset(schema.get("required", ()))
    rules: dict[str, str] = {}
    parts = []
    for place, (key, value) in enumerate(properties.items()):
        own = f"{prefix}value-{place}"
        end = '"\\n</parameter>\\n"'
        path = (index, "properties", key)
        if not takes_text(value):
            inner = {**shared, **value} if isinstance(value, dict) else value
            rules |= value_rules(inner, own, f"{prefix}v{place}-", path if strict else None)
            rules[f"{own}-end"] = f"{own} {end}"
        elif values := value.get("enum", [value["const"]] if "const" in value else []):
            in_list = " | ".join(literal(one) for one in values)
            rules[f"{own}-end"] = f"({in_list}) {end}"
        else:
            if strict:
                _check_writable(value, _TEXT_KEYS, path)
            rules |= until("\n</parameter>", f"{own}-end", '"\\n"')
        tag = f'{literal(f"{PARAMETER}{key}>")} "\\n" {own}-end'
        parts.append(tag if key in required else f"({tag})?")
    return {**rules, name: " ".join(parts) or '""'}


def _check_writable(schema: Mapping[str, Any], known: frozenset[str], path: Path) -> None:
    """Raise `Unenforced` for a keyword that cannot be enforced for arguments in tags."""
    for key in schema:
        if key not in known:
            raise Unenforced(
                f"'{key}' is not enforced in this model's tool-call format", (*path, key)
            )


FORMAT = Xml("xml", ("<tool_call>", "</tool_call>"), "<tool_call>", "</tool_call>")
