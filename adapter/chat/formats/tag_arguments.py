"""The arguments that a function's schema names, for calls in tags.

A grammar and a parser read the schema in the same way, so that what is written is read back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ....backends.grammar import CONSTRAINTS, Unenforced, Work, flattened, merged
from .rules import Path
from .tag_values import Values, values_of

_WRITTEN = frozenset({"type", "properties", "required", "additionalProperties"})
_ALTERNATIVES = ("anyOf", "oneOf")
# The alternatives at the top of a schema that are followed.
_MOST_OPTIONS = 16


class Argument(NamedTuple):
    """An argument that a schema names.

    Args:
        path: the path of its schema.
    """

    schema: Any
    path: Path
    is_required: bool


class Option(NamedTuple):
    """One of the alternative lists of arguments.

    Args:
        named: the arguments by name.
        other: the schema of the arguments with other names; False if there are none.
    """

    named: Mapping[str, Argument]
    other: Any


class Arguments:
    """The arguments of a function.

    Args:
        schema: the function's schema, which is checked, and modern for a grammar.
        strict: True if everything in it must be followed.

    Raises:
        Unenforced: a strict schema has a keyword that calls in tags cannot follow.
    """

    def __init__(self, schema: Any, strict: bool = False) -> None:
        self.root = schema if isinstance(schema, dict) else {}
        self.strict = strict
        self.options = [self._option(*one) for one in self._tops()]
        # The names of the arguments.
        self.names = tuple(dict.fromkeys(name for one in self.options for name in one.named))
        self._known: dict[str | None, Values] = {}

    def schema_of(self, name: str | None) -> tuple[Any, Path]:
        """Return the schema of an argument and its path; for alternatives, a union.

        Args:
            name: the name of the argument; None for one that the schema does not name.
        """
        found = [one.named[name] for one in self.options if name is not None and name in one.named]
        if not found:
            other = self.options[0].other
            return (True if other is False else other), ("additionalProperties",)
        schemas: list[Any] = []
        for one in found:
            if one.schema not in schemas:
                schemas.append(one.schema)
        return (schemas[0] if len(schemas) == 1 else {"anyOf": schemas}), found[0].path

    def values(self, name: str | None) -> Values:
        """Return the values of an argument, as a parser reads them."""
        if name not in self.names:
            name = None
        if name not in self._known:
            schema, path = self.schema_of(name)
            self._known[name] = values_of(schema, self.root, path, self.strict)
        return self._known[name]

    def own(self, name: str, argument: Argument) -> tuple[Values, Argument]:
        """Return the values of an argument of one option, and what describes them.

        It is the union of the options if one alone would be read as another.
        """
        values = self.values(name)
        if len(self.options) > 1:
            own = values_of(argument.schema, self.root, argument.path)
            if (own.is_text and values.is_text) or not values.may_be_text:
                return own, argument
        schema, path = self.schema_of(name)
        return values, argument._replace(schema=schema, path=path)

    def _tops(self) -> list[tuple[Mapping[str, Any], Path]]:
        """Return the alternatives at the top, each with its path and without references."""
        work = Work()
        try:
            top = flattened(self.root, self.root, (), work)
        except Unenforced:
            if self.strict:
                raise
            top = {key: one for key, one in self.root.items() if key not in ("$ref", "allOf")}
        top = top if isinstance(top, dict) else {}
        if self.strict:
            _check_written(top)
        keyword = next((one for one in _ALTERNATIVES if one in top), None)
        if keyword is None:
            return [(top, ())]
        rest = {key: value for key, value in top.items() if key != keyword}
        found: list[tuple[Mapping[str, Any], Path]] = []
        for index, option in enumerate(top[keyword][:_MOST_OPTIONS]):
            path = (keyword, index)
            try:
                flat = flattened(option, self.root, path, work)
                whole = merged([rest, flat], path)
            except Unenforced:
                continue
            if isinstance(whole, dict) and _is_object(whole):
                found.append((whole, path))
        return found or [(rest, ())]

    def _option(self, top: Mapping[str, Any], path: Path) -> Option:
        required = dict.fromkeys(top.get("required", ()))
        named = {
            name: Argument(schema, (*path, "properties", name), name in required)
            for name, schema in (top.get("properties") or {}).items()
        }
        other = top.get("additionalProperties", True)
        for name in required:
            if name not in named and other is not False:
                named[name] = Argument(other, (*path, "additionalProperties"), True)
            elif name not in named and self.strict:
                raise Unenforced(f"'{name}' is required but not allowed", (*path, "required"))
            elif name not in named and "patternProperties" in top:
                named[name] = Argument(True, (*path, "patternProperties"), True)
        is_open = not top.get("properties") and (
            "properties" not in top or "patternProperties" in top
        )
        return Option(named, other if is_open else False)


def _check_written(schema: Mapping[str, Any]) -> None:
    """Raise `Unenforced` for a keyword that cannot be followed by arguments in tags."""
    if not _is_object(schema):
        raise Unenforced("the arguments of a function are an object", ("type",))
    for key in schema:
        if key in CONSTRAINTS - _WRITTEN:
            raise Unenforced(f"'{key}' is not enforced in this model's tool-call format", (key,))


def _is_object(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "object")
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
