"""Fields whose value is one text or several, each as a string or as token ids."""

from typing import Any, TypeAlias

from pydantic_core import PydanticCustomError

from .. import limits
from .common import (
    Array,
    empty_string,
    invalid,
    is_huge,
    range_error,
    too_long,
    unexpected,
)

# The types that a field with prompts or inputs may have.
Inputs: TypeAlias = str | Array[str] | Array[int] | Array[Array[int]]

_EXPECTED = "a string, array of strings, array of token ids, or array of such arrays"


def check_inputs(
    value: object, most: int, allow_empty: bool = True, for_objects: str = ""
) -> object:
    """Check that a value is a string, token ids, or an array of either, unmixed.

    Args:
        most: the largest number of strings, or of arrays of token ids.
        allow_empty: False to reject empty strings.
        for_objects: a hint for clients that send an object.
    """
    if isinstance(value, str):
        if not value and not allow_empty:
            raise empty_string()
        return value
    if not isinstance(value, list):
        raise unexpected(value, _EXPECTED, hint=for_objects if isinstance(value, dict) else "")
    if not value:
        raise _empty_array()
    first = _shape(value[0])
    if first is not int and len(value) > most:
        raise too_long("array", most, len(value))
    _check_count(value, first)
    for index, item in enumerate(value):
        if first is None or _shape(item) != first:
            hint = for_objects if isinstance(item, dict) else ""
            raise unexpected(item, _EXPECTED, f"[{index}]", hint)
        if isinstance(item, list):
            _check_ids(item, f"[{index}]", for_objects)
        elif item == "" and not allow_empty:
            raise empty_string(f"[{index}]")
    if first is int:
        _check_ids(value, "")
    return value


def _check_count(prompts: list[object], first: type | None) -> None:
    """Reject more token ids than any context holds, before checking each of them."""
    if first is int:
        count = len(prompts)
    else:
        count = sum(len(one) for one in prompts if isinstance(one, list))
    if count > limits.IDS.maximum:
        raise invalid(
            f"Invalid '{{param}}': array too long. Expected at most {limits.IDS.maximum} token "
            f"ids, but got {count} instead.",
            "array_above_max_length",
        )


def _shape(item: object) -> type | None:
    if is_huge(item):
        return int
    return type(item) if type(item) in (str, int, list) else None


def _empty_array(path: str = "") -> PydanticCustomError:
    return invalid(
        "Invalid '{param}': empty array. Expected an array with minimum length 1, but got an "
        "empty array instead.",
        "empty_array",
        path,
    )


def _check_ids(ids: list[Any], path: str, for_objects: str = "") -> None:
    if not ids:
        raise _empty_array(path)
    for index, token in enumerate(ids):
        if type(token) is not int and not is_huge(token):
            hint = for_objects if isinstance(token, dict) else ""
            raise unexpected(token, "an integer", f"{path}[{index}]", hint)
        if not 0 <= token < 2**31:
            relation, bound = (">=", 0) if token < 0 else ("<=", 2**31 - 1)
            message, code = range_error("integer", relation, bound, token)
            raise invalid(message, code, path=f"{path}[{index}]")
