"""Objects that are distinguished by their `type`, with OpenAI's errors for those of Responses.

Null members are the same as absent ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .common import invalid, kind_of


def type_of(value: object) -> tuple[dict[str, Any], Any]:
    """Return an object and its type, which may be any value but null.

    Raises:
        PydanticCustomError: it is not an object, or has no type.
    """
    if not isinstance(value, dict):
        raise wrong_type(value, "an object")
    kind = value.get("type")
    if kind is None:
        raise invalid(
            "Missing required parameter: '{param}'.", "missing_required_parameter", ".type"
        )
    return value, kind


def wrong_type(value: object, expected: str) -> Exception:
    """Return OpenAI's error for a value of another JSON type; it calls null an object here."""
    found = "an object" if value is None else kind_of(value)
    return invalid(
        f"Invalid type for '{{param}}': expected {expected}, but got {found} instead.",
        "invalid_type",
    )


def wrong_value(value: object, words: Sequence[str], path: str = "") -> Exception:
    """Return OpenAI's error for a word that is not one of several."""
    listed = ", ".join(f"'{word}'" for word in words[:-1])
    listed += f"{',' * (len(words) > 2)} and '{words[-1]}'"
    # The text is a template in which `{param}` is replaced.
    shown = str(value)[:200].replace("{param}", "{ param }")
    message = f"Invalid value: '{shown}'. Supported values are: {listed}."
    return invalid(message, "invalid_value", path)


def without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object without its null members."""
    return {name: one for name, one in value.items() if one is not None}
