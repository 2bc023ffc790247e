"""Notations for the values of JSON: JSON itself, Python's literals, and Gemma's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from .ambiguity import LAST
from .gbnf import UnsupportedSchema
from .preamble import states, until
from .regex import (
    IN_JSON,
    IN_SINGLE,
    SPECIAL,
    Encoding,
    NotExpressible,
    Range,
    any_of,
    complement,
    containing,
    integers,
    literal,
    normal,
    numbers,
    one_of,
    only,
)

# A space, or a line break and spaces or tabs, as in llama.cpp's own rule.
WS = '(" " | "\\n" [ \\t]{0,20})?'


class Notation(NamedTuple):
    """A way to write values.

    Args:
        prefix: the prefix of the names of rules that all schemas share.
        quote: GBNF for the mark around a string.
        encoding: the way to write the characters of a string.
        string: GBNF for any string.
        words: the words for true, false and null.
        ws: GBNF for optional whitespace between values.
        mark: GBNF for the mark around the name of a property that no schema lists.
        outside: characters that do not appear in such names, except as an escape.
        named: writes the name of a property, with the marks around it.
        written: writes a value.
        brackets: GBNF around an object.
        colon: the mark between the name and the value of a property.
        values: the notation of the values inside; None for this one.
        other: another mark around strings, and the way to write their characters; None for none.
        is_sorted: True if the properties of an object are written in the order of `by_name`.
        can_write_name: returns True if a name can be written.
        can_write: returns True if a value can be written.
        end: the text that ends a string, if strings have no escapes; empty if they have.
    """

    prefix: str
    quote: str
    encoding: Encoding
    string: str
    words: tuple[str, str, str]
    ws: str
    mark: str
    outside: tuple[Range, ...]
    named: Callable[[str], str]
    written: Callable[[Any], str]
    brackets: tuple[str, str] = ('"{"', '"}"')
    colon: str = ":"
    values: Notation | None = None
    other: tuple[str, Encoding] | None = None
    is_sorted: bool = False
    can_write_name: Callable[[str], bool] = lambda name: True
    can_write: Callable[[Any], bool] = lambda value: True
    end: str = ""

    @property
    def states(self) -> Sequence[str]:
        """The names of the rules for the rest of a string without escapes (`states`)."""
        return states(self.end, f"{self.prefix}text") if self.end else ()

    def needs(self, kind: str) -> Sequence[str]:
        """Return the kinds whose rules the rule of a kind refers to."""
        if kind == "string":
            return [name.removeprefix(self.prefix) for name in self.states]
        if kind == "object":
            return ("ws", self._name, "value")
        return {"value": _VALUES, "array": ("ws", "value")}.get(kind, ())

    @property
    def _name(self) -> str:
        """The kind of the names of properties."""
        return "string" if self.mark == self.quote else "name"


_VALUES = ("object", "array", "string", "number", "boolean", "null")


@lru_cache(maxsize=8)
def primitives(notation: Notation) -> Mapping[str, str]:
    """Return a rule for each kind of value, by the kind; names of rules have the prefix."""
    true, false, null = map(literal, notation.words)
    mark, own = notation.mark, notation.prefix
    ws, value = f"{own}ws", f"{own}value"
    pair = f'{own}{notation._name} {ws} ":" {ws} {value}'
    text = until(notation.end, f"{own}text", "", never=UNUSUAL) if notation.end else {}
    return {
        **{name.removeprefix(own): rule for name, rule in text.items()},
        "ws": notation.ws,
        "string": notation.string,
        "name": f"{mark} {notation.encoding.one(complement(notation.outside))}+ {mark}",
        "number": numbers(None, None) or "",
        "integer": integers(None, None) or "",
        "boolean": f"({true} | {false})",
        "null": null,
        "value": f"({' | '.join(own + kind for kind in _VALUES)})",
        "object": f'"{{" {ws} ({pair} ({ws} "," {ws} {pair})* {ws})? "}}"',
        "array": f'"[" {ws} ({value} ({ws} "," {ws} {value})* {ws})? "]"',
    }


def by_name(names: Iterable[str]) -> list[str]:
    """Return names in the order of Jinja's `dictsort`."""
    return sorted(names, key=str.lower)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_IN_QUOTES = f'"\\"" {IN_JSON.one(normal([Range(0, LAST)]))}* "\\""'
JSON = Notation(
    "", '"\\""', IN_JSON, _IN_QUOTES, ("true", "false", "null"),
    WS, '"\\""', SPECIAL, lambda name: literal(_as_json(name)), _as_json,
)  # fmt: skip


def as_python(value: Any) -> str:
    """Return a value as a literal of Python."""
    if isinstance(value, bool) or value is None:
        return {True: "True", False: "False", None: "None"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(as_python, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_as_json(key)}: {as_python(one)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    return _as_json(value)


# Strings have the escapes of JSON, which Python has, too. Those with a pattern or a length, and
# those of a list of values, are in double quotes.
_SINGLE = complement([*SPECIAL[:1], Range(0x27, 0x27), *SPECIAL[2:]])
_IN_SINGLE = f'''"'" ({one_of(_SINGLE)} | "\\\\" ["'\\\\bfnrt])* "'"'''
PYTHON = JSON._replace(
    prefix="python-",
    string=f"({_IN_QUOTES} | {_IN_SINGLE})",
    words=("True", "False", "None"),
    ws='" "?',
    written=as_python,
)

_BARE = (Range(0x30, 0x39), Range(0x41, 0x5A), Range(0x5F, 0x5F), Range(0x61, 0x7A))


def _is_keyword_name(name: str) -> bool:
    """Return True if a name, which has no quotes, ends at the sign before its value."""
    return name == name.strip() and re.fullmatch(r"""[^"'=(),\[\]{}\n]+""", name) is not None


# The arguments of a call: `(name="value", other=5)`.
PYTHON_CALL = PYTHON._replace(
    mark='""', outside=tuple(complement(_BARE)), named=literal, brackets=('"("', '")"'), colon="=",
    values=PYTHON, other=('"\'"', IN_SINGLE), can_write_name=_is_keyword_name,
)  # fmt: skip

# The mark around Gemma's strings, which have no escapes.
MARK = '<|"|>'
# Control characters other than tabs and line breaks.
UNUSUAL = (Range(0, 8), Range(0x0B, 0x0C), Range(0x0E, 0x1F), Range(0x7F, 0x7F))


def _one_of_gemma(ranges: Sequence[Range]) -> str:
    """Return GBNF for a character that does not begin a mark, if the set has any other."""
    others = complement([*complement(ranges), Range(0x3C, 0x3C), *UNUSUAL])
    return one_of(others or ranges)


def _gemma_name(name: str) -> str:
    return name if re.fullmatch(r"""[^\s:,{}\[\]<"']+""", name) else f"{MARK}{name}{MARK}"


def as_gemma(value: Any) -> str:
    """Return a value as Gemma writes it, the properties of objects sorted."""
    if isinstance(value, str):
        return f"{MARK}{value}{MARK}"
    if isinstance(value, list):
        return f"[{','.join(map(as_gemma, value))}]"
    if isinstance(value, dict):
        pairs = (f"{_gemma_name(key)}:{as_gemma(value[key])}" for key in by_name(value))
        return f"{{{','.join(pairs)}}}"
    return _as_json(value)


def _gemma_can_write(value: Any) -> bool:
    """Return True if no string in a value contains the mark, which has no escape."""
    return MARK not in json.dumps(value, ensure_ascii=False).replace('\\"', '"')


GEMMA = Notation(
    "gemma-", literal(MARK), Encoding(_one_of_gemma, literal), f"{literal(MARK)} gemma-text",
    ("true", "false", "null"), '""', '""', tuple(complement(_BARE)),
    lambda name: literal(_gemma_name(name)), as_gemma,
    is_sorted=True, can_write_name=_gemma_can_write, can_write=_gemma_can_write, end=MARK,
)  # fmt: skip


_ANY = normal([Range(0, LAST)])


def matching(pattern: str, notation: Notation) -> str:
    """Return GBNF for strings that contain a match of a regular expression.

    Without escapes, a string lacks one of the characters of the mark that ends it, unless no match
    contains one of them.

    Raises:
        UnsupportedSchema: see `regex.containing`; or no match can be written.
    """
    quote = notation.quote
    if not notation.end:
        return f"{quote} {containing(pattern, notation.encoding)} {quote}"
    whole = containing(pattern, _without(""))
    options = []
    for character in dict.fromkeys(notation.end):
        try:
            found = containing(pattern, _without(character))
        except NotExpressible:
            continue
        if found == whole:
            options = [found]
            break
        options.append(found)
    if not options:
        raise UnsupportedSchema("this model's tool-call format cannot express its matches")
    return f"{quote} {any_of(options)} {quote}"


def counted(least: int, most: int | None, notation: Notation) -> str:
    """Return GBNF for strings with a number of characters; `most` is not 0.

    Without escapes, a string lacks one of the characters of the mark that ends it. Without `most`,
    it can have all of them after the first characters.
    """
    quote = notation.quote
    if not notation.end:
        one = notation.encoding.one(_ANY)
        return f"{quote} {one}{_times(least, most)} {quote}"
    ones = [_without(character).one(_ANY) for character in dict.fromkeys(notation.end)]
    options = [f"{one}{_times(least, most)} {quote}" for one in ones]
    if most is None:
        rest = f"({_begun(notation)} | {ones[0]} {notation.states[0]})"
        options = [f"{ones[0]}{{{least - 1}}} {rest}", *options] if least > 1 else [rest]
    return f"{quote} {any_of(options)}"


def _begun(notation: Notation) -> str:
    """Return GBNF for a string that begins with the first character of the mark at its end.

    No other character of the mark is the first one again.
    """
    mark, (anything, again, *_) = notation.end, notation.states
    first = literal(mark[0])
    found = ""
    for following in reversed(mark[1:]):
        others = complement([*map(only, {mark[0], following}), *UNUSUAL])
        more = f" | {literal(following)} {found}" if found else ""
        found = f"({first} {again} | {one_of(others)} {anything}{more})"
    return f"{first} {found}"


def _without(character: str) -> Encoding:
    """Return an encoding as plain text without a character, and without unusual ones."""

    def one(ranges: Sequence[Range]) -> str:
        outside = [*complement(ranges), *map(only, character)]
        wanted = complement(outside)
        if not wanted:
            raise NotExpressible
        return one_of(complement([*outside, *UNUSUAL]) or wanted)

    return Encoding(one, literal)


def _times(least: int, most: int | None) -> str:
    return f"{{{least},}}" if most is None else f"{{{least},{most}}}"
