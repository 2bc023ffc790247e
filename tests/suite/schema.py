"""Instances and validation of JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}


def instance(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """Return a small instance of a schema."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            target = target[key]
        return instance(target, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if "anyOf" in schema:
        return instance(schema["anyOf"][0], root)
    kind = schema.get("type", "object")
    if kind == "object" and "required" in schema:
        return {name: instance(schema["properties"][name], root) for name in schema["required"]}
    if kind == "object":
        return {name: instance(one, root) for name, one in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema.get("items", {}), root)] * schema.get("minItems", 0)
    return {"string": "a", "number": 0.5, "integer": 0, "boolean": True, "null": None}[kind]


def problem(schema: Any) -> str | None:
    """Return the error in a schema, or None if it is valid."""
    if not isinstance(schema, dict):
        return "a schema is an object"
    kind = schema.get("type")
    for one in kind if isinstance(kind, list) else [kind]:
        if one is not None and one not in TYPES:
            return f"there is no type {one!r}"
    return None
