"""Check schemas of every published dialect of JSON Schema, and convert the older ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from .gbnf import UnsupportedSchema

if TYPE_CHECKING:
    # Imported when the first schema is checked: the library takes 6 MB of memory.
    import jsonschema_rs

Path = tuple[str | int, ...]

# The keywords that apply to values of each type.
TYPES: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {
            "properties", "required", "additionalProperties", "minProperties", "maxProperties",
            "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas",
            "dependencies", "unevaluatedProperties",
        }
    ),
    "array": frozenset(
        {
            "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
            "contains", "minContains", "maxContains", "unevaluatedItems",
        }
    ),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
}  # fmt: skip
_ANY_TYPE = frozenset(
    {
        "type", "const", "enum", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref",
        "$dynamicRef", "$recursiveRef",
    }
)  # fmt: skip
# The keywords that an answer could violate; all others are annotations.
CONSTRAINTS = frozenset().union(_ANY_TYPE, *TYPES.values())
# The keywords that are enforced, within the limits that the errors name.
KEYWORDS = frozenset(
    {
        "type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref", "properties", "required",
        "additionalProperties", "minProperties", "maxProperties", "items", "prefixItems",
        "additionalItems", "minItems", "maxItems", "minLength", "maxLength", "pattern", "format",
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    }
)  # fmt: skip

_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def merged(schemas: Sequence[Any], path: Path) -> Any:
    """Return one schema for several that all apply.

    Raises:
        UnsupportedSchema: two of them have keywords that cannot be merged.
    """
    found: dict[str, Any] = {}
    for schema in schemas:
        if schema is False:
            return False
        if schema is True:
            continue
        _check_closed(found, schema, path)
        for key, value in schema.items():
            found[key] = _both(key, found[key], value, path) if key in found else value
    return found


def _both(key: str, one: Any, other: Any, path: Path) -> Any:
    if key not in CONSTRAINTS or (one == other and _identity(one) == _identity(other)):
        return one
    if key == "properties":
        return {
            **one,
            **{
                name: merged([one[name], value], (*path, key, name)) if name in one else value
                for name, value in other.items()
            },
        }
    if key == "required":
        return list(dict.fromkeys([*one, *other]))
    if key == "type":
        left, right = _list(one), _list(other)
        kinds = [kind for kind in left if kind in right]
        is_integer = ("number" in left and "integer" in right) or (
            "integer" in left and "number" in right
        )
        if is_integer and "integer" not in kinds:
            kinds.append("integer")
        if kinds:
            return kinds
    if key == "enum":
        known = {_identity(value) for value in other}
        return [value for value in one if _identity(value) in known]
    if key in _LARGER:
        return max(one, other)
    if key in _SMALLER:
        return min(one, other)
    if key == "additionalProperties" and False in (one, other):
        return False
    raise UnsupportedSchema(
        f"two different values of '{key}' that both apply are not enforced", (*path, key)
    )


def _identity(value: Any) -> bytes:
    """Return a key that is the same for equal JSON values: 1 and 1.0, objects in any order.

    In Python, true equals 1, too.
    """
    return json.dumps(_whole(value), sort_keys=True).encode()


def _whole(value: Any) -> Any:
    """Return a JSON value with integers in place of whole floats."""
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_closed(one: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> None:
    """Raise `UnsupportedSchema` if `additionalProperties` of one limits properties of the other."""
    for closed, open_ in ((one, other), (other, one)):
        if closed.get("additionalProperties", True) is True:
            continue
        if open_.get("properties", {}).keys() - closed.get("properties", {}).keys():
            raise UnsupportedSchema(
                "'additionalProperties' together with properties of another schema is not enforced",
                (*path, "additionalProperties"),
            )


def are_disjoint(one: Any, other: Any, path: Path) -> bool:
    """Return True if certainly no value satisfies both schemas."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if _values(one) is not None or _values(other) is not None:
        return _values_disjoint(one, other, path)
    kinds, others = _kinds(one), _kinds(other)
    if kinds and others and not kinds & others:
        return True
    if kinds != {"object"} or others != {"object"}:
        return False
    shared = set(one.get("required", ())) & set(other.get("required", ()))
    properties, more = one.get("properties", {}), other.get("properties", {})
    return any(
        are_disjoint(properties[name], more[name], path)
        for name in shared
        if name in properties and name in more
    )


def _values_disjoint(one: Mapping[str, Any], other: Mapping[str, Any], path: Path) -> bool:
    values = _values(one)
    if values is None:
        values, other = _values(other) or [], one
    return not allowed(other, values, path)


def allowed(schema: Any, values: Sequence[Any], path: Path) -> list[Any]:
    """Return the values that satisfy a schema.

    Raises:
        UnsupportedSchema: a reference or an invalid pattern prevents its evaluation.
    """
    import jsonschema_rs

    try:
        validator = jsonschema_rs.Draft202012Validator(
            schema, offline=True, pattern_options=jsonschema_rs.RegexOptions()
        )
        return [value for value in values if validator.is_valid(value)]
    except (jsonschema_rs.ReferencingError, jsonschema_rs.ValidationError, ValueError):
        reason = "'enum' or 'const' together with references or invalid patterns is not enforced"
        raise UnsupportedSchema(reason, path) from None


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values: list[Any] | None = schema.get("enum")
    return values


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema, with `number` for `integer`."""
    return {"number" if kind == "integer" else kind for kind in _list(schema.get("type", []))}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# Characters of a validation error's message, which may quote the whole schema.
MOST_SAID = 300
# The published dialects, with the names of their validators, which include the meta-schemas.
_DIALECTS = {
    "http://json-schema.org/draft-04/schema": "Draft4Validator",
    "http://json-schema.org/draft-06/schema": "Draft6Validator",
    "http://json-schema.org/draft-07/schema": "Draft7Validator",
    "https://json-schema.org/draft/2019-09/schema": "Draft201909Validator",
    "https://json-schema.org/draft/2020-12/schema": "Draft202012Validator",
}
LATEST = "https://json-schema.org/draft/2020-12/schema"

# Keywords whose values are schemas by name, or not schemas.
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
# The same, or lists of names, by name.
_DEPENDENCIES = "dependencies"
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
VALUES = frozenset({"enum", "const", "default", "examples", "example"})
_BOUNDS = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
# References that follow each other.
MOST_STEPS = 100
# An index in a JSON pointer.
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")


def check_schema(schema: Any) -> None:
    """Raise `UnsupportedSchema` with a path for a value that is not a JSON schema.

    A `$schema` or `$ref` is never fetched.
    """
    errors = [_deepest(error) for error in _meta_schema(_dialect(schema)).iter_errors(schema)]
    if errors and not _meta_schema(LATEST).is_valid(modern(schema)):
        # The error nearest to the root is the most helpful.
        path, message = min(errors, key=lambda error: len(error[0]))
        raise UnsupportedSchema(message, path)


def _dialect(schema: Any) -> str:
    """Return the dialect that a schema declares, if it is a published one, or the latest."""
    named = schema.get("$schema") if isinstance(schema, dict) else None
    named = named.rstrip("#") if isinstance(named, str) else ""
    return named if named in _DIALECTS else LATEST


@lru_cache(maxsize=len(_DIALECTS))
def _meta_schema(dialect: str) -> jsonschema_rs.Validator:
    import jsonschema_rs

    kind: type[jsonschema_rs.Validator] = getattr(jsonschema_rs, _DIALECTS[dialect])
    # A regular expression engine whose time is linear in the text for any expression.
    return kind({"$ref": dialect}, offline=True, pattern_options=jsonschema_rs.RegexOptions())


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
    """Return a schema of any dialect as one of the latest.

    Exclusive bounds become numbers, as since draft 6, and a list of `items` becomes `prefixItems`,
    as since 2020-12. Keywords of draft 3 become those of draft 4. References by the schema's own
    `id` become pointers, those that are no URI are encoded, and an `$id` that no reference needs is
    dropped. Many clients write older
    schemas without naming their dialect, or name one that was never published.
    """
    found = _modern(schema, schema)
    if not isinstance(found, dict):
        return found
    found.pop("$schema", None)
    base = found.get("$id", found.get("id"))
    if isinstance(base, str):
        _localize(found, base.partition("#")[0])
    _encode(found)
    # Clients put names into `$id`, which need not be addresses.
    if all(one == "#" or one.startswith("#/") for one in _references(found)):
        _drop_ids(found)
    return found


def _modern(schema: Any, root: Any) -> Any:
    if isinstance(schema, float) and schema.is_integer():
        # To JSON Schema, 2.0 is an integer, such as a length.
        return int(schema)
    if isinstance(schema, list):
        return [_modern(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if (key in NAMED or key == _DEPENDENCIES) and isinstance(value, dict):
            found[key] = {name: _modern(inner, root) for name, inner in value.items()}
        else:
            found[key] = value if key in VALUES else _modern(value, root)
    for exclusive, bound in _BOUNDS.items():
        is_flag = isinstance(found.get(exclusive), bool)
        if is_flag and found.pop(exclusive) and bound in found:
            found[exclusive] = found.pop(bound)
    if "prefixItems" not in found:
        # It only has an effect next to a list of `items`.
        rest = found.pop("additionalItems", None)
        if isinstance(found.get("items"), list):
            first = found.pop("items")
            if first:
                found["prefixItems"] = first
            if rest is not None:
                found["items"] = rest
    _list_required(found, schema.get("properties"), root)
    _replace_draft_3(found)
    return found


def _list_required(found: dict[str, Any], properties: Any, root: Any) -> None:
    """List the properties that say `required: true` themselves, as in draft 3."""
    if isinstance(found.get("required"), bool):
        # That of a property; elsewhere, it says nothing.
        del found["required"]
    listed = found.get("required", [])
    if isinstance(properties, dict) and isinstance(listed, list):
        named = [name for name, one in properties.items() if _is_required(one, root)]
        if named:
            found["required"] = [*listed, *(name for name in named if name not in listed)]


def _is_required(schema: Any, root: Any) -> bool:
    for _ in range(MOST_STEPS):
        if not isinstance(schema, dict):
            return False
        if schema.get("required") is True:
            return True
        target = schema.get("$ref")
        if not isinstance(target, str) or not target.startswith("#"):
            return False
        schema = at_pointer(root, target)
    return False


def _replace_draft_3(found: dict[str, Any]) -> None:
    """Replace keywords of draft 3 in place."""
    kinds = found.get("type")
    if isinstance(kinds, list) and "any" not in kinds and "anyOf" not in found:
        if any(isinstance(kind, dict) for kind in kinds):
            del found["type"]
            found["anyOf"] = [one if isinstance(one, dict) else {"type": one} for one in kinds]
    elif kinds is not None and "any" in _list(kinds):
        del found["type"]
    if "disallow" in found and "not" not in found:
        found["not"] = {"type": found.pop("disallow")}
        _replace_draft_3(found["not"])
    if isinstance(found.get("extends"), dict | list) and "allOf" not in found:
        found["allOf"] = _list(found.pop("extends"))
    if "divisibleBy" in found:
        found.setdefault("multipleOf", found.pop("divisibleBy"))
    needed = found.get(_DEPENDENCIES)
    if isinstance(needed, dict):
        found[_DEPENDENCIES] = {
            name: [one] if isinstance(one, str) else one for name, one in needed.items()
        }


def pointer(target: str) -> Path:
    """Return the keys of a JSON pointer in a fragment of a URI (RFC 6901, section 6)."""
    parts = (unquote(part) for part in target[2:].split("/") if part)
    keys = [part.replace("~1", "/").replace("~0", "~") for part in parts]
    return tuple(int(key) if _INDEX.fullmatch(key) else key for key in keys)


def at_pointer(root: Any, target: str) -> Any:
    """Return the value that a reference within a schema points to; None if there is none."""
    found = _at(root, pointer(target))
    # Some generators do not encode the names of definitions.
    return found if found is not None else _at(root, pointer(target.replace("%", "%25")))


def _at(root: Any, path: Path) -> Any:
    at = root
    for key in path:
        if isinstance(at, list) and isinstance(key, int) and key < len(at):
            at = at[key]
        elif isinstance(at, dict) and str(key) in at:
            at = at[str(key)]
        else:
            return None
    return at


def _localize(root: dict[str, Any], base: str) -> None:
    """Shorten the references into the schema at `base` to their fragments, in place."""
    for one in _each(root) if base else ():
        target = one.get("$ref")
        if isinstance(target, str) and (target == base or target.startswith(f"{base}#")):
            one["$ref"] = target.removeprefix(base) or "#"


# The characters besides letters and digits that a fragment of a URI has as they are, and a percent
# sign that encodes nothing.
_IN_FRAGMENT = "/?:@!$&'()*+,;=%"
_BARE_PERCENT = re.compile("%(?![0-9a-fA-F]{2})")


def _encode(root: dict[str, Any]) -> None:
    """Encode the names in pointers where their generator did not, in place."""
    for one in _each(root):
        target = one.get("$ref")
        if isinstance(target, str) and target.startswith("#/"):
            plain = target.replace("%", "%25")
            if _at(root, pointer(target)) is None and _at(root, pointer(plain)) is not None:
                target = plain
            target = _BARE_PERCENT.sub("%25", target)
            one["$ref"] = "#" + quote(target[1:], safe=_IN_FRAGMENT)


def _each(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a schema and all its parts."""
    todo = [root]
    while todo:
        one = todo.pop()
        yield one
        todo += _schemas(one)


def _schemas(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a schema consists of."""
    for key, value in schema.items():
        if key in VALUES:
            continue
        if key in NAMED and isinstance(value, dict):
            value = [*value.values()]
        yield from (one for one in _list(value) if isinstance(one, dict))


def _references(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the references of a schema and of its parts."""
    for one in _each(schema):
        yield from (one[key] for key in _REFERENCES if isinstance(one.get(key), str))


def _drop_ids(root: dict[str, Any]) -> None:
    """Drop the `$id` of a schema, and of its parts without references, in place.

    Pointers of a part begin at its `$id`.
    """
    root.pop("$id", None)
    for one in _each(root):
        if "$id" in one and not any(_references(one)):
            del one["$id"]
