"""Turn pydantic's validation errors into OpenAI's errors (contract 1.2)."""

from __future__ import annotations

import re
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


def from_validation(error: ValidationError, body: Any) -> InvalidRequest:
    """Return OpenAI's error for a body: a missing field first, then the first other error."""
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "missing"), details[0])
    kind, value = first["type"], first["input"]
    context: dict[str, Any] = first.get("ctx") or {}
    path = _path(first["loc"], body, kind == "missing")
    if kind == "openai":
        path = shortened(path + context["path"])
        return InvalidRequest(
            context["text"].replace("{param}", path), path, context["code"] or None
        )
    if kind == "missing":
        if path == "model":
            return InvalidRequest("you must provide a model parameter")
        message = f"Missing required parameter: '{path}'."
        return InvalidRequest(message, path, "missing_required_parameter")
    if kind in _TYPES:
        message = (
            f"Invalid type for '{path}': expected {_TYPES[kind]}, but got {kind_of(value)} instead."
        )
        return InvalidRequest(message, path, "invalid_type")
    return _bounds(kind, path, value, context) or _choices(kind, path, value, context)


def _bounds(kind: str, path: str, value: Any, context: dict[str, Any]) -> InvalidRequest | None:
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
            value, listed = context["tag"], context["expected_tags"]
        else:
            listed = context["expected"].replace(" or ", ", ")
        words = re.findall(r"'[^']*'", listed)
        supported = ", ".join(words[:-1]) + f"{',' * (len(words) > 2)} and {words[-1]}"
        if len(words) == 1:
            supported = words[0]
        shown = shortened(value) if isinstance(value, str) else kind_of(value)
        return InvalidRequest(
            f"Invalid value: '{shown}'. Supported values are: {supported}.", path, "invalid_value"
        )
    if kind == "union_tag_not_found":
        field = context["discriminator"].strip("'")
        if isinstance(value, dict):
            path = f"{path}.{field}"
            return InvalidRequest(
                f"Missing required parameter: '{path}'.", path, "missing_required_parameter"
            )
        return InvalidRequest(
            f"Invalid type for '{path}': expected an object, but got {kind_of(value)} instead.",
            path,
            "invalid_type",
        )
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


def _path(loc: tuple[int | str, ...], body: Any, missing: bool) -> str:
    """Return a field's path in OpenAI's form: `messages[0].content[1].type`.

    pydantic's location also contains the tags of unions. A step that is not a key of the value at
    its place is such a tag, unless it is the name of a missing field.
    """
    path, here = "", body
    for position, step in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(step, int) and isinstance(here, list) and step < len(here):
            path, here = f"{path}[{step}]", here[step]
        elif isinstance(here, dict) and step in here:
            path, here = f"{path}.{step}" if path else str(step), here[step]
        elif last and missing:
            path = f"{path}.{step}" if path else str(step)
    return shortened(path)
