"""GBNF that all tool call formats share: markers, and arguments that match their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson

from ....backends.base import Grammar, Preamble
from ....backends.grammar import (
    JSON,
    PLAIN,
    Notation,
    Unenforced,
    embedded,
    rules_of,
    token_or_text,
    unmarked,
)
from ..json_call import INPUT

Path: TypeAlias = tuple[str | int, ...]

GAP = "[ \\n]{0,2}"
# Keywords of schemas that allow no arguments if `properties` and `required` are empty.
_OF_NONE = {
    "$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples",
    "properties", "required", "strict", "title", "type",
}  # fmt: skip
# Keywords to remove from a schema one by one; each removal reads the whole schema again.
MOST_TAKEN_AWAY = 32
# The characters of an input's grammar, up to which it is repeated for another kind of quotes.
_MOST_TWICE = 16_000
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionSchema(NamedTuple):
    """A function, and the schema of its arguments.

    Args:
        schema: the JSON schema of the arguments; None if the function has no arguments.
        strict: True if the whole schema must be enforced. Otherwise keywords that a grammar cannot
            enforce are dropped, or the whole schema if the grammar would be too large.
        input: the grammar of the text that a custom tool takes; its schema has one argument.
    """

    name: str
    schema: bytes | None
    strict: bool
    input: Grammar | None = None


def marker(text: str, special: frozenset[str]) -> str:
    """Return the GBNF of a marker: one token of the model, or its spelling."""
    return token_or_text(text, Preamble("", "", False, special))


def arguments(
    function: FunctionSchema, name: str, prefix: str, index: int, notation: Notation = JSON
) -> Mapping[str, str]:
    """Return the rules for arguments as an object.

    Args:
        name: the name of the main rule; names of the others begin with the prefix.
        index: the index of the function, for errors.
        notation: the way to write the object.

    Raises:
        Unenforced: a strict schema cannot be enforced.
    """
    if function.input is not None:
        return _input(function.input, name, prefix, notation)
    schema = _NO_ARGUMENTS if function.schema is None else orjson.loads(function.schema)
    # Keywords that cannot be enforced may still allow arguments.
    may_be_none = isinstance(schema, dict) and schema.keys() <= _OF_NONE
    if function.strict:
        try:
            return rules_of(_as_object(schema, may_be_none), name, prefix, notation)
        except Unenforced as error:
            raise Unenforced(error.reason, (index, *error.path)) from None
    # Remove what cannot be enforced, until the rest can be.
    for _ in range(MOST_TAKEN_AWAY):
        try:
            return rules_of(_as_object(schema, may_be_none), name, prefix, notation)
        except Unenforced as error:
            if not without(schema, error.path):
                break
    return rules_of({"type": "object"}, name, prefix, notation)


def _input(grammar: Grammar, name: str, prefix: str, notation: Notation) -> Mapping[str, str]:
    """Return the rules for the arguments of a custom tool, whose text follows a grammar."""
    quote, text = notation.quote, f"{prefix}text"
    encoding = PLAIN if notation.end else notation.encoding
    rules = embedded(grammar, text, f"{prefix}i", encoding)
    if notation.end:
        rules = unmarked(rules, text, notation.end)
    given = f"{quote} {text} {quote}"
    if notation.other is not None and sum(map(len, rules.values())) <= _MOST_TWICE:
        quote, encoding = notation.other
        rules |= embedded(grammar, f"{text}-other", f"{prefix}o", encoding)
        given = f"({given} | {quote} {text}-other {quote})"
    key, ws = notation.named(INPUT), notation.ws
    first, last = notation.brackets
    rules[name] = f'{first} {ws} {key} {ws} "{notation.colon}" {ws} {given} {ws} {last}'
    return rules


def _as_object(schema: Any, may_be_none: bool) -> Any:
    """Require an object in a schema, and an empty one if it may be and names no properties."""
    if not isinstance(schema, dict):
        return schema
    if may_be_none and schema.get("properties") == {} and not schema.get("required"):
        schema = {**schema, "additionalProperties": False}
    return {"type": "object", **schema}


def without(schema: Any, path: Sequence[str | int], exactly: bool = False) -> bool:
    """Remove the keyword at a path, or the nearest before it; return True if one was removed.

    Of the required names, only the one at the path is removed. A path may continue through the
    target of a reference, which is elsewhere in the schema.

    Args:
        exactly: True if only the keyword at the path itself may be removed.
    """
    nearest: tuple[Any, str | int] | None = None
    before: str | int = ""
    for key in path:
        if isinstance(schema, dict) and isinstance(key, str) and key in schema:
            nearest = schema, key
        elif not isinstance(schema, list) or not isinstance(key, int) or key >= len(schema):
            nearest = None if exactly else nearest
            break
        elif before == "required":
            nearest = schema, key
        schema, before = schema[key], key
    if nearest is None:
        return False
    del nearest[0][nearest[1]]
    return True
