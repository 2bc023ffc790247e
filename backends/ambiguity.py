"""How many ways llama.cpp keeps open at once while it follows a grammar (sans-I/O).

llama.cpp follows a grammar with a set of stacks, one for each way to read what has been written
(`llama_grammar_advance_stack` in src/llama-grammar.cpp), and compares each new one with all others.
Alternates that begin alike, or much that may be missing, multiply them: 160 characters can stop an
engine for ever. So the grammar is followed here first, always to where most ways are open, and one
that opens too many is refused. What is not found within the budget is let through: a grammar that
keeps its ways apart needs none of it.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

# Ways that may be open at once, and steps that follow one character: llama.cpp needs 2 to 5 us for
# each, since it compares each new way with all others.
MOST_WAYS = 4_096
MOST_STEPS = 10_000
# Steps that a grammar is followed for: about a tenth of a second.
BUDGET = 60_000
# Characters that are tried from one place.
MOST_TRIED = 48
LAST = 0x10FFFF

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class Part(NamedTuple):
    """A part of an alternate.

    Args:
        rule: the rule that it refers to, None for a terminal.
        text: a terminal as it is written: a literal, a set, a token or a dot.
        least, most: how often it stands there; None is without end.
    """

    rule: str | None
    text: str = ""
    least: int = 1
    most: int | None = 1


class TooManyWays(Exception):
    """More ways would be open at once than an engine survives."""


class _Place:
    """An element of an alternate that has been written out, and what comes behind it.

    Args:
        rule: what it refers to, None for a terminal.
        ranges: the characters of a terminal.
        rest: the next element, None at the end.
    """

    __slots__ = ("ranges", "rest", "rule")

    def __init__(self, rule: str | None, ranges: Ranges, rest: _Place | None) -> None:
        self.rule = rule
        self.ranges = ranges
        self.rest = rest


class _Stack:
    """A place, and the places to go on from behind it; equal stacks are one object."""

    __slots__ = ("below", "place")

    def __init__(self, place: _Place, below: _Stack | None) -> None:
        self.place = place
        self.below = below


class _Follower:
    """Follows a grammar as llama.cpp does, and counts."""

    def __init__(self, rules: Mapping[str, list[list[Part]]]) -> None:
        self._source = rules
        self._places: dict[str, list[_Place | None]] = {}
        self._repeats: dict[str, list[_Place | None]] = {}
        self._stacks: dict[tuple[int, int], _Stack] = {}
        self._ranges: dict[str, list[Ranges]] = {}
        self.steps = 0

    def begin(self) -> dict[_Stack, None]:
        """Return the ways that are open before the first character."""
        found: dict[_Stack, None] = {}
        self._open([self._stack(_Place("root", (), None), None)], found)
        return found

    def after(self, ways: Iterable[_Stack], character: int) -> dict[_Stack, None]:
        """Return the ways that are open behind a character."""
        found: dict[_Stack, None] = {}
        ended = []
        for way in ways:
            self.steps += 1
            place = way.place
            if any(low <= character <= high for low, high in place.ranges):
                rest = self._stack(place.rest, way.below) if place.rest is not None else way.below
                if rest is not None:
                    ended.append(rest)
        self._open(ended, found)
        return found

    def _open(self, todo: list[_Stack], found: dict[_Stack, None]) -> None:
        """Follow references until characters are next."""
        steps = 0
        while todo:
            steps += 1
            self.steps += 1
            if steps > MOST_STEPS:
                raise TooManyWays
            stack = todo.pop()
            place = stack.place
            if place.rule is None:
                found[stack] = None
                if len(found) > MOST_WAYS:
                    raise TooManyWays
                continue
            below = stack.below if place.rest is None else self._stack(place.rest, stack.below)
            for first in self._alternates(place.rule):
                if first is not None:
                    todo.append(self._stack(first, below))
                elif below is not None:
                    todo.append(below)

    def _stack(self, place: _Place, below: _Stack | None) -> _Stack:
        key = (id(place), id(below))
        found = self._stacks.get(key)
        if found is None:
            found = self._stacks[key] = _Stack(place, below)
        return found

    def _alternates(self, rule: str) -> list[_Place | None]:
        found = self._places.get(rule)
        if found is None:
            found = self._places[rule] = []
            found += [self._written_out(parts) for parts in self._source[rule]]
        return found

    def _written_out(self, parts: list[Part]) -> _Place | None:
        """The elements of an alternate, repetitions written out as llama.cpp does."""
        rest: _Place | None = None
        for part in reversed(parts):
            if part.most is None or part.most > part.least:
                rest = _Place(self._repeated(part), (), rest)
            for _ in range(part.least):
                rest = self._once(part, rest)
        return rest

    def _once(self, part: Part, rest: _Place | None) -> _Place | None:
        if part.rule is not None:
            return _Place(part.rule, (), rest)
        ranges = self._ranges.get(part.text)
        if ranges is None:
            ranges = self._ranges[part.text] = list(terminals(part.text))
        for one in reversed(ranges):
            rest = _Place(None, one, rest)
        return rest

    def _repeated(self, part: Part) -> str:
        """The rule that llama.cpp makes of what may follow: `S' ::= S S' |`, or a chain of them."""
        more = None if part.most is None else part.most - part.least
        name = f"{part.rule or part.text}({more}"
        if name not in self._places:
            once = part._replace(least=1, most=1)
            alternates = self._places[name] = []
            if more is None:
                alternates += [self._once(once, _Place(name, (), None)), None]
            else:
                left = (
                    _Place(self._repeated(part._replace(most=part.most - 1)), (), None)
                    if part.most is not None and more > 1
                    else None
                )
                alternates += [self._once(once, left), None]
        return name


def check_ways(rules: Mapping[str, list[list[Part]]]) -> None:
    """Follow a grammar to where it opens most ways.

    Args:
        rules: alternates by the names of rules; `root` is the first.

    Raises:
        TooManyWays: it opens more than an engine survives.
    """
    follower = _Follower(rules)
    begin = follower.begin()
    count = 0
    seen = {frozenset(begin)}
    heap = [(-len(begin), count, begin)]
    while heap and follower.steps < BUDGET:
        _, _, ways = heapq.heappop(heap)
        for character in _next(ways):
            open_ways = follower.after(ways, character)
            key = frozenset(open_ways)
            if open_ways and key not in seen:
                seen.add(key)
                count += 1
                heapq.heappush(heap, (-len(open_ways), count, open_ways))


def _next(ways: Iterable[_Stack]) -> list[int]:
    """The characters that keep most ways open; where ranges overlap, one of them begins."""
    begins = Counter(low for way in ways for low, _ in way.place.ranges)
    return [character for character, _ in begins.most_common(MOST_TRIED)]


_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """The characters of a literal or a set, and whether each is spelled by itself."""
    for match in _CHARACTER.finditer(text):
        number = match[1] or match[2] or match[3]
        if number:
            yield int(number, 16), False
        elif match[4]:
            yield ord(_ESCAPES.get(match[4], match[4])), False
        else:
            yield ord(match[5]), True


def terminals(text: str) -> Iterator[Ranges]:
    """The characters that each element of a terminal allows; a token is a character beyond all."""
    if text.startswith('"'):
        for code, _ in _characters(text[1:-1]):
            yield ((code, code),)
    elif text == ".":
        yield ((0, LAST),)
    elif text.startswith("["):
        inverted = text.startswith("[^")
        ranges = sorted(_set(text[2 if inverted else 1 : -1]))
        yield tuple(_complement(ranges)) if inverted else tuple(ranges)
    elif text.startswith("!"):
        yield ((0, LAST),)
    else:
        code = LAST + 1 + hash(text) % LAST
        yield ((code, code),)


def _set(text: str) -> Iterator[tuple[int, int]]:
    codes = list(_characters(text))
    place = 0
    while place < len(codes):
        low = high = codes[place][0]
        if place + 2 < len(codes) and codes[place + 1] == (ord("-"), True):
            high = codes[place + 2][0]
            place += 2
        yield low, high
        place += 1


def _complement(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = 0
    for low, high in ranges:
        if low > start:
            yield start, low - 1
        start = max(start, high + 1)
    if start <= LAST:
        yield start, LAST
