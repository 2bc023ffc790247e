"""Turn pydantic's validation errors into OpenAI's errors (contract 1.2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from ..backends.errors import shortened
from ..schemas.openai.common import kind_of
from .errors import InvalidRequest

_TYPES = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a decimal number",
    "bool_type": "a boolean",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


def from_validation(error: ValidationError, body: Any, schema: Any) -> InvalidRequest:
    """Return OpenAI's error for a body: a missing field first, then the first other error.

    Args:
        schema: pydantic's core schema of the body.
    """
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "missing"), details[0])
    kind, value = first["type"], first["input"]
    context: dict[str, Any] = first.get("ctx") or {}
    path = _path(first["loc"], body, schema, kind == "missing")
    if kind == "openai":
        path = shortened(path + context["path"])
        path = path.replace("[", ".[") if context["dotted"] else path
        return InvalidRequest(
            context["text"].replace("{param}", path), path or None, context["code"] or None
        )
    if kind == "missing":
        message = f"Missing required parameter: '{path}'."
        return InvalidRequest(message, path, "missing_required_parameter")
    if kind in _TYPES:
        return _wrong_type(path, _TYPES[kind], value)
    is_key = first["loc"][-1] == "[key]"
    if is_key:
        path = _path(first["loc"][:-2], body, schema, False)
    return _bounds(kind, path, value, context, is_key) or _choices(kind, path, value, context)


def _wrong_type(path: str, expected: str, value: Any) -> InvalidRequest:
    if isinstance(value, float) and abs(value) >= 2**63 and expected == "an integer":
        # Whole numbers of more than 64 bits are parsed as decimal numbers.
        side, word = ("below", "minimum") if value < 0 else ("above", "maximum")
        bound = ">= -9223372036854775808" if value < 0 else "<= 9223372036854775807"
        return InvalidRequest(
            f"Invalid '{path}': integer {side} {word} value. Expected a value {bound}.",
            path,
            f"integer_{side}_{word[:3]}_value",
        )
    message = f"Invalid type for '{path}': expected {expected}, but got {kind_of(value)} instead."
    return InvalidRequest(message, path, "invalid_type")


def _bounds(
    kind: str, path: str, value: Any, context: dict[str, Any], is_key: bool
) -> InvalidRequest | None:
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        bound = next(iter(context.values()))
        # pydantic turns the bound of a decimal field into a float, and keeps that of an integer.
        number = "decimal" if isinstance(bound, float) else "integer"
        low = kind.startswith("greater")
        sign = (">" if low else "<") + ("=" if kind.endswith("equal") else "")
        bound = int(bound) if float(bound).is_integer() else bound
        side, word = ("below", "minimum") if low else ("above", "maximum")
        return InvalidRequest(
            f"Invalid '{path}': {number} {side} {word} value. Expected a value {sign} {bound}, but "
            f"got {value} instead.",
            path,
            f"{number}_{side}_{word[:3]}_value",
        )
    if kind == "string_too_long" and is_key:
        return InvalidRequest(
            f"Invalid '{path}': property name too long. Expected a property name with maximum "
            f"length {context['max_length']}, but got a property name with length {len(value)} "
            "instead.",
            path,
            "property_name_above_max_length",
        )
    if kind in ("too_long", "string_too_long"):
        noun, article = ("string", "a") if kind == "string_too_long" else ("array", "an")
        size = len(value)
        if isinstance(value, dict):
            noun, article = "object", "an"
        code = "object_above_max_properties" if noun == "object" else f"{noun}_above_max_length"
        return InvalidRequest(
            f"Invalid '{path}': {noun} too long. Expected {article} {noun} with maximum length "
            f"{context['max_length']}, but got {article} {noun} with length {size} instead.",
            path,
            code,
        )
    if kind == "too_short":
        return InvalidRequest(
            f"Invalid '{path}': empty array. Expected an array with minimum length "
            f"{context['min_length']}, but got an empty array instead.",
            path,
            "empty_array",
        )
    if kind == "string_too_short":
        return InvalidRequest(
            f"Invalid '{path}': empty string. Expected a string with minimum length "
            f"{context['min_length']}, but got an empty string instead.",
            path,
            "empty_string",
        )
    return None


def _choices(kind: str, path: str, value: Any, context: dict[str, Any]) -> InvalidRequest:
    if kind in ("literal_error", "union_tag_invalid"):
        if kind == "union_tag_invalid":
            field = context["discriminator"].strip("'")
            path = f"{path}.{field}" if path else field
            value, listed = value[field], context["expected_tags"]
            if not isinstance(value, str):
                return _wrong_type(path, "a string", value)
        else:
            listed = context["expected"].replace(" or ", ", ")
        words = re.findall(r"'[^']*'", listed)
        if not isinstance(value, str):
            one_of = "one of " if len(words) > 1 else ""
            return _wrong_type(path, one_of + _joined(words, "or"), value)
        return InvalidRequest(
            f"Invalid value: '{shortened(value)}'. Supported values are: {_joined(words, 'and')}.",
            path,
            "invalid_value",
        )
    if kind == "union_tag_not_found":
        field = context["discriminator"].strip("'")
        if isinstance(value, dict):
            path = f"{path}.{field}"
            return InvalidRequest(
                f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
            )
        return _wrong_type(path, "an object", value)
    if kind == "string_pattern_mismatch":
        return InvalidRequest(
            f"Invalid '{path}': string does not match pattern. Expected a string that matches the "
            f"pattern '{context['pattern']}'.",
            path,
            "invalid_value",
        )
    return InvalidRequest(
        f"Invalid '{path}': the value is not allowed here.", path, "invalid_value"
    )


def _joined(words: Sequence[str], conjunction: str) -> str:
    """Return words as a list with a conjunction before the last one."""
    if len(words) == 1:
        return words[0]
    return ", ".join(words[:-1]) + f"{',' * (len(words) > 2)} {conjunction} {words[-1]}"


def _path(loc: tuple[int | str, ...], body: Any, schema: Any, missing: bool) -> str:
    """Return a field's path in OpenAI's form: `messages[0].content[1].type`.

    pydantic's location also contains the tags of unions. The schema identifies them,
    because a call of type `function` also has a key of that name. In a union without tags, a step
    that is not a key of the value at its place is the name of a type. A missing
    field is not a key either.
    """
    path, here = "", body
    definitions: dict[str, Any] = {}
    for position, step in enumerate(loc):
        last = position == len(loc) - 1
        schema = _bare(schema, definitions)
        if schema is not None and schema["type"] == "tagged-union" and step in schema["choices"]:
            schema = schema["choices"][step]
            continue
        schema = _inner(schema, step)
        if isinstance(step, int) and isinstance(here, list) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
        elif isinstance(here, dict) and step in here:
            path, here = f"{path}.{step}" if path else str(step), here[step]
        elif isinstance(step, int) and isinstance(here, str) and here.lstrip().startswith("["):
            # An array as a JSON string.
            path = f"{path}[{step}]"
        elif last and missing:
            path = f"{path}.{step}" if path else str(step)
    return shortened(path)


def _bare(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema without its wrappers; None if it is unknown."""
    while schema is not None:
        kind = schema["type"]
        if kind == "definitions":
            definitions |= {one["ref"]: one for one in schema["definitions"]}
        elif kind == "definition-ref":
            schema = definitions.get(schema["schema_ref"])
            continue
        if "schema" not in schema:
            return schema
        schema = schema["schema"]
    return None


def _inner(schema: Any, step: int | str) -> Any:
    """Return the schema of a field or an element; None if it is unknown."""
    kind = None if schema is None else schema["type"]
    if kind == "model-fields":
        return schema["fields"].get(step)
    if kind == "list":
        return schema.get("items_schema")
    return schema.get("values_schema") if kind == "dict" else None
