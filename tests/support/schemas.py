"""Schemas of every kind that all engines enforce, each with output of bounded length."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

SCHEMAS: dict[str, Any] = {
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 8},
            "home": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Paris"]}, "floor": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "home"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["a", 1, 2.5, None, True, ["x"], {"y": "z"}]},
    "const": {
        "type": "object",
        "properties": {"kind": {"const": "cat \"é\"\n"}},
        "required": ["kind"],
    },
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9}],
        "items": {"enum": ["x"]},
        "minItems": 1,
        "maxItems": 4,
    },
    "optional": {
        "type": "object",
        "properties": {name: {"type": "boolean"} for name in ("a", "b", "c", "d")},
        "required": ["c"],
        "additionalProperties": False,
    },
    "ref": {
        "$defs": {"side": {"enum": ["left", "right"]}},
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/side"}, "to": {"$ref": "#/$defs/side"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "any-of": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}, {"const": 7}]},
    "one-of": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"is": {"const": kind}, "of": {"type": type_}},
                "required": ["is", "of"],
                "additionalProperties": False,
            }
            for kind, type_ in (("flag", "boolean"), ("nothing", "null"))
        ]
    },
    "all-of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 5, "maximum": 17}}},
        ]
    },
    "integers": {
        "type": "array",
        "items": {"type": "integer", "exclusiveMinimum": -120, "maximum": 1005},
        "minItems": 3,
        "maxItems": 3,
    },
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": -2, "exclusiveMaximum": 31},
        "minItems": 3,
        "maxItems": 3,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}-\\d{2}(é|\"|\\\\)$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "types": {"type": ["integer", "null", "string"], "maxLength": 2},
    "unicode": {
        "type": "object",
        "properties": {"größe": {"enum": ["klein", "groß"]}, "漢字": {"const": "🔥"}},
        "required": ["größe", "漢字"],
        "additionalProperties": False,
    },
}  # fmt: skip


def error_of(value: Any, schema: Any) -> str | None:
    """Return why a value does not satisfy a schema, formats included, or None if it does."""
    kind = validator_for(schema, default=Draft202012Validator)
    error = next(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(value), None)
    return None if error is None else error.message
