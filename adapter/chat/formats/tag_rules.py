"""GBNF for arguments in tags: the properties of a function's schema, in its order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson

from ....backends.grammar import PLAIN, Unenforced, embedded, literal, until
from ..json_call import INPUT
from .rules import FunctionSchema, Path
from .rules import value as value_rules

# The whitespace that a model may write between two tags.
LINES = "[\\n]{0,2}"
# The rule for a text and the tag after it.
_TEXT = "tag-text"
_NAME = "[a-zA-Z0-9_-]{1,64}"
_NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$id"})
_OBJECT_KEYS = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs"}
_TEXT_KEYS = _NOTES | {"type"}
_ELSEWHERE = frozenset({"patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ONLY_TEXT = frozenset({"string"})


class Tags(NamedTuple):
    """The texts of a format.

    Args:
        function, named: before and after the name of a function.
        key: before the name of an argument.
        text, json: after the name, for a value that is text and for JSON. They are equal if only
            the schema says how a value is written.
        value: a further tag before the value, or empty.
        value_end: after a value.
        end: after the last argument.
        lines: True if a value has lines of its own, and every tag ends its line.
    """

    function: str
    named: str
    key: str
    text: str
    json: str
    value: str
    value_end: str
    end: str
    lines: bool = False

    @property
    def gap(self) -> str:
        """The GBNF of the whitespace between tags."""
        return '"\\n"' if self.lines else LINES

    def opening(self, key: str, is_text: bool) -> str:
        """Return the GBNF of everything before a value; the key is GBNF, too."""
        value = f" {self.gap} {literal(self.value)}" if self.value else ""
        line = ' "\\n"' if self.lines else ""
        after = literal(self.text if is_text else self.json)
        return f"{literal(self.key)} {key} {after}{value}{line}"

    @property
    def closing(self) -> str:
        """The text after a value."""
        return f"\n{self.value_end}" if self.lines else self.value_end


NO_TAGS = Tags("", "", "", "", "", "", "", "")


def types_of(schema: object) -> frozenset[str] | None:
    """Return the types that a schema allows; None if it restricts their values, too.

    A list of texts is the type string.
    """
    if schema is None or schema is True:
        return _TYPES
    if not isinstance(schema, dict):
        return None
    kind = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if kind == "string" or (
        kind is None and values and all(isinstance(value, str) for value in values)
    ):
        return _ONLY_TEXT
    keys = schema.keys() - _NOTES
    if not keys:
        return _TYPES
    if keys == {"type"}:
        return _TYPES & ({kind} if isinstance(kind, str) else set(kind or ()))
    if len(keys) == 1 and keys <= {"anyOf", "oneOf"}:
        parts = [_plain_types(one) for one in schema[keys.pop()]]
        known = [part for part in parts if part is not None]
        return frozenset().union(*known) if len(known) == len(parts) else None
    return None


def _plain_types(schema: object) -> frozenset[str] | None:
    """Return the types of a schema that has nothing else."""
    if isinstance(schema, dict) and schema.keys() - _NOTES == {"type"}:
        return types_of(schema)
    return None


def types_of_value(value: object) -> frozenset[str]:
    """Return the JSON types of a value."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return _ONLY_TEXT
    return frozenset({"array" if isinstance(value, list) else "object"})


def rules_of(
    tags: Tags, function: FunctionSchema, name: str, prefix: str, index: int
) -> Mapping[str, str]:
    """Return the rules for arguments in tags (`rules.arguments`)."""
    if function.input is not None:
        text = f"{prefix}text"
        opening = tags.opening(literal(INPUT), True)
        rule = f"{opening} {text} {literal(tags.closing)} {tags.gap}"
        return {**embedded(function.input, text, f"{prefix}i", PLAIN), name: rule}
    schema = {} if function.schema is None else orjson.loads(function.schema)
    if function.strict:
        _check_writable(schema, _OBJECT_KEYS, (index,))
    values = _Values(tags, schema, prefix, index, function.strict)
    required = frozenset(schema.get("required", ()))
    parts = []
    for place, (key, value) in enumerate((schema.get("properties") or {}).items()):
        path: Path = (index, "properties", key)
        tag = f"({values.argument(literal(key), value, f'value-{place}', path)} {tags.gap})"
        parts.append(tag if key in required else f"{tag}?")
    if not parts and function.schema is not None and _is_open(schema):
        other = schema.get("additionalProperties", True)
        path = (index, "additionalProperties")
        parts.append(f"({values.argument(_NAME, other, 'value', path)} {tags.gap})*")
    return {**values.rules, name: " ".join(parts) or '""'}


def _is_open(schema: Mapping[str, Any]) -> bool:
    """Return True if the names of the arguments are not in the schema's properties."""
    if schema.get("additionalProperties") is False:
        return False
    return "properties" not in schema or bool(schema.keys() & _ELSEWHERE)


class _Values:
    """The rules for the values of one function."""

    def __init__(
        self, tags: Tags, schema: Mapping[str, Any], prefix: str, index: int, strict: bool
    ) -> None:
        self._tags = tags
        self._shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._prefix = prefix
        self._strict = strict
        self.rules: dict[str, str] = {}

    def argument(self, key: str, schema: Any, name: str, path: Path) -> str:
        """Return GBNF for one argument; the key is GBNF."""
        tags = self._tags
        types = types_of(schema)
        if types is None or "string" not in types:
            return tags.opening(key, False) + f" {self._json(schema, name, path)}"
        text = tags.opening(key, True) + f" {self._text(schema, path)}"
        if types == _ONLY_TEXT or tags.text == tags.json:
            return text
        return f"({text} | {tags.opening(key, False)} {self._json(schema, name, path)})"

    def _json(self, schema: Any, name: str, path: Path) -> str:
        """Return GBNF for a value in JSON and the tag after it."""
        own = f"{self._prefix}{name}"
        inner = {**self._shared, **schema} if isinstance(schema, dict) else schema
        self.rules |= value_rules(inner, own, f"{own}-", path if self._strict else None)
        return f"{own} {literal(self._tags.closing)}"

    def _text(self, schema: Any, path: Path) -> str:
        """Return GBNF for a text and the tag after it."""
        closing = self._tags.closing
        given = schema if isinstance(schema, dict) else {}
        texts = list(_texts_of(given))
        if texts:
            return f"({' | '.join(literal(one) for one in texts)}) {literal(closing)}"
        if self._strict and types_of(schema) == _ONLY_TEXT:
            _check_writable(given, _TEXT_KEYS, path)
        self.rules |= until(closing, _TEXT, "")
        return _TEXT


def _texts_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts that a schema lists."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return (value for value in values if isinstance(value, str))


def _check_writable(schema: Mapping[str, Any], known: frozenset[str], path: Path) -> None:
    """Raise `Unenforced` for a keyword that cannot be enforced for arguments in tags."""
    for key in schema:
        if key not in known:
            raise Unenforced(
                f"'{key}' is not enforced in this model's tool-call format", (*path, key)
            )
