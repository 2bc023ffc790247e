"""Regular expressions as GBNF."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from ...schemas import limits
from .ambiguity import LAST, joined, others
from .gbnf import UnsupportedSchema

# UTF-8 cannot encode them.
_SURROGATES = (0xD800, 0xDFFF)


class NotExpressible(Exception):
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
    return normal(Range(*one) for one in others(normal(ranges)))


def only(character: str) -> Range:
    """Return the range of one character."""
    return Range(ord(character), ord(character))


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
IN_JSON = Encoding(partial(_one_between, special=SPECIAL, escapes=_ESCAPES), _literal_in_json)
IN_SINGLE = Encoding(
    partial(_one_between, special=_SPECIAL_SINGLE, escapes=_ESCAPES_SINGLE), _literal_in_single
)


# The digits that a double keeps; a longer number could be parsed as another one.
MOST_DIGITS = 15
_DIGIT_COUNTS = "[0-9]"
_FRACTION = '("." [0-9]{1,16})?'
_WHOLE = f'"-"? ([0] | [1-9] [0-9]{{0,{MOST_DIGITS - 1}}})'


def integers(least: int | None, most: int | None) -> str | None:
    """Return GBNF for the integers of a range; None if there are none."""
    if least is None and most is None:
        return _WHOLE
    limit = 10**MOST_DIGITS - 1
    low = -limit if least is None else max(least, -limit)
    high = limit if most is None else min(most, limit)
    if low > high:
        return None
    options = []
    if low < 0:
        options.append(f'"-" {any_of(_magnitudes(max(1, -high), -low))}')
    if high >= 0:
        options.append(any_of(_magnitudes(max(0, low), high)))
    return any_of(options)


def numbers(least: int | None, most: int | None) -> str | None:
    """Return GBNF for the decimal numbers of a range with integer bounds; None if it is empty."""
    if least is None and most is None:
        return f"{_WHOLE} {_FRACTION} ([eE] [-+]? [0-9]{{1,2}})?"
    limit = 10**MOST_DIGITS - 1
    low = -limit if least is None else least
    high = limit if most is None else most
    if low > high:
        return None
    options = []
    if low < 0:
        options += [f'"-" ({part})' for part in _decimals(max(0, -high), -low)]
    if high >= 0:
        options += [f"({part})" for part in _decimals(max(0, low), high)]
    return any_of(options)


def _decimals(low: int, high: int) -> list[str]:
    """Return GBNF for decimal numbers: those from `low` to below `high`, and `high` itself."""
    parts = [any_of(_magnitudes(high, high)) + ' ("." [0]{1,16})?']
    if low < high:
        parts.append(f"{any_of(_magnitudes(low, high - 1))} {_FRACTION}")
    return parts


def any_of(options: Sequence[str]) -> str:
    """Return GBNF for any of some parts."""
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _magnitudes(low: int, high: int) -> list[str]:
    """Return GBNF for unsigned integers from `low` to `high`, by their number of digits."""
    options = []
    for size in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (size - 1) if size > 1 else 0)
        last = min(high, 10**size - 1)
        options += _same_size(str(first), str(last))
    return options


def _same_size(low: str, high: str) -> list[str]:
    """Return GBNF for unsigned integers between two with the same number of digits."""
    if not low:
        return [""]
    if low == "0" * len(low) and high == "9" * len(high):
        return [_run(len(low))]
    options = []
    first, last = int(low[0]), int(high[0])
    if first == last:
        return [_joined(_digit(first, last), rest) for rest in _same_size(low[1:], high[1:])]
    zeros, nines = "0" * (len(low) - 1), "9" * (len(low) - 1)
    if low[1:] != zeros:
        options += [_joined(_digit(first, first), r) for r in _same_size(low[1:], nines)]
        first += 1
    upper: list[str] = []
    if high[1:] != nines:
        upper = [_joined(_digit(last, last), r) for r in _same_size(zeros, high[1:])]
        last -= 1
    if first <= last:
        options.append(_joined(_digit(first, last), _run(len(low) - 1)))
    return options + upper


def _run(count: int) -> str:
    return "" if count == 0 else _DIGIT_COUNTS if count == 1 else f"{_DIGIT_COUNTS}{{{count}}}"


def _digit(first: int, last: int) -> str:
    return f"[{first}]" if first == last else f"[{first}-{last}]"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


# llama.cpp's limit for repetitions (src/llama-grammar.cpp).
MOST_TIMES = limits.REPETITIONS.maximum

_ANY = [Range(0, LAST)]
_DIGITS = [Range(0x30, 0x39)]
_WORD = [*_DIGITS, Range(0x41, 0x5A), Range(0x5F, 0x5F), Range(0x61, 0x7A)]
_SPACE = [Range(0x09, 0x0D), Range(0x20, 0x20)]
# The ends of lines that `.` does not match in some dialect, and the rare spaces of some dialect.
_LINE_ENDS = [Range(0x0A, 0x0A), Range(0x0D, 0x0D), Range(0x2028, 0x2029)]
_RARE_SPACE = [
    Range(0x1C, 0x1F), Range(0x85, 0x85), Range(0xA0, 0xA0), Range(0x1680, 0x1680),
    Range(0x2000, 0x200A), Range(0x2028, 0x2029), Range(0x202F, 0x202F), Range(0x205F, 0x205F),
    Range(0x3000, 0x3000), Range(0xFEFF, 0xFEFF),
]  # fmt: skip
# Words and digits are ASCII, as in ECMAScript. Rare spaces are neither spaces nor other characters,
# so a match is a match in every dialect.
_CATEGORIES = {
    codes.CATEGORY_DIGIT: normal(_DIGITS),
    codes.CATEGORY_NOT_DIGIT: complement(_DIGITS),
    codes.CATEGORY_WORD: normal(_WORD),
    codes.CATEGORY_NOT_WORD: complement(_WORD),
    codes.CATEGORY_SPACE: normal(_SPACE),
    codes.CATEGORY_NOT_SPACE: complement([*_SPACE, *_RARE_SPACE]),
}
_SPACES = {codes.CATEGORY_SPACE, codes.CATEGORY_NOT_SPACE}
_BEGINNING = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_END = (codes.AT_END, codes.AT_END_STRING)

_NOTHING = '""'

Node = tuple[Any, Any]


def to_gbnf(pattern: str) -> str:
    """Return a grammar of one rule for whole texts that match a pattern.

    Raises:
        UnsupportedSchema: the pattern is invalid, or GBNF lacks a feature of it: lookaround.
    """
    return f"root ::= {encoded(pattern, PLAIN)}"


def containing(pattern: str, encoding: Encoding) -> str:
    """Return GBNF for texts that contain a match, as in JSON Schema, in an encoding.

    Raises:
        NotExpressible: no match can be written.
    """
    return encoded(pattern, encoding, f"{encoding.one(_ANY)}*")


def encoded(pattern: str, encoding: Encoding, around: str = "") -> str:
    """Return GBNF for texts that match a pattern, in an encoding.

    Args:
        around: GBNF for the text where the pattern is not anchored.
    """
    try:
        with warnings.catch_warnings():
            # Warnings about syntax that other dialects may read differently.
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE:
            raise UnsupportedSchema("a regular expression with inline flags is not enforced")
        tree = list(parsed)
        return _Converter(encoding.one).found(tree, around, around) or _NOTHING
    except RecursionError:
        raise UnsupportedSchema(
            "a regular expression that is nested this deeply is not enforced; "
            f"use at most {limits.GROUPS.maximum} levels of groups"
        ) from None
    except (re.error, OverflowError, ValueError) as error:
        raise UnsupportedSchema(
            f"'{pattern:.100}' is not a valid regular expression: {error}"
        ) from None


class _Converter:
    """A converter of the syntax tree from Python's own parser."""

    def __init__(self, one: Callable[[Sequence[Range]], str]) -> None:
        self._one = one

    def found(self, nodes: Sequence[Node], before: str, after: str) -> str:
        """Return GBNF for a pattern, with `before` and `after` where it is not anchored."""
        nodes = list(nodes)
        if nodes and nodes[0][0] is codes.AT and nodes[0][1] in _BEGINNING:
            before = ""
            nodes = nodes[1:]
        if nodes and nodes[-1][0] is codes.AT and nodes[-1][1] in _END:
            after = ""
            nodes = nodes[:-1]
        if len(nodes) == 1 and nodes[0][0] is codes.BRANCH:
            return _branches(nodes[0][1][1], lambda branch: self.found(branch, before, after))
        if len(nodes) == 1 and nodes[0][0] is codes.SUBPATTERN and not any(nodes[0][1][1:3]):
            return self.found(nodes[0][1][3], before, after)
        return " ".join(part for part in (before, self._sequence(nodes), after) if part)

    def _sequence(self, nodes: Sequence[Node]) -> str:
        return " ".join(part for node in nodes if (part := self._node(*node)))

    def _node(self, code: Any, value: Any) -> str:
        if code is codes.LITERAL:
            return self._one(normal([Range(value, value)]))
        if code is codes.NOT_LITERAL:
            return self._one(complement([Range(value, value)]))
        if code is codes.ANY:
            return self._one(complement(_LINE_ENDS))
        if code is codes.IN:
            return self._one(_set_of(value))
        if code is codes.BRANCH:
            return _branches(value[1], lambda branch: self._sequence(list(branch)))
        if code is codes.SUBPATTERN:
            if value[1] or value[2]:
                raise UnsupportedSchema("a regular expression with inline flags is not enforced")
            inner = self._sequence(list(value[3]))
            return f"({inner})" if inner else ""
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeated(*value)
        raise UnsupportedSchema(
            "a regular expression with lookaround, a backreference, an inner anchor, an atomic "
            "group or a possessive quantifier is not enforced"
        )

    def _repeated(self, least: int, most: int, nodes: Any) -> str:
        try:
            inner = self._sequence(list(nodes))
        except NotExpressible:
            if least:
                raise
            return ""
        if not inner or most == 0:
            return ""
        endless = most is codes.MAXREPEAT
        if (least if endless else most) > MOST_TIMES:
            raise UnsupportedSchema(f"at most {MOST_TIMES} repetitions are enforced")
        times = {(0, True): "*", (1, True): "+"}.get((least, endless))
        if times is None:
            times = f"{{{least},}}" if endless else f"{{{least},{most}}}"
        return f"({inner}){times}"


def _branches(branches: Sequence[Any], convert: Callable[[Any], str]) -> str:
    """Return GBNF for any of the branches that can be written."""
    options = []
    for branch in branches:
        try:
            options.append(convert(branch) or _NOTHING)
        except NotExpressible:
            continue
    if not options:
        raise NotExpressible
    return f"({' | '.join(options)})"


def _set_of(items: Sequence[Node]) -> list[Range]:
    ranges: list[Range] = []
    negated = False
    for code, value in items:
        if code is codes.NEGATE:
            negated = True
        elif code is codes.LITERAL:
            ranges.append(Range(value, value))
        elif code is codes.RANGE:
            ranges.append(Range(*value))
        else:
            ranges += _CATEGORIES[value]
    named = {value for code, value in items if code is codes.CATEGORY}
    if named >= _SPACES or (negated and named & _SPACES):
        # Spaces and all others are everything, and a set that excludes one of both excludes these.
        ranges += _RARE_SPACE
    return complement(ranges) if negated else normal(ranges)


# An unclosed set extends to the end of the text, so that nothing in it is searched again. Spaces in
# repetitions are allowed, as in the verbose mode (`(?x)`).
_STEP = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+\]?|\{\s*+(\d++)\s*+(?:,\s*+(\d*+)\s*+)?\}|.", re.DOTALL
)


def repetitions(text: str) -> int:
    """Return the approximate number of parts of a regular expression, repetitions expanded.

    Time is linear in the text, and nesting uses a list instead of recursion.
    """
    sums, last = [0], 0
    for step in _STEP.finditer(text):
        part = step[0]
        if part == "(":
            sums[-1] += last
            sums.append(0)
            last = 0
        elif part == ")" and len(sums) > 1:
            last = sums.pop() + last
        elif step[1] is not None:
            times = int(step[2][:9]) if step[2] else int(step[1][:9])
            last *= max(times, int(step[1][:9]), 1)
        elif part not in "*+?|":
            sums[-1] += last
            last = 1
    return sum(sums) + last
