"""Regular expressions as GBNF."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from ...schemas import limits
from .characters import LAST, Encoding, Range, Unsaid, complement, normal, one_of
from .unenforced import Unenforced

# llama.cpp's limit for repetitions (src/llama-grammar.cpp).
MOST_TIMES = limits.REPETITIONS.most

_ANY = [Range(0, LAST)]
_DIGITS = [Range(0x30, 0x39)]
_WORD = [*_DIGITS, Range(0x41, 0x5A), Range(0x5F, 0x5F), Range(0x61, 0x7A)]
_SPACE = [Range(0x09, 0x0D), Range(0x20, 0x20)]
# ASCII only, as in ECMAScript except for rare spaces, so a match is a match in every dialect.
_CATEGORIES = {
    codes.CATEGORY_DIGIT: normal(_DIGITS),
    codes.CATEGORY_NOT_DIGIT: complement(_DIGITS),
    codes.CATEGORY_WORD: normal(_WORD),
    codes.CATEGORY_NOT_WORD: complement(_WORD),
    codes.CATEGORY_SPACE: normal(_SPACE),
    codes.CATEGORY_NOT_SPACE: complement(_SPACE),
}
_BEGINNING = (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING)
_END = (codes.AT_END, codes.AT_END_STRING)

_NOTHING = '""'

Node = tuple[Any, Any]


def to_gbnf(pattern: str) -> str:
    """Return a grammar of one rule for whole texts that match a pattern.

    Raises:
        Unenforced: the pattern is invalid, or has a feature that GBNF lacks, such as lookaround.
    """
    return f"root ::= {_converted(pattern, one_of, '')}"


def encoded(pattern: str, encoding: Encoding) -> str:
    """Return GBNF for whole texts that match a pattern, in an encoding."""
    return _converted(pattern, encoding.one, "")


def containing(pattern: str, encoding: Encoding) -> str:
    """Return GBNF for texts that contain a match, as in JSON Schema, in an encoding.

    Raises:
        Unsaid: no match can be written.
    """
    return _converted(pattern, encoding.one, f"{encoding.one(_ANY)}*")


def _converted(pattern: str, one: Callable[[Sequence[Range]], str], around: str) -> str:
    try:
        with warnings.catch_warnings():
            # Warnings about syntax that other dialects may read differently.
            warnings.simplefilter("ignore")
            parsed = parser.parse(pattern)
        if parsed.state.flags & ~re.UNICODE:
            raise Unenforced("a regular expression with inline flags is not enforced")
        tree = list(parsed)
        return _Converter(one).found(tree, around, around) or _NOTHING
    except RecursionError:
        raise Unenforced(
            "a regular expression that is nested this deeply is not enforced; "
            f"use at most {limits.GROUPS.most} levels of groups"
        ) from None
    except (re.error, OverflowError, ValueError) as error:
        raise Unenforced(f"'{pattern:.100}' is not a valid regular expression: {error}") from None


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
            return _any_of(nodes[0][1][1], lambda branch: self.found(branch, before, after))
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
            return self._one(complement([Range(0x0A, 0x0A), Range(0x0D, 0x0D)]))
        if code is codes.IN:
            return self._one(_set_of(value))
        if code is codes.BRANCH:
            return _any_of(value[1], lambda branch: self._sequence(list(branch)))
        if code is codes.SUBPATTERN:
            if value[1] or value[2]:
                raise Unenforced("a regular expression with inline flags is not enforced")
            inner = self._sequence(list(value[3]))
            return f"({inner})" if inner else ""
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeated(*value)
        raise Unenforced(
            "a regular expression with lookaround, a backreference or an inner anchor is not "
            "enforced"
        )

    def _repeated(self, least: int, most: int, nodes: Any) -> str:
        try:
            inner = self._sequence(list(nodes))
        except Unsaid:
            if least:
                raise
            return ""
        if not inner or most == 0:
            return ""
        endless = most is codes.MAXREPEAT
        if (least if endless else most) > MOST_TIMES:
            raise Unenforced(f"at most {MOST_TIMES} repetitions are enforced")
        times = {(0, True): "*", (1, True): "+"}.get((least, endless))
        if times is None:
            times = f"{{{least},}}" if endless else f"{{{least},{most}}}"
        return f"({inner}){times}"


def _any_of(branches: Sequence[Any], convert: Callable[[Any], str]) -> str:
    """Return GBNF for any of the branches that can be written."""
    options = []
    for branch in branches:
        try:
            options.append(convert(branch) or _NOTHING)
        except Unsaid:
            continue
    if not options:
        raise Unsaid
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
