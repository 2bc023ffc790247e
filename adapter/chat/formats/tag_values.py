"""Values in tags: a schema says whether a value is text, JSON, or either.

A list of texts, a reference, and a union are resolved for it, so that a value that can only be a
string is always text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from ....backends.grammar import (
    CONSTRAINTS,
    TYPES,
    Unenforced,
    Work,
    allowed,
    are_disjoint,
    flattened,
    merged,
)
from .rules import Path

# The types of values that are not text.
OTHERS = frozenset({"array", "boolean", "integer", "null", "number", "object"})
_WITH_LIMITS = frozenset().union(*TYPES.values())
# The first characters of values that can be mistaken for text.
_FIRST = {"object": "{", "array": "[", "number": "-0123456789", "integer": "-0123456789"}
# Unions inside unions.
_MOST_DEEP = 32


class Json(NamedTuple):
    """A part of a schema that allows some values of types that are not text.

    Args:
        path: its path in the whole schema.
    """

    schema: Any
    path: Path
    types: frozenset[str]


class Values(NamedTuple):
    """The values that a schema allows for an argument.

    Args:
        texts: the texts, each with the path of the keyword that lists it; None for any text.
        plain: the types other than text whose values are all allowed.
        ruled: the schemas for values of other types.
        listed: the values other than text that the schema lists.
        limits: the paths of keywords that limit text, but cannot be enforced for text in tags.
    """

    texts: Mapping[str, Path] | None
    plain: frozenset[str]
    ruled: Sequence[Json] = ()
    listed: Sequence[Any] = ()
    limits: Sequence[Path] = ()

    @property
    def may_be_text(self) -> bool:
        """True if a string is allowed."""
        return self.texts is None or bool(self.texts)

    @property
    def is_text(self) -> bool:
        """True if only strings are allowed."""
        return self.may_be_text and not (self.plain or self.ruled or self.listed)

    @property
    def is_none(self) -> bool:
        """True if no value is allowed."""
        return not (self.may_be_text or self.plain or self.ruled or self.listed)

    @property
    def opens(self) -> tuple[str, ...]:
        """The first characters of JSON that can contain the tag after it."""
        types = frozenset().union(*(one.types for one in self.ruled))
        if self.texts is not None:
            types |= self.plain.union(*(types_of_value(one) for one in self.listed))
        return tuple(_FIRST[kind] for kind in sorted(types & {"array", "object"}))

    @property
    def begins(self) -> str:
        """The first characters that any text cannot have, because JSON with limits has them."""
        types = frozenset().union(*(one.types for one in self.ruled))
        return "".join(dict.fromkeys("".join(_FIRST.get(one, "") for one in sorted(types))))

    def has(self, text: str) -> bool:
        """Return True if a text is one of the values that are not text."""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return False
        types = self.plain.union(*(one.types for one in self.ruled))
        return bool(types_of_value(value) & types) or _identity(value) in map(
            _identity, self.listed
        )

    def apart(self, end: str) -> list[str]:
        """Return the listed texts that cannot be mistaken for JSON, or begin with JSON and `end`.

        Args:
            end: the tag after a value, where no tag before it says that it is text.
        """
        texts = list(self.texts or ())
        if self.is_text:
            return texts
        parts = {one: one.split(end) for one in texts}
        return [
            text
            for text in texts
            if not text.startswith(self.opens)
            and not any(self.has(end.join(parts[text][: i + 1])) for i in range(len(parts[text])))
        ]


ANY = Values(None, OTHERS)


def types_of_value(value: object) -> frozenset[str]:
    """Return the JSON types of a value."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"array" if isinstance(value, list) else "object"})


def values_of(schema: Any, root: Any, path: Path, strict: bool = False) -> Values:
    """Return the values that a schema allows.

    Args:
        root: the whole schema, which is checked.
        path: the path of the schema in it.
        strict: True if what cannot be decided is an error; otherwise any value is allowed.

    Raises:
        Unenforced: see `strict`.
    """
    try:
        return _Reading(root, strict).values(schema, path)
    except Unenforced:
        if strict:
            raise
        return ANY


class _Reading:
    """The values of the alternatives of one schema, which are collected."""

    def __init__(self, root: Any, strict: bool) -> None:
        self._root = root
        self._strict = strict
        self._work = Work()
        self._any_text = False
        self._texts: dict[str, Path] = {}
        self._plain: set[str] = set()
        self._ruled: list[Json] = []
        self._listed: list[Any] = []
        self._limits: list[Path] = []

    def values(self, schema: Any, path: Path) -> Values:
        """Return the values of a schema."""
        self._visit(schema, path, _MOST_DEEP)
        if "number" in self._plain:
            self._plain.add("integer")
        plain = frozenset(self._plain)
        ruled = [one for one in self._ruled if not one.types <= plain]
        texts = None if self._any_text else self._texts
        return Values(texts, plain, ruled, self._listed, self._limits)

    def _visit(self, given: Any, path: Path, levels: int) -> None:
        if not levels:
            raise Unenforced("it has too many unions inside unions, or is circular", path)
        schema = flattened(given, self._root, path, self._work)
        self._work.take(schema, path)
        if schema is False:
            return
        if schema is True:
            schema = {}
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._union(schema, keyword, path, levels)
                return
        if "const" in schema or "enum" in schema:
            self._values(schema, path)
            return
        kinds = _kinds(schema)
        if "string" in kinds:
            self._text(_of(schema, "string"), path)
        others = [kind for kind in kinds if kind != "string"]
        if "string" not in kinds and any(_is_ruled(schema, kind) for kind in others):
            # With its references, which may be circular.
            self._ruled.append(Json(given, path, frozenset(others)))
            return
        for kind in others:
            if _is_ruled(schema, kind):
                self._ruled.append(Json(_of(schema, kind), path, frozenset({kind})))
            else:
                self._plain.add(kind)

    def _union(self, schema: Mapping[str, Any], keyword: str, path: Path, levels: int) -> None:
        options = schema[keyword]
        if self._strict and keyword == "oneOf":
            self._check_disjoint(options, (*path, keyword))
        rest = {key: value for key, value in schema.items() if key != keyword}
        has_rest = rest.keys() & CONSTRAINTS
        for index, option in enumerate(options):
            here = (*path, keyword, index)
            if has_rest:
                self._work.take(rest, path)
                option = merged([rest, flattened(option, self._root, here, self._work)], here)
            self._visit(option, here, levels - 1)

    def _check_disjoint(self, options: Sequence[Any], path: Path) -> None:
        flat = [flattened(one, self._root, path, self._work) for one in options]
        for index, one in enumerate(flat):
            for other in flat[:index]:
                self._work.take(other, path)
                if not are_disjoint(one, other, path):
                    reason = "'oneOf' is enforced only if its schemas exclude each other"
                    raise Unenforced(f"{reason}; use 'anyOf'", path)

    def _values(self, schema: Mapping[str, Any], path: Path) -> None:
        keyword = "const" if "const" in schema else "enum"
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        rest = {key: value for key, value in schema.items() if key != keyword}
        types = set(_list(rest.get("type", [])))
        if types:
            values = [one for one in values if types_of_value(one) & types]
        if rest.keys() & CONSTRAINTS - {"type"}:
            values = allowed(rest, values, path)
        for value in values:
            if isinstance(value, str):
                self._texts.setdefault(value, (*path, keyword))
            else:
                self._listed.append(value)

    def _text(self, schema: Mapping[str, Any], path: Path) -> None:
        self._any_text = True
        self._limits += [(*path, key) for key in schema if key in CONSTRAINTS - {"type"}]


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema without alternatives allows, as its grammar does."""
    if "type" in schema:
        return list(dict.fromkeys(_list(schema["type"])))
    found = [kind for kind, keywords in TYPES.items() if schema.keys() & keywords]
    return found or ["string", *sorted(OTHERS)]


def _of(schema: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return the part of a schema that is for values of a type."""
    own = TYPES.get("number" if kind == "integer" else kind, frozenset())
    kept = {key: value for key, value in schema.items() if key not in _WITH_LIMITS or key in own}
    return {**kept, "type": kind}


def _is_ruled(schema: Mapping[str, Any], kind: str) -> bool:
    """Return True if a schema restricts the values of a type."""
    return bool(_of(schema, kind).keys() & CONSTRAINTS - {"type"})


def _identity(value: object) -> bytes:
    """Return a key that is the same for equal values of the same type."""
    return json.dumps(value, sort_keys=True).encode()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
