"""References inside a schema: what they point to, and schemas without them at their top."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dialects import check_schema
from .merge import CONSTRAINTS, merged
from .unenforced import Unenforced

Path = tuple[str | int, ...]

# Keywords whose values are schemas by name, lists of schemas, and schemas.
_NAMED = frozenset({"$defs", "definitions", "properties", "patternProperties"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems", "not", "contains"})
# References that follow each other.
_MOST_STEPS = 100
# Levels of `allOf` in each other.
_MOST_LEVELS = 16


class Work:
    """A limit of the references, unions and merged keywords that are read for one value.

    Circular and branching schemas would otherwise take forever.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._left = most

    def take(self, schema: Any, path: Path) -> None:
        """Account for a schema; raise `Unenforced` beyond the limit."""
        size = 1
        if isinstance(schema, Mapping):
            size += len(schema) + sum(len(one) for one in schema.values() if _has_size(one))
        self._left -= size
        if self._left < 0:
            raise Unenforced("it has too many alternatives, or is circular", path)


def _has_size(value: object) -> bool:
    return isinstance(value, (dict, list))


def pointer(target: str) -> Path:
    """Return the keys of a JSON pointer."""
    keys = [key.replace("~1", "/").replace("~0", "~") for key in target[2:].split("/") if key]
    return tuple(int(key) if key.isdecimal() and len(key) < 10 else key for key in keys)


def target_of(root: Any, target: str, path: Path) -> Any:
    """Return the schema that a reference points to; `path` is the place of the reference."""
    if target != "#" and not target.startswith("#/"):
        raise Unenforced(f"'$ref' points outside the schema: '{target:.100}'", (*path, "$ref"))
    at = root
    keys = pointer(target)
    for key in keys:
        if isinstance(at, list) and isinstance(key, int) and key < len(at):
            at = at[key]
        elif isinstance(at, dict) and str(key) in at:
            at = at[str(key)]
        else:
            raise Unenforced(f"'$ref' cannot be resolved: '{target:.100}'", (*path, "$ref"))
    if not _is_place_of_schema(keys):
        check_schema(at)
    return at


def _is_place_of_schema(keys: Path) -> bool:
    """Return True if the value at a path in a schema is certainly a schema, too."""
    while keys:
        is_last = len(keys) == 1
        in_list = not is_last and isinstance(keys[1], int)
        if (keys[0] in _NAMED and not is_last) or (keys[0] in _LISTS and in_list):
            keys = keys[2:]
        elif keys[0] in _SCHEMAS and not in_list:
            keys = keys[1:]
        else:
            return False
    return True


def resolved(schema: Any, root: Any, path: Path, work: Work | None = None) -> Any:
    """Return a schema with the references at its top resolved."""
    for _ in range(_MOST_STEPS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        if work is not None:
            work.take(schema, path)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        at = target_of(root, schema["$ref"], path)
        schema = merged([at, rest], path) if rest.keys() & CONSTRAINTS else at
    raise Unenforced("'$ref' is circular", (*path, "$ref"))


def flattened(schema: Any, root: Any, path: Path, work: Work) -> Any:
    """Return a schema with the references and each `allOf` at its top merged into it."""
    for _ in range(_MOST_LEVELS):
        schema = resolved(schema, root, path, work)
        if not isinstance(schema, Mapping) or "allOf" not in schema:
            return schema
        work.take(schema, path)
        given = [resolved(part, root, path, work) for part in schema["allOf"]]
        inner: list[Any] = []
        plain = [{key: value for key, value in schema.items() if key != "allOf"}]
        for part in given:
            work.take(part, path)
            if isinstance(part, Mapping) and "allOf" in part:
                inner += part["allOf"]
                part = {key: value for key, value in part.items() if key != "allOf"}
            plain.append(part)
        schema = merged(plain, path)
        if not inner or not isinstance(schema, dict):
            return schema
        schema["allOf"] = inner
    raise Unenforced("'allOf' is circular", (*path, "allOf"))
