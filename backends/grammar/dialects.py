"""Check schemas of every published dialect of JSON Schema, and convert the older ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jsonschema_rs

from .merge import PATTERNS
from .unenforced import Unenforced

Path = tuple[str | int, ...]

# Characters of a validation error's message, which may quote the whole schema.
MOST_SAID = 300
# The published dialects; the validators include their meta-schemas.
_DIALECTS: Mapping[str, type[jsonschema_rs.Validator]] = {
    "http://json-schema.org/draft-04/schema": jsonschema_rs.Draft4Validator,
    "http://json-schema.org/draft-06/schema": jsonschema_rs.Draft6Validator,
    "http://json-schema.org/draft-07/schema": jsonschema_rs.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema_rs.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema_rs.Draft202012Validator,
}
LATEST = "https://json-schema.org/draft/2020-12/schema"

# Keywords whose values are schemas by name, or not schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "default", "examples", "example"})
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}


def check_schema(schema: Any) -> None:
    """Raise `Unenforced` with a path for a value that is not a JSON schema.

    A `$schema` or `$ref` is never fetched.
    """
    errors = [_deepest(error) for error in _meta_schema(_dialect(schema)).iter_errors(schema)]
    if errors and not _meta_schema(LATEST).is_valid(modern(schema)):
        # The error nearest to the root is the most helpful.
        path, message = min(errors, key=lambda error: len(error[0]))
        raise Unenforced(message, path)


def _dialect(schema: Any) -> str:
    """Return the dialect that a schema declares, if it is a published one, or the latest."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    named = named.rstrip("#") if isinstance(named, str) else ""
    return named if named in _DIALECTS else LATEST


@lru_cache(maxsize=len(_DIALECTS))
def _meta_schema(dialect: str) -> jsonschema_rs.Validator:
    kind = _DIALECTS[dialect]
    return kind({"$ref": dialect}, offline=True, pattern_options=PATTERNS)


def _deepest(error: jsonschema_rs.ValidationError) -> tuple[Path, str]:
    """Return the path and the message of an error; for alternatives, those of the deepest one."""
    path, message = tuple(error.instance_path), error.message
    branches = getattr(error.kind, "context", ())
    if branches:
        # OpenAI's message.
        message = f"{error.instance!r:.100} is not valid under any of the given schemas"
    inner = [_deepest(one) for branch in branches for one in branch]
    deeper = [one for one in inner if len(one[0]) > len(path)]
    return max(deeper or [(path, message[:MOST_SAID])], key=lambda one: len(one[0]))


def modern(schema: Any) -> Any:
    """Return a schema in which exclusive bounds are numbers, as since draft 6.

    Many tools still have the flags of draft 4, with or without naming it.
    """
    if isinstance(schema, list):
        return [modern(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            found[key] = {name: modern(inner) for name, inner in value.items()}
        else:
            found[key] = value if key in _VALUES else modern(value)
    for exclusive, bound in _BOUNDS.items():
        is_flag = isinstance(found.get(exclusive), bool)
        if is_flag and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    return found
