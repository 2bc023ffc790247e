"""Describe errors in settings, with the place where each was set."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from .errors import printable

# Settings whose values are never shown.
SECRET = frozenset({"api_key", "engine_key", "store"})
# The most errors to describe.
_MOST = 3
_LONGEST = 60

_EXPECTED = {
    "flash_attention": "auto, on or off",
    "gpu_layers": "a whole number of layers, or all",
    "store_age": "a duration such as 90s, 15m, 24h or 30d, or forever",
}
_KINDS: Mapping[str, str] = {
    "bool": "true or false",
    "dict": "a table",
    "float": "a number",
    "finite": "a number",
    "int": "a whole number",
    "list": "a list of strings",
    "path": "the path of a file",
    "string": "a string",
}
_BOUNDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def reason_of(error: Exception) -> str:
    """Return the reason why a file could not be read, without Python's own prefix."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def in_words(
    error: ValidationError, place: Callable[[str], str], known: Collection[str], file: str
) -> str:
    """Return one line that describes the errors in settings.

    Args:
        place: returns the flag, the variable or the key in the file that a setting came from.
        known: the names of all settings.
        file: the file that unknown settings came from.
    """
    details = error.errors(include_url=False)
    lines = [_line(detail, place, known, file) for detail in details[:_MOST]]
    if len(details) > _MOST:
        lines.append(f"and {len(details) - _MOST} more")
    return "; ".join(lines)


def _line(
    detail: Mapping[str, Any], place: Callable[[str], str], known: Collection[str], file: str
) -> str:
    name, kind, value = str(detail["loc"][0]), detail["type"], detail["input"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(name, known, 1)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        return f"{file}: unknown setting '{printable(name[:_LONGEST])}'{hint}"
    where = place(name) + "".join(
        f"[{step}]" for step in detail["loc"][1:] if isinstance(step, int)
    )
    if kind == "value_error":
        return f"{where}: {detail['ctx']['error']}"
    return f"{where} must be {_expected(name, kind, detail)}{_shown(name, value)}"


def _expected(name: str, kind: str, detail: Mapping[str, Any]) -> str:
    """Describe the values that a setting may have."""
    context = detail.get("ctx") or {}
    if kind in _BOUNDS:
        bound = next(value for key, value in context.items() if key in ("gt", "ge", "lt", "le"))
        return f"{_BOUNDS[kind]} {bound}"
    if name in _EXPECTED:
        return _EXPECTED[name]
    if kind == "literal_error":
        return "one of " + str(context["expected"]).replace("'", "").replace(" or ", ", ")
    if kind == "string_unicode":
        return "valid UTF-8"
    if kind == "int_parsing_size":
        return "a smaller number"
    return _KINDS.get(kind.partition("_")[0], "another value")


def _shown(name: str, value: Any) -> str:
    """Return the value that was given, or an empty string if it is long or secret."""
    if name in SECRET or value is None:
        return ""
    if isinstance(value, dict):
        return ", not a table"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", not a list"
    if isinstance(value, bool):
        return f", not {str(value).lower()}"
    if isinstance(value, int) and value.bit_length() > 64:
        return ""
    text = str(value)
    if len(text) > _LONGEST:
        return ""
    return f", not '{printable(text)}'" if isinstance(value, str) else f", not {text}"
