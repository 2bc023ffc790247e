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
MOST_WAYS = 2_048
MOST_STEPS = 10_000
# Characters of a token, the paths that may lead through it, and the characters after which a token
# counts as one that can be read in one way.
LONGEST_TOKEN = 24
MOST_PATHS = 25_000
UNTIL_AMBIGUOUS = 6
# Steps that a grammar is followed for: about a tenth of a second.
BUDGET = 60_000
# Characters that are tried from one place, and inside a token.
MOST_TRIED, MOST_GREEDY = 48, 3
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


Ways: TypeAlias = "dict[_Stack, int]"


class _Follower:
    """Follows a grammar as llama.cpp does, and counts.

    Ways come with the number of paths that lead to each.
    """

    def __init__(self, rules: Mapping[str, list[list[Part]]]) -> None:
        self._source = rules
        self._places: dict[str, list[_Place | None]] = {}
        self._stacks: dict[tuple[int, int], _Stack] = {}
        self._ranges: dict[str, list[Ranges]] = {}
        self.steps = 0

    def begin(self) -> Ways:
        """Return the ways that are open before the first character."""
        return dict.fromkeys(self._open(self._stack(_Place("root", (), None), None)), 1)

    def after(self, ways: Ways, character: int) -> Ways:
        """Return the ways that are open behind a character."""
        found: dict[_Stack, int] = {}
        before = self.steps
        for way, paths in ways.items():
            self.steps += 1
            place = way.place
            if any(low <= character <= high for low, high in place.ranges):
                rest = self._stack(place.rest, way.below) if place.rest is not None else way.below
                for one in self._open(rest):
                    found[one] = found.get(one, 0) + paths
                if self.steps - before > MOST_STEPS or len(found) > MOST_WAYS:
                    raise TooManyWays
        return found

    def _open(self, stack: _Stack | None) -> dict[_Stack, None]:
        """Follow references until characters are next."""
        found: dict[_Stack, None] = {}
        todo = [] if stack is None else [stack]
        before = self.steps
        while todo:
            self.steps += 1
            if self.steps - before > MOST_STEPS or len(found) > MOST_WAYS:
                raise TooManyWays
            stack = todo.pop()
            place = stack.place
            if place.rule is None:
                found[stack] = None
                continue
            below = stack.below if place.rest is None else self._stack(place.rest, stack.below)
            for first in self._alternates(place.rule):
                if first is not None:
                    todo.append(self._stack(first, below))
                elif below is not None:
                    todo.append(below)
        return found

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
        once = part._replace(least=1, most=1)
        what = part.rule or part.text
        if part.most is None:
            name = f"{what}(*"
            if name not in self._places:
                self._places[name] = []
                self._places[name] += [self._once(once, _Place(name, (), None)), None]
            return name
        left: _Place | None = None
        for count in range(1, part.most - part.least + 1):
            name = f"{what}({count}"
            if name not in self._places:
                self._places[name] = [self._once(once, left), None]
            left = _Place(name, (), None)
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
        _check_token(follower, ways)
        for character in _next(ways)[:MOST_TRIED]:
            # What leads to a way is forgotten with each token.
            open_ways = dict.fromkeys(follower.after(ways, character), 1)
            key = frozenset(open_ways)
            if open_ways and key not in seen:
                seen.add(key)
                count += 1
                heapq.heappush(heap, (-len(open_ways), count, open_ways))


def _check_token(follower: _Follower, ways: Ways) -> None:
    """Follow the characters of a token to where most paths lead through it.

    llama.cpp follows each path through a token by itself (`llama_grammar_reject_candidates`), so
    two ways to read a blank are four billion ways to read a token of 32 blanks.
    """
    for step in range(LONGEST_TOKEN):
        tried = [follower.after(ways, character) for character in _next(ways)[:MOST_GREEDY]]
        ahead = max(tried, key=lambda one: sum(one.values()), default={})
        if sum(ahead.values()) > MOST_PATHS:
            raise TooManyWays
        if not ahead or (step >= UNTIL_AMBIGUOUS and sum(ahead.values()) == len(ahead)):
            return
        ways = ahead


def _next(ways: Ways) -> list[int]:
    """The characters that keep most paths open; where ranges overlap, one of them begins."""
    begins: Counter[int] = Counter()
    for way, paths in ways.items():
        for low, _ in way.place.ranges:
            begins[low] += paths
    return [character for character, _ in begins.most_common()]


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
