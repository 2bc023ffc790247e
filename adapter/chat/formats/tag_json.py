"""GBNF for JSON in tags: values that follow a part of a function's schema."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ....backends.grammar import JSON, Unenforced, Within
from ....backends.grammar import rules_of as rules_of_schema
from .rules import MOST_TAKEN_AWAY, Path, without
from .tag_values import Json


def rules_of(part: Json, name: str, prefix: str, root: Any, strict: bool) -> Mapping[str, str]:
    """Return the rules for the values of a part of a schema.

    Args:
        name: the name of the main rule; names of the others begin with the prefix.
        root: the whole schema, where references begin.
        strict: True if everything must be enforced; otherwise, what cannot be is dropped.
    """
    schema, path = part.schema, part.path
    try:
        return rules_of_schema(schema, name, prefix, JSON, Within(root, path))
    except Unenforced:
        if strict:
            raise
    # Removing keywords changes the schemas.
    schema, root = deepcopy(schema), deepcopy(root)
    for _ in range(MOST_TAKEN_AWAY):
        try:
            return rules_of_schema(schema, name, prefix, JSON, Within(root, path))
        except Unenforced as error:
            if not _taken_away(schema, root, path, error.path):
                break
    # An empty object says nothing about the schema, which may be circular.
    return rules_of_schema({"type": sorted(part.types)}, name, prefix)


def _taken_away(schema: Any, root: Any, own: Path, path: Path) -> bool:
    """Remove the keyword at a path of the whole schema; `own` is the path of the part.

    The part may be merged from several places, so that it is not in the whole schema itself.
    """
    inside = path[len(own) :] if path[: len(own)] == own else ()
    gone = [without(schema, inside, exactly=True), without(root, path, exactly=True)]
    return any(gone) or without(schema, inside) or without(root, path)
