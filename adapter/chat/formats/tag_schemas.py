"""The arguments of a function in tags: how a schema's values are written, and their GBNF."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import orjson

from ....backends.grammar.dialects import CONSTRAINTS, TYPES, allowed, are_disjoint, merged, modern
from ....backends.grammar.gbnf import UnsupportedSchema
from ....backends.grammar.lark import embedded
from ....backends.grammar.notation import JSON
from ....backends.grammar.preamble import until
from ....backends.grammar.regex import PLAIN, literal
from ....backends.grammar.schema import Within, Work, flattened
from ....backends.grammar.schema import rules_of as rules_of_schema
from ....backends.grammar.unmarked import unmarked
from ..parsers import INPUT
from .base import MOST_TAKEN_AWAY, FunctionSchema, Path, without

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
    def ruled_types(self) -> frozenset[str]:
        """The types of the values that schemas restrict."""
        return frozenset().union(*(one.types for one in self.ruled))

    @property
    def opens(self) -> tuple[str, ...]:
        """The first characters of JSON that can contain the tag after it."""
        types = self.ruled_types
        if self.texts is not None:
            types |= self.plain.union(*(types_of_value(one) for one in self.listed))
        return tuple(_FIRST[kind] for kind in sorted(types & {"array", "object"}))

    @property
    def openers(self) -> str:
        """The first characters that any text cannot have, because JSON with limits has them."""
        first = "".join(_FIRST.get(one, "") for one in sorted(self.ruled_types))
        return "".join(dict.fromkeys(first))

    def has(self, text: str) -> bool:
        """Return True if a text is one of the values that are not text."""
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            return False
        if types_of_value(value) & (self.plain | self.ruled_types):
            return True
        return _identity(value) in map(_identity, self.listed)

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


_TYPES = {
    type(None): frozenset({"null"}),
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: frozenset({"string"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def types_of_value(value: object) -> frozenset[str]:
    """Return the JSON types of a value."""
    return _TYPES[type(value)]


def values_of(schema: Any, root: Any, path: Path, strict: bool = False) -> Values:
    """Return the values that a schema allows.

    Args:
        root: the whole schema, which is checked.
        path: the path of the schema in it.
        strict: True if what cannot be decided is an error; otherwise any value is allowed.

    Raises:
        UnsupportedSchema: see `strict`.
    """
    try:
        return _Reading(root, strict).values(schema, path)
    except UnsupportedSchema:
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
            raise UnsupportedSchema("it has too many unions inside unions, or is circular", path)
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
                    raise UnsupportedSchema(f"{reason}; use 'anyOf'", path)

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
    return bool(_of(schema, kind).keys() & CONSTRAINTS - {"type"})


def _identity(value: object) -> bytes:
    """Return a key that is the same for equal values of the same type."""
    return json.dumps(value, sort_keys=True).encode()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
        UnsupportedSchema: a strict schema has a keyword that calls in tags cannot follow.
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
        except UnsupportedSchema:
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
            except UnsupportedSchema:
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
                raise UnsupportedSchema(
                    f"'{name}' is required but not allowed", (*path, "required")
                )
            elif name not in named and "patternProperties" in top:
                named[name] = Argument(True, (*path, "patternProperties"), True)
        is_open = not top.get("properties") and (
            "properties" not in top or "patternProperties" in top
        )
        return Option(named, other if is_open else False)


def _check_written(schema: Mapping[str, Any]) -> None:
    """Raise `UnsupportedSchema` for a keyword that cannot be followed by arguments in tags."""
    if not _is_object(schema):
        raise UnsupportedSchema("the arguments of a function are an object", ("type",))
    for key in schema:
        if key in CONSTRAINTS - _WRITTEN:
            raise UnsupportedSchema(
                f"'{key}' is not enforced in this model's tool-call format", (key,)
            )


def _is_object(schema: Mapping[str, Any]) -> bool:
    kinds = schema.get("type", "object")
    return kinds == "object" or (isinstance(kinds, list) and "object" in kinds)


def end_of(text: bytes, ends: Sequence[bytes], known: Sequence[bytes]) -> bytes | None:
    """Return the mark that ends a text here, or None if the text continues.

    Args:
        known: texts that are expected; a mark may be a part of one.
    """
    end = next((one for one in ends if text.endswith(one)), None)
    if end is None or text[: -len(end)] in known:
        return end
    return None if any(one.startswith(text) for one in known) else end


def is_readable(text: str, ends: Sequence[str], known: Sequence[str]) -> bool:
    """Return True if a known text is found again, with each of the marks after it."""
    if not any(end in text for end in ends):
        # No mark begins with the end of another.
        return True
    data, marks = text.encode(), [one.encode() for one in ends]
    others = [one.encode() for one in known]
    return all(
        end_of(whole[:size], marks, others) is None
        for whole in (data + end for end in marks)
        for size in range(1, len(whole))
    )


def _json_rules(part: Json, name: str, prefix: str, root: Any, strict: bool) -> Mapping[str, str]:
    """Return the rules for the values of a part of a schema.

    Args:
        name: the name of the main rule; names of the others begin with the prefix.
        root: the whole schema, where references begin.
        strict: True if everything must be enforced; otherwise, what cannot be is dropped.
    """
    schema, path = part.schema, part.path
    try:
        return rules_of_schema(schema, name, prefix, JSON, Within(root, path))
    except UnsupportedSchema:
        if strict:
            raise
    # Removing keywords changes the schemas.
    schema, root = deepcopy(schema), deepcopy(root)
    for _ in range(MOST_TAKEN_AWAY):
        try:
            return rules_of_schema(schema, name, prefix, JSON, Within(root, path))
        except UnsupportedSchema as error:
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


# The whitespace that a model may write between two tags.
LINES = "[\\n]{0,2}"
# The rule for a text and the tag after it.
_TEXT = "tag-text"
_NAME = "[a-zA-Z0-9_-]{1,64}"


class Tags(NamedTuple):
    """The texts of a format.

    Args:
        function, named: before and after the name of a function.
        key: before the name of an argument.
        text, json: after the name, for a value that is text and for JSON. They are equal if only
            the schema says how a value is written.
        value: a further tag before the value, or empty.
        value_end: after a value.
        end: after the last argument.
        lines: True if a value has lines of its own, and every tag ends its line.
    """

    function: str
    named: str
    key: str
    text: str
    json: str
    value: str
    value_end: str
    end: str
    lines: bool = False

    @classmethod
    def of(
        cls,
        call: str,
        key: str,
        value: str,
        end: str,
        *,
        key_of_json: str = "",
        lines: bool = False,
    ) -> Tags:
        """Make the texts from tags with `{}` for what is inside.

        Args:
            key_of_json: the tag before a value that is JSON, if it is another one.
        """
        function, _, named = call.partition("{}")
        before, _, text = key.partition("{}")
        json = (key_of_json or key).partition("{}")[2]
        first, _, value_end = value.partition("{}")
        return cls(function, named, before, text, json, first, value_end, end, lines)

    @property
    def gap(self) -> str:
        """The GBNF of the whitespace between tags."""
        return '"\\n"' if self.lines else LINES

    def opening(self, key: str, is_text: bool) -> str:
        """Return the GBNF of everything before a value; the key is GBNF, too."""
        value = f" {self.gap} {literal(self.value)}" if self.value else ""
        line = ' "\\n"' if self.lines else ""
        after = literal(self.text if is_text else self.json)
        return f"{literal(self.key)} {key} {after}{value}{line}"

    @property
    def after_key(self) -> tuple[str, ...]:
        """The texts that can follow a name in a call that a grammar guarantees."""
        line = "\n" if self.lines else ""
        return tuple(dict.fromkeys((self.text + line, self.json + line)))

    @property
    def is_marked(self) -> bool:
        """True if a tag says whether a value is text."""
        return self.text != self.json

    @property
    def closing(self) -> str:
        """The text after a value."""
        return f"\n{self.value_end}" if self.lines else self.value_end


def rules_of(
    tags: Tags, function: FunctionSchema, name: str, prefix: str, index: int
) -> Mapping[str, str]:
    """Return the rules for arguments in tags (`base.argument_rules`)."""
    if function.input is not None:
        text = f"{prefix}text"
        opening = tags.opening(literal(INPUT), True)
        rule = f"{opening} {text} {literal(tags.closing)} {tags.gap}"
        rules = embedded(function.input, text, f"{prefix}i", PLAIN)
        return {**unmarked(rules, text, tags.closing), name: rule}
    if function.schema is None:
        return {name: '""'}
    schema = orjson.loads(function.schema)
    try:
        arguments = Arguments(modern(schema), function.strict)
        values = _Values(tags, arguments, prefix)
        options = [values.option(one) for one in arguments.options]
    except UnsupportedSchema as error:
        raise UnsupportedSchema(error.reason, (index, *error.path)) from None
    return {**values.rules, name: " | ".join(dict.fromkeys(options))}


class _Values:
    """The rules for the values of one function."""

    def __init__(self, tags: Tags, arguments: Arguments, prefix: str) -> None:
        self._tags = tags
        self._arguments = arguments
        self._prefix = prefix
        self._strict = arguments.strict
        # The names of rules for JSON: the same schema needs one rule.
        self._shared: dict[bytes, str] = {}
        self.rules: dict[str, str] = {}

    def option(self, option: Option) -> str:
        """Return GBNF for a list of arguments."""
        gap = self._tags.gap
        parts = []
        for name, argument in option.named.items():
            found = self._argument(name, argument)
            if found:
                parts.append(f"({found} {gap})" if argument.is_required else f"({found} {gap})?")
        if option.other is not False:
            other = Argument(option.other, ("additionalProperties",), False)
            values = self._arguments.values(None)
            found = self._tagged(_NAME, values, values, other)
            parts += [f"({found} {gap})*"] if found else []
        return " ".join(parts) or '""'

    def _argument(self, name: str, argument: Argument) -> str:
        """Return GBNF for an argument; empty if it cannot be written."""
        if not is_readable(name, self._tags.after_key, self._arguments.names):
            if self._strict:
                raise self._unwritable("name", name, argument.path)
            return ""
        values, argument = self._arguments.own(name, argument)
        return self._tagged(literal(name), values, self._arguments.values(name), argument)

    def _tagged(self, key: str, values: Values, read: Values, argument: Argument) -> str:
        """Return GBNF for an argument, or nothing if no value can be written.

        Args:
            key: GBNF for its name.
            values: its values.
            read: the values as which a parser reads them.
        """
        tags = self._tags
        texts = self._text(values, read)
        parts = self._json(values, argument)
        if not texts and not parts:
            if self._strict and argument.is_required:
                raise UnsupportedSchema("no value satisfies it", argument.path)
            return ""
        if tags.is_marked and texts and parts:
            return f"({tags.opening(key, True)} {texts} | {tags.opening(key, False)} {parts})"
        found = f"({texts} | {parts})" if texts and parts else texts or parts
        return f"{tags.opening(key, bool(texts))} {found}"

    def _text(self, values: Values, read: Values) -> str:
        """Return GBNF for the texts and the tag after them, or nothing."""
        closing = self._tags.closing
        if not values.may_be_text:
            return ""
        if values.texts is None:
            if values.limits and self._strict:
                path = values.limits[0]
                reason = f"'{path[-1]}' is not enforced in this model's tool-call format"
                raise UnsupportedSchema(reason, path)
            begins = "" if self._tags.is_marked else values.openers
            self.rules |= until(closing, _TEXT, "")
            return self._not_begun(begins) if begins else _TEXT
        known = list(read.texts or ()) if self._tags.is_marked else read.apart(closing)
        found = []
        for text, path in values.texts.items():
            if text in known and is_readable(text, (closing,), known):
                found.append(literal(text))
            elif self._strict:
                raise self._unwritable("value", text, path)
        return f"({' | '.join(found)}) {literal(closing)}" if found else ""

    def _not_begun(self, begins: str) -> str:
        """Return the name of a rule for text that does not begin with one of some characters.

        It does not begin with a blank either.
        """
        closing = self._tags.closing
        first = closing[0]
        name = f"{_TEXT}-no-{begins.encode().hex()}"
        outside = "".join(f"\\x{ord(one):02x}" for one in dict.fromkeys(f" \t\r\n{begins}{first}"))
        options = [f"[^{outside}] {_TEXT}"]
        options.append(literal(closing) if first.isspace() else f"{literal(first)} {_TEXT}-1")
        self.rules[name] = " | ".join(options)
        return name

    def _json(self, values: Values, argument: Argument) -> str:
        """Return GBNF for the values that are JSON and the tag after them, or nothing."""
        parts = []
        if not values.may_be_text:
            if not (values.plain or values.ruled or values.listed):
                return ""
            parts.append(self._rule(Json(argument.schema, argument.path, OTHERS)))
        else:
            # Any text is also all JSON without limits, where no tag says what is text.
            is_apart = self._tags.is_marked or values.texts is not None
            if is_apart and values.plain:
                plain = {"type": sorted(values.plain)}
                parts.append(self._rule(Json(plain, argument.path, values.plain)))
            parts += [self._rule(one) for one in values.ruled]
            if is_apart:
                parts += [literal(JSON.written(one)) for one in values.listed]
        closing = literal(self._tags.closing)
        return f"({' | '.join(dict.fromkeys(parts))}) {closing}" if parts else ""

    def _rule(self, part: Json) -> str:
        key = orjson.dumps(part.schema, option=orjson.OPT_SORT_KEYS)
        if key not in self._shared:
            own = self._shared[key] = f"{self._prefix}value-{len(self._shared)}"
            self.rules |= _json_rules(part, own, f"{own}-", self._arguments.root, self._strict)
        return self._shared[key]

    def _unwritable(self, what: str, text: str, path: Path) -> UnsupportedSchema:
        reason = f"this model's tool-call format cannot express the {what} '{text:.100}'"
        return UnsupportedSchema(reason, path)
