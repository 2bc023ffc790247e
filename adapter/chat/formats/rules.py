"""GBNF for what every format of calls is made of: markers, and arguments by their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson

from ....backends.base import Preamble
from ....backends.grammar import Unenforced, rules_of, token_or_text

Path: TypeAlias = tuple[str | int, ...]

GAP = "[ \\n]{0,2}"
_OTHER_KEYS = {"additionalProperties", "patternProperties", "required", "$ref", "allOf", "anyOf"}
# Keywords that are left out of a schema one by one; each time all of it is read again.
_MOST_TAKEN_AWAY = 32
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionSchema(NamedTuple):
    """A function whose calls a grammar is for.

    Args:
        schema: of its arguments, as JSON; None: it has none.
        strict: whether all of that is to be made sure of; else what no grammar can say is left out,
            and where there are too many for one grammar all that the schemas say.
    """

    name: str
    schema: bytes | None
    strict: bool


def marker(text: str, special: frozenset[str]) -> str:
    """A marker: one token of the model's, or its spelling."""
    return token_or_text(text, Preamble("", "", False, special))


def arguments(function: FunctionSchema, name: str, prefix: str, index: int) -> Mapping[str, str]:
    """Rules for arguments as JSON.

    Args:
        name: of the rule; the others begin with the prefix.
        index: the function's place, for errors.

    Raises:
        Unenforced: a schema that is to be made sure of cannot be.
    """
    schema = _NO_ARGUMENTS if function.schema is None else orjson.loads(function.schema)
    if function.strict:
        try:
            return rules_of(_as_object(schema), name, prefix)
        except Unenforced as error:
            raise Unenforced(error.reason, (index, *error.path)) from None
    # What cannot be made sure of is taken away, until all of the rest can.
    for _ in range(_MOST_TAKEN_AWAY):
        try:
            return rules_of(_as_object(schema), name, prefix)
        except Unenforced as error:
            if not _without(schema, error.path):
                break
    return rules_of({"type": "object"}, name, prefix)


def value(schema: Any, name: str, prefix: str, path: Path | None) -> Mapping[str, str]:
    """Rules for any value; without a path what cannot be made sure of is left out."""
    for _ in range(_MOST_TAKEN_AWAY):
        try:
            return rules_of(schema, name, prefix)
        except Unenforced as error:
            if path is not None:
                raise Unenforced(error.reason, (*path, *error.path)) from None
            if not _without(schema, error.path):
                break
    return rules_of(True, name, prefix)


def _as_object(schema: Any) -> Any:
    """Arguments are an object; one whose properties are none has none."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("properties") == {} and not schema.keys() & _OTHER_KEYS:
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **schema}


def _without(schema: Any, path: Sequence[str | int]) -> bool:
    """Take away what is at a path, or the nearest that can be; whether anything was.

    A path may lead on through what a reference stands for, which is elsewhere.
    """
    nearest: tuple[dict[str, Any], str] | None = None
    for key in path:
        if isinstance(schema, dict) and isinstance(key, str) and key in schema:
            nearest = schema, key
        elif not isinstance(schema, list) or not isinstance(key, int) or key >= len(schema):
            break
        schema = schema[key]
    if nearest is None:
        return False
    del nearest[0][nearest[1]]
    return True
