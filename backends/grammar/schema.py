"""JSON schemas as GBNF (https://json-schema.org/draft/2020-12).

Generated text always satisfies the schema, but not every valid text can be generated. Properties
are in the schema's order, and a schema with `properties` allows others only if it says so. A
keyword that cannot be enforced is an error; it is never ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...schemas import limits
from .dialects import (
    CONSTRAINTS,
    KEYWORDS,
    MOST_STEPS,
    NAMED,
    TYPES,
    Path,
    allowed,
    are_disjoint,
    at_pointer,
    check_schema,
    merged,
    modern,
    pointer,
)
from .gbnf import UnsupportedSchema
from .notation import JSON, Notation, by_name, counted, matching, primitives
from .regex import (
    MOST_DIGITS,
    MOST_TIMES,
    Range,
    any_of,
    complement,
    holds,
    integers,
    literal,
    numbers,
)

MOST_DEEP = limits.SCHEMA_DEPTH.maximum
MOST_VISITS = limits.SCHEMA_VISITS.maximum
MOST_SIZE = limits.SCHEMA.maximum
MOST_OPTIONS = limits.ONE_OF.maximum
MOST_KEY = limits.KEY.maximum

Schema = Mapping[str, Any]

_DAY = "([0-9]{4}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|" \
    "[0-9]{4}-(0[469]|11)-(0[1-9]|[12][0-9]|30)|[0-9]{4}-02-(0[1-9]|1[0-9]|2[0-8]))"  # fmt: skip
_HOUR = "([01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_HOUR}:[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
STRING_FORMATS = {
    "date": f"^{_DAY}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DAY}T{_TIME}$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
    "email": rf"^[a-z0-9]+([.+_-][a-z0-9]+){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}$",
    "uri": rf"^https?://{_LABEL}(\.{_LABEL}){{1,3}}(/[a-zA-Z0-9._~-]+){{0,8}}/?$",
}


def path_to(schema: Any, keyword: str, path: Path = ()) -> Path | None:
    """Return the path of a keyword in a schema, or None; property names are not keywords."""
    if isinstance(schema, list):
        parts: Any = enumerate(schema)
    elif isinstance(schema, dict):
        named = bool(path) and path[-1] in ("properties", "$defs", "definitions")
        if keyword in schema and not named:
            return (*path, keyword)
        parts = schema.items()
    else:
        return None
    found = (path_to(value, keyword, (*path, key)) for key, value in parts)
    return next((one for one in found if one is not None), None)


def to_gbnf(text: str) -> str:
    """Return a grammar for JSON that satisfies a schema, which is given as JSON.

    Raises:
        UnsupportedSchema: it is not a schema, or has a constraint that a grammar cannot enforce.
    """
    rules = rules_of(json.loads(text), "root")
    return "\n".join(f"{name} ::= {rule}" for name, rule in rules.items()) + "\n"


class Within(NamedTuple):
    """The place of a schema that is a part of another.

    Args:
        root: the whole schema, which is checked and modern; references begin there.
        path: the path of the part.
    """

    root: Any
    path: Path


def rules_of(
    schema: Any,
    name: str,
    prefix: str = "",
    notation: Notation = JSON,
    within: Within | None = None,
) -> dict[str, str]:
    """Return rules for values that satisfy a schema, by their names.

    Args:
        name: the name of the main rule.
        prefix: the prefix of rule names that would otherwise collide with those of other schemas.
        notation: the way to write the values.
        within: the place of the schema, if it is a part of another.

    Raises:
        UnsupportedSchema: see `to_gbnf`.
    """
    if within is None:
        check_schema(schema)
        schema = modern(schema)
        within = Within(schema, ())
    converter = _Converter(within.root, prefix, notation.values or notation)
    visited = (
        converter.visit(schema, within.path)
        if notation.values is None
        else (converter.arguments(schema, notation))
    )
    converter.rules[name] = visited
    return converter.rules


class _Converter:
    """A converter of one schema, which collects its rules in `rules`."""

    def __init__(self, root: Any, prefix: str, notation: Notation) -> None:
        self._root = root
        self._prefix = prefix
        self._notation = notation
        self.rules: dict[str, str] = {}
        # Names of rules by their bodies, so that equal rules are shared.
        self._names: dict[str, str] = {}
        self._references: dict[str, str] = {}
        self._depth = 0
        self._visits = 0
        self._size = 0

    def visit(self, schema: Any, path: Path) -> str:
        """Return GBNF for a schema."""
        # A reference with other keywords is expanded, so a reference to itself would never end.
        if self._depth == MOST_DEEP:
            reason = f"it is nested more than {MOST_DEEP} schemas deep, or is circular"
            raise UnsupportedSchema(f"{reason}; use fewer levels and references", path[:8])
        self._visits += 1
        self._depth += 1
        try:
            found = self._visited(schema, path)
        finally:
            self._depth -= 1
        # The text of each level is repeated in all levels above it.
        self._size += len(found)
        if self._visits > MOST_VISITS or self._size > MOST_DEEP * MOST_SIZE:
            reason = f"its grammar is longer than {MOST_SIZE} characters"
            raise UnsupportedSchema(f"{reason}; use fewer properties and values", path[:8])
        return found

    def arguments(self, schema: Any, notation: Notation) -> str:
        """Return GBNF for an object with a notation of its own."""
        schema = self._resolved(schema, ())
        if "allOf" in schema:
            schema = self._all(schema, ())
        for keyword in schema:
            if keyword in ("anyOf", "oneOf", "const", "enum") or (
                keyword in CONSTRAINTS - KEYWORDS and not _is_satisfied(keyword, schema[keyword])
            ):
                reason = f"'{keyword}' is not enforced in this model's tool-call format"
                raise UnsupportedSchema(reason, (keyword,))
        return self._object(schema, (), notation)

    def _visited(self, schema: Any, path: Path) -> str:
        if schema is True:
            return self._primitive("value")
        if schema is False:
            raise UnsupportedSchema(
                "no value satisfies 'false'; send a schema that allows a value", path
            )
        for keyword in schema:
            if keyword in CONSTRAINTS - KEYWORDS and not _is_satisfied(keyword, schema[keyword]):
                raise UnsupportedSchema(f"'{keyword}' cannot be enforced", (*path, keyword))
        if "$ref" in schema:
            return self._reference(schema, path)
        if "allOf" in schema:
            return self.visit(self._all(schema, path), path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self._alternatives(schema, keyword, path)
        if "const" in schema or "enum" in schema:
            return self._values(schema, path)
        return self._typed(schema, path)

    def _reference(self, schema: Schema, path: Path) -> str:
        target = schema["$ref"]
        if schema.keys() & CONSTRAINTS - {"$ref", "$defs", "definitions"}:
            at = self._resolved({"$ref": target}, path)
            rest = {key: value for key, value in schema.items() if key != "$ref"}
            return self.visit(merged([at, rest], path), path)
        name = self._references.get(target)
        if name is None:
            # References that only follow each other, in a circle, allow nothing.
            self._resolved({"$ref": target}, path)
            name = self._references[target] = f"{self._prefix}ref-{len(self._references)}"
            self.rules[name] = self.visit(target_of(self._root, target, path), pointer(target))
            self._names.setdefault(self.rules[name], name)
        return name

    def _resolved(self, schema: Any, path: Path) -> Any:
        return resolved(schema, self._root, path)

    def _all(self, schema: Schema, path: Path) -> Any:
        """Return a schema with its `allOf` merged into it."""
        parts = [self._resolved(part, path) for part in schema["allOf"]]
        rest = {key: value for key, value in schema.items() if key != "allOf"}
        return merged([rest, *parts], path)

    def _alternatives(self, schema: Schema, keyword: str, path: Path) -> str:
        rest = {key: value for key, value in schema.items() if key != keyword}
        options = [self._resolved(option, path) for option in schema[keyword]]
        if keyword == "oneOf":
            if len(options) > MOST_OPTIONS:
                reason = f"'oneOf' is enforced for up to {MOST_OPTIONS} schemas; use 'anyOf'"
                raise UnsupportedSchema(reason, (*path, keyword))
            for index, option in enumerate(options):
                for other in options[:index]:
                    if not are_disjoint(option, other, path):
                        reason = "'oneOf' is enforced only if its schemas exclude each other"
                        raise UnsupportedSchema(f"{reason}; use 'anyOf'", (*path, keyword))
        found = []
        for index, (option, given) in enumerate(zip(options, schema[keyword], strict=True)):
            here = (*path, keyword, index)
            if not rest.keys() & CONSTRAINTS - {"$defs", "definitions"}:
                # The unresolved option, whose reference becomes a rule, so that recursion ends.
                found.append(self.visit(given, here))
            else:
                found.append(self.visit(merged([rest, option], path), here))
        return any_of(found)

    def _values(self, schema: Schema, path: Path) -> str:
        """Return GBNF for the listed values that satisfy the rest of the schema."""
        keyword = "const" if "const" in schema else "enum"
        values = [schema["const"]] if "const" in schema else schema["enum"]
        rest = {key: value for key, value in schema.items() if key != keyword}
        if rest.keys() & CONSTRAINTS:
            values = allowed(rest, values, path)
        if not values:
            reason = "no value satisfies it and the other keywords; allow at least one value"
            raise UnsupportedSchema(reason, (*path, keyword))
        if not all(map(self._notation.can_write, values)):
            reason = "this model's tool-call format cannot express one of the values"
            raise UnsupportedSchema(reason, (*path, keyword))
        return any_of([literal(self._notation.written(value)) for value in values])

    def _typed(self, schema: Schema, path: Path) -> str:
        kinds = schema.get("type")
        if kinds is None:
            kinds = [kind for kind, keywords in TYPES.items() if schema.keys() & keywords]
            if not kinds:
                return self._primitive("value")
        visits: dict[str, Callable[[Schema, Path], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
        }
        found = []
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            one = {**schema, "type": kind}
            found.append(visits[kind](one, path) if kind in visits else self._primitive(kind))
        return any_of(found)

    def _object(self, schema: Schema, path: Path, own: Notation | None = None) -> str:
        notation = own or self._notation
        properties = dict(schema.get("properties", {}))
        required = dict.fromkeys(schema.get("required", ()))
        extra = schema.get("additionalProperties", not properties)
        for name in required:
            if name not in properties:
                properties[name] = schema.get("additionalProperties", True)
            if properties[name] is False:
                reason = f"'{name}' is required but not allowed"
                raise UnsupportedSchema(reason, (*path, "required"))
        _check_names(schema, properties, notation, path)
        if notation.is_sorted:
            properties = {name: properties[name] for name in by_name(properties)}
        most = len(properties) if extra is False else None
        _check_count(schema, len(required), most, path)
        if not properties and extra is True and own is None:
            return self._primitive("object")
        ws = self._primitive("ws")
        pairs = []
        for name, value in properties.items():
            inner = self.visit(value, (*path, "properties", name))
            key = notation.named(name)
            pairs.append((f'{key} {ws} "{notation.colon}" {ws} {inner}', name in required))
        more = ""
        if extra is not False:
            if any(len(name) > MOST_KEY for name in properties):
                reason = f"with other properties, names of up to {MOST_KEY} characters are enforced"
                raise UnsupportedSchema(reason, (*path, "additionalProperties"))
            inner = self.visit(extra, (*path, "additionalProperties"))
            # A name without marks around it is not empty.
            unwritable = [""] if notation.mark == '""' else []
            names = [*properties, *unwritable]
            key = f"{notation.mark} {_other_keys(names, notation)} {notation.mark}"
            more = self._rule(f'{key} {ws} "{notation.colon}" {ws} {inner}')
        body = self._pairs(pairs, more, ws)
        first, last = notation.brackets
        return f"{first} {ws} {body} {last}" if body else f"{first} {ws} {last}"

    def _pairs(self, pairs: Sequence[tuple[str, bool]], more: str, ws: str) -> str:
        """Return GBNF for comma-separated pairs in order; pairs that are not required are optional.

        Args:
            more: the rule for additional pairs, or empty.
        """
        comma = f'{ws} "," {ws}'
        # The text after each pair, from the last pair to the first.
        tails = [f"({comma} {more})*" if more else ""]
        for pair, required in reversed(pairs):
            part = f"{comma} {pair}" if required else f"({comma} {pair})?"
            tails.append(self._rule(f"{part} {tails[-1]}"))
        tails.reverse()
        options = []
        for index, (pair, required) in enumerate(pairs):
            options.append(f"{pair} {tails[index + 1]}")
            if required:
                return f"{any_of([option.strip() for option in options])} {ws}"
        if more:
            options.append(f"{more} ({comma} {more})*")
        return f"({any_of([option.strip() for option in options])} {ws})?" if options else ""

    def _array(self, schema: Schema, path: Path) -> str:
        items = schema.get("items", True)
        first = schema.get("prefixItems", [])
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if max(least, most or 0) > MOST_TIMES:
            raise UnsupportedSchema(f"at most {MOST_TIMES} items are enforced", path)
        if most is not None and least > most:
            raise UnsupportedSchema("no array has such a length", (*path, "minItems"))
        if not first and items is True and not least and most is None:
            return self._primitive("array")
        ws = self._primitive("ws")
        comma = f'{ws} "," {ws}'
        places = [
            self._rule(self.visit(item, (*path, "prefixItems", index)))
            for index, item in enumerate(first[:most])
        ]
        item = None
        if items is not False and (most is None or most > len(places)) and not (
            places and "items" not in schema and least <= len(places)
        ):  # fmt: skip
            item = self._rule(self.visit(items, (*path, "items")))
        elif least > len(places):
            raise UnsupportedSchema("no array has such a length", (*path, "minItems"))
        rest = None if most is None else most - len(places)
        body = _listed(places, item, least, rest, comma)
        return f'"[" {ws} {body} {ws} "]"' if body else f'"[" {ws} "]"'

    def _string(self, schema: Schema, path: Path) -> str:
        quote = self._notation.quote
        named = [key for key in ("pattern", "format") if key in schema]
        if not named and not schema.keys() & {"minLength", "maxLength"}:
            return self._primitive("string")
        if named and (len(named) > 1 or schema.keys() & {"minLength", "maxLength"}):
            reason = f"'{named[0]}' is enforced alone, not with 'format' or a length"
            raise UnsupportedSchema(reason, (*path, named[0]))
        if named:
            pattern = schema[named[0]]
            if named[0] == "format":
                if pattern not in STRING_FORMATS:
                    listed = ", ".join(sorted(STRING_FORMATS))
                    raise UnsupportedSchema(
                        f"the format '{pattern}' is not enforced; supported formats are: {listed}",
                        (*path, "format"),
                    )
                pattern = STRING_FORMATS[pattern]
            try:
                return self._rule(matching(pattern, self._notation))
            except UnsupportedSchema as error:
                raise UnsupportedSchema(error.reason, (*path, named[0])) from None
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if max(least, most or 0) > MOST_TIMES:
            raise UnsupportedSchema(f"lengths up to {MOST_TIMES} are enforced", path)
        if most is not None and least > most:
            raise UnsupportedSchema("no string has such a length", (*path, "minLength"))
        if most == 0:
            return f"{quote} {quote}"
        if not least and most is None:
            return self._primitive("string")
        found = counted(least, most, self._notation)
        if not self._notation.end:
            return found
        # Its rules can be a part of the limited strings.
        self._primitive("string")
        return self._rule(found)

    def _number(self, schema: Schema, path: Path) -> str:
        kind = "integer" if "multipleOf" in schema else schema["type"]
        if not schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}:
            return self._primitive(kind)
        lows = [math.ceil(schema[key]) for key in ("minimum",) if key in schema]
        lows += [math.floor(schema[key]) + 1 for key in ("exclusiveMinimum",) if key in schema]
        highs = [math.floor(schema[key]) for key in ("maximum",) if key in schema]
        highs += [math.ceil(schema[key]) - 1 for key in ("exclusiveMaximum",) if key in schema]
        low, high = max(lows, default=None), min(highs, default=None)
        found = (integers if kind == "integer" else numbers)(low, high)
        if found is None:
            raise UnsupportedSchema(_without_value(kind, low, high), path)
        return self._rule(found)

    def _rule(self, body: str) -> str:
        """Return the name of a rule with this body."""
        body = body.strip()
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = f"{self._prefix}r{len(self.rules)}"
            self.rules[name] = body
        return name

    def _primitive(self, kind: str) -> str:
        """Return the name of the rule for a kind of value."""
        notation = self._notation
        name = notation.prefix + kind
        if name not in self.rules:
            self.rules[name] = primitives(notation)[kind]
            self._names.setdefault(self.rules[name], name)
            for needed in notation.needs(kind):
                self._primitive(needed)
        return name


def _without_value(kind: str, low: int | None, high: int | None) -> str:
    """Return the reason for which a range is rejected, and what to send.

    Args:
        low: the first integer that its lower bound allows; `high` is the last of the upper one.
    """
    if low is None or high is None or low <= high:
        return f"a range is enforced up to {MOST_DIGITS} digits"
    if kind == "integer" or low - high > 1:
        return f"no {kind} is in its range"
    return (
        "decimals are enforced only between integers, and its range contains none. Send "
        f"'minimum': {high} and 'maximum': {low} ('ge' and 'le' in pydantic) instead"
    )


def _is_satisfied(keyword: str, value: Any) -> bool:
    """Return True if all text satisfies a keyword; of 1, integers are the multiples (`_number`)."""
    return (keyword == "uniqueItems" and value is False) or (keyword == "multipleOf" and value == 1)


def _check_names(schema: Schema, names: Iterable[str], notation: Notation, path: Path) -> None:
    """Reject a name that the notation cannot express."""
    unwritable = next((name for name in names if not notation.can_write_name(name)), None)
    if unwritable is None:
        return
    listed = "properties" in schema and unwritable in schema["properties"]
    key = (
        ("properties", unwritable) if listed else ("required", schema["required"].index(unwritable))
    )
    reason = f"this model's tool-call format cannot express the name '{unwritable:.100}'"
    raise UnsupportedSchema(reason, (*path, *key))


def _check_count(schema: Schema, least: int, most: int | None, path: Path) -> None:
    """Reject limits of the number of properties that the properties do not already satisfy."""
    if schema.get("minProperties", 0) > least:
        reason = "'minProperties' is enforced only up to the number of required properties"
        raise UnsupportedSchema(reason, (*path, "minProperties"))
    if "maxProperties" in schema and (most is None or most > schema["maxProperties"]):
        reason = "'maxProperties' is enforced only if no more properties are allowed"
        raise UnsupportedSchema(reason, (*path, "maxProperties"))


def _listed(places: list[str], item: str | None, least: int, rest: int | None, comma: str) -> str:
    """Return GBNF for comma-separated items: `places` in order, then repetitions of `item`."""
    tail = ""
    needed = max(least - len(places), 0)
    if item is not None:
        if not places:
            upper = "" if rest is None else str(rest - 1)
            times = f"{{{max(needed - 1, 0)},{upper}}}"
            body = f"{item} ({comma} {item}){times}" if rest != 1 else item
            return body if needed else f"({body})?"
        times = f"{{{needed},{'' if rest is None else rest}}}"
        tail = f"({comma} {item}){times}"
    for index in range(len(places) - 1, -1, -1):
        before = f"{comma} " if index else ""
        tail = f"{before}{places[index]} {tail}".strip()
        if index >= least:
            tail = f"({tail})?"
    return tail


def _other_keys(names: Sequence[str], notation: Notation) -> str:
    """Return GBNF for the inside of a key that is not in `names` and has no escapes."""
    outside, one_of = notation.outside, notation.encoding.one
    used = {ord(name[0]) for name in names if name}
    free = complement([*outside, *(Range(code, code) for code in used)])
    options = [f"{one_of(free)} {one_of(complement(outside))}*"]
    for code in sorted(used):
        rests = [name[1:] for name in names if name and ord(name[0]) == code]
        if holds(outside, code):
            continue
        options.append(f"{literal(chr(code))} {_other_keys(rests, notation)}")
    if "" not in names:
        options.append('""')
    return any_of(options)


# Keywords whose values are lists of schemas, and schemas.
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems", "not", "contains"})
# Levels of `allOf` in each other.
_MOST_LEVELS = 16


class Work:
    """A limit of the references, unions and merged keywords that are read for one value.

    Circular and branching schemas would otherwise take forever.
    """

    def __init__(self, most: int = 10_000) -> None:
        self._left = most

    def take(self, schema: Any, path: Path) -> None:
        """Account for a schema; raise `UnsupportedSchema` beyond the limit."""
        size = 1
        if isinstance(schema, Mapping):
            size += len(schema) + sum(
                len(one) for one in schema.values() if isinstance(one, dict | list)
            )
        self._left -= size
        if self._left < 0:
            raise UnsupportedSchema("it has too many alternatives, or is circular", path)


def target_of(root: Any, target: str, path: Path) -> Any:
    """Return the schema that a reference points to; `path` is the place of the reference."""
    if target != "#" and not target.startswith("#/"):
        raise UnsupportedSchema(
            f"'$ref' points outside the schema: '{target:.100}'", (*path, "$ref")
        )
    at = at_pointer(root, target)
    if at is None:
        raise UnsupportedSchema(f"'$ref' cannot be resolved: '{target:.100}'", (*path, "$ref"))
    if not _is_place_of_schema(pointer(target)):
        check_schema(at)
    return at


def _is_place_of_schema(keys: Path) -> bool:
    """Return True if the value at a path in a schema is certainly a schema, too."""
    while keys:
        is_last = len(keys) == 1
        in_list = not is_last and isinstance(keys[1], int)
        if (keys[0] in NAMED and not is_last) or (keys[0] in _LISTS and in_list):
            keys = keys[2:]
        elif keys[0] in _SCHEMAS and not in_list:
            keys = keys[1:]
        else:
            return False
    return True


def resolved(schema: Any, root: Any, path: Path, work: Work | None = None) -> Any:
    """Return a schema with the references at its top resolved."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        if work is not None:
            work.take(schema, path)
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        at = target_of(root, schema["$ref"], path)
        schema = merged([at, rest], path) if rest.keys() & CONSTRAINTS else at
    raise UnsupportedSchema("'$ref' is circular", (*path, "$ref"))


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
    raise UnsupportedSchema("'allOf' is circular", (*path, "allOf"))
