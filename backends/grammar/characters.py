"""Sets of characters as GBNF, in plain text and inside a JSON string."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .ambiguity import joined

LAST = 0x10FFFF
# UTF-8 cannot encode them.
_SURROGATES = (0xD800, 0xDFFF)


class Unsaid(Exception):
    """An error for a set of characters, none of which can be written at its place."""


class Range(NamedTuple):
    """Code points from the first to the last, both included."""

    first: int
    last: int


def normal(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order, without overlaps and surrogates."""
    found = [Range(*one) for one in joined(ranges)]
    return _minus(found, Range(*_SURROGATES))


def complement(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges of all other characters."""
    found, start = [], 0
    for first, last in normal(ranges):
        if start < first:
            found.append(Range(start, first - 1))
        start = last + 1
    if start <= LAST:
        found.append(Range(start, LAST))
    return normal(found)


def _minus(ranges: Sequence[Range], other: Range) -> list[Range]:
    found = []
    for first, last in ranges:
        if first < other.first:
            found.append(Range(first, min(last, other.first - 1)))
        if last > other.last:
            found.append(Range(max(first, other.last + 1), last))
    return [one for one in found if one.first <= one.last]


def holds(ranges: Iterable[Range], character: int) -> bool:
    """Return True if a character is in a set."""
    return any(first <= character <= last for first, last in ranges)


def one_of(ranges: Sequence[Range]) -> str:
    """Return GBNF for one character of a set; an empty set matches nothing."""
    return "[" + "".join(map(in_set, ranges)) + "]" if ranges else _NEVER


def one_in_json(ranges: Sequence[Range]) -> str:
    """Return GBNF for one character of a set inside a JSON string, escaped if necessary."""
    return _one_between(ranges, SPECIAL, _ESCAPES)


def _one_between(
    ranges: Sequence[Range], special: Sequence[Range], escapes: Mapping[int, str]
) -> str:
    """Return GBNF for one character of a set inside a string with its own escapes."""
    plain = ranges
    for one in special:
        plain = _minus(plain, one)
    options = [one_of(plain)] if plain else []
    options += [literal(spelled) for code, spelled in escapes.items() if holds(ranges, code)]
    if not options:
        return _NEVER
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def literal(text: str) -> str:
    """Return GBNF for a literal text."""
    return '"' + "".join(_escaped(ord(character)) for character in text) + '"'


# Characters that JSON strings contain only as a short escape, or not at all if they have none.
SPECIAL = (Range(0, 0x1F), Range(0x22, 0x22), Range(0x5C, 0x5C), Range(0x7F, 0x7F))
_ESCAPES = {
    0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t",
}  # fmt: skip
# The same for Python's strings in single quotes.
_SPECIAL_SINGLE = (SPECIAL[0], Range(0x27, 0x27), *SPECIAL[2:])
_ESCAPES_SINGLE = {**{code: one for code, one in _ESCAPES.items() if code != 0x22}, 0x27: "\\'"}
# A character that does not appear in text.
_NEVER = "[\\x00]"


def in_set(one: Range) -> str:
    """Return GBNF for a range inside a set."""
    if one.first == one.last:
        return _escaped(one.first)
    return f"{_escaped(one.first)}-{_escaped(one.last)}"


def _escaped(code: int) -> str:
    character = chr(code)
    if character.isascii() and (character.isalnum() or character in " _.,:;/+=<>@#$%&{}()"):
        return character
    if code < 0x80:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _literal_in_json(text: str) -> str:
    return literal(json.dumps(text, ensure_ascii=False)[1:-1])


def _one_in_single(ranges: Sequence[Range]) -> str:
    return _one_between(ranges, _SPECIAL_SINGLE, _ESCAPES_SINGLE)


def _literal_in_single(text: str) -> str:
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    return literal(inside.replace('\\"', '"').replace("'", "\\'"))


class Encoding(NamedTuple):
    """A way to write text.

    Args:
        one: returns GBNF for one character of a set.
        text: returns GBNF for a literal text.
    """

    one: Callable[[Sequence[Range]], str]
    text: Callable[[str], str]


PLAIN = Encoding(one_of, literal)
IN_JSON = Encoding(one_in_json, _literal_in_json)
IN_SINGLE = Encoding(_one_in_single, _literal_in_single)
