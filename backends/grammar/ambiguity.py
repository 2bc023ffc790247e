"""How many ways llama.cpp keeps open at once while it follows a grammar (sans-I/O).

llama.cpp follows a grammar with a set of stacks, one for each way to read what has been written
(`llama_grammar_advance_stack` in src/llama-grammar.cpp), and compares each new one with all others.
Alternates that begin alike, or much that may be missing, multiply them: 160 characters can stop an
engine for ever. So the grammar is followed here first, always to where most ways are open, and one
that opens too many is refused. What is not found within the budget is let through.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from ...schemas.limits import PATHS, WAYS

# Steps that follow one character: llama.cpp needs 2 to 5 us for each, since it compares each new
# way with all others.
MOST_STEPS = 10_000
# Characters of a token that is one character again and again, and of any other; the characters
# after which one counts as a token that can be read in one way.
LONGEST_TOKEN, MIXED_TOKEN = 48, 16
UNTIL_AMBIGUOUS = 6
# Steps that a grammar is followed for: half a second.
BUDGET = 300_000
# Characters that are tried inside a token.
MOST_GREEDY = 3
LAST = 0x10FFFF

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class GrammarPart(NamedTuple):
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

    __slots__ = ("_key", "below", "place")

    def __init__(self, place: _Place, below: _Stack | None) -> None:
        self.place = place
        self.below = below
        self._key: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """The places, each twice at most: alike for stacks that differ in how deep they recur."""
        if self._key is None:
            found: list[int] = []
            times: dict[int, int] = {}
            stack: _Stack | None = self
            while stack is not None:
                own = id(stack.place)
                times[own] = times.get(own, 0) + 1
                if times[own] <= 2:
                    found.append(own)
                stack = stack.below
            self._key = tuple(found)
        return self._key

    def allows(self, character: int) -> bool:
        """Whether a character may come next."""
        ranges = self.place.ranges
        place = bisect_right(ranges, (character, LAST * 3)) - 1
        return place >= 0 and character <= ranges[place][1]


Ways: TypeAlias = "dict[_Stack, int]"


class _Follower:
    """Follows a grammar as llama.cpp does, and counts.

    Ways come with the number of paths that lead to each.
    """

    def __init__(self, rules: Mapping[str, list[list[GrammarPart]]]) -> None:
        self._source = rules
        self._places: dict[str, list[_Place | None]] = {}
        self._stacks: dict[tuple[int, int], _Stack] = {}
        self._ranges: dict[str, list[Ranges]] = {}
        self.steps = 0

    def begin(self) -> Ways:
        """Return the ways that are open before the first character."""
        return dict.fromkeys(self._open(self._stack(_Place("root", (), None), None)), 1)

    def after(self, ways: Iterable[tuple[_Stack, int]]) -> Ways:
        """Return the ways that are open behind a character that these ways allow."""
        found: dict[_Stack, int] = {}
        before = self.steps
        for way, paths in ways:
            self.steps += 1
            place = way.place
            rest = self._stack(place.rest, way.below) if place.rest is not None else way.below
            for one in self._open(rest):
                found[one] = found.get(one, 0) + paths
            if self.steps - before > MOST_STEPS or len(found) > WAYS.most:
                raise TooManyWays
        return found

    def skipped(self, ways: Ways) -> Ways:
        """Return the ways behind all of a text that can only go on with itself."""
        if len(ways) != 1:
            return ways
        (way,) = ways
        place = way.place
        while place.rest is not None and place.rest.rule is None:
            place = place.rest
        return ways if place is way.place else {self._stack(place, way.below): 1}

    def _open(self, stack: _Stack | None) -> dict[_Stack, None]:
        """Follow references until characters are next."""
        found: dict[_Stack, None] = {}
        todo = [] if stack is None else [stack]
        before = self.steps
        while todo:
            self.steps += 1
            if self.steps - before > MOST_STEPS or len(found) > WAYS.most:
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

    def _written_out(self, parts: list[GrammarPart]) -> _Place | None:
        """The elements of an alternate, repetitions written out as llama.cpp does."""
        rest: _Place | None = None
        for part in reversed(parts):
            if part.most is None or part.most > part.least:
                rest = _Place(self._repeated(part), (), rest)
            for _ in range(part.least):
                rest = self._once(part, rest)
        return rest

    def _once(self, part: GrammarPart, rest: _Place | None) -> _Place | None:
        if part.rule is not None:
            return _Place(part.rule, (), rest)
        ranges = self._ranges.get(part.text)
        if ranges is None:
            ranges = self._ranges[part.text] = list(terminals(part.text))
        for one in reversed(ranges):
            rest = _Place(None, one, rest)
        return rest

    def _repeated(self, part: GrammarPart) -> str:
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


def check_ways(rules: Mapping[str, list[list[GrammarPart]]]) -> None:
    """Follow a grammar everywhere, and to where it opens most ways first.

    A place counts as seen where the same ways were open before: a recursion is followed twice, and
    on as long as it opens more ways each time.

    Args:
        rules: alternates by the names of rules; `root` is the first.

    Raises:
        TooManyWays: it opens more than an engine survives.
    """
    follower = _Follower(rules)
    begin = follower.begin()
    count = 0
    seen: dict[frozenset[tuple[int, ...]], int] = {}
    heap = [(-len(begin), count, begin)]
    while heap and follower.steps < BUDGET:
        _, _, ways = heapq.heappop(heap)
        _check_token(follower, ways)
        for _, matching in _next(follower, ways):
            # What leads to a way is forgotten with each token.
            open_ways = follower.skipped(dict.fromkeys(follower.after(matching), 1))
            key = frozenset([way.key for way in open_ways])
            if len(open_ways) > seen.get(key, 0):
                seen[key] = len(open_ways)
                count += 1
                heapq.heappush(heap, (-len(open_ways), count, open_ways))


def _check_token(follower: _Follower, ways: Ways) -> None:
    """Follow the characters of a token to where most paths lead through it.

    llama.cpp follows each path through a token by itself (`llama_grammar_reject_candidates`), so
    two ways to read a blank are four billion ways to read a token of 32 blanks. Long tokens are one
    character again and again; of others a few characters are all there is.
    """
    ahead = ways
    for step in range(MIXED_TOKEN):
        tried = [follower.after(matching) for _, matching in _next(follower, ahead)[:MOST_GREEDY]]
        ahead = max(tried, key=_paths, default={})
        if _paths(ahead) > PATHS.most:
            raise TooManyWays
        if not ahead or (step >= UNTIL_AMBIGUOUS and _paths(ahead) == len(ahead)):
            break
    for character, matching in _next(follower, ways)[:MOST_GREEDY]:
        for _ in range(LONGEST_TOKEN):
            ahead = follower.after(matching)
            if _paths(ahead) > PATHS.most:
                raise TooManyWays
            matching = [(way, paths) for way, paths in ahead.items() if way.allows(character)]
            if not matching or _paths(ahead) == len(ahead) == 1:
                break


def _paths(ways: Ways) -> int:
    return sum(ways.values())


def _next(follower: _Follower, ways: Ways) -> list[tuple[int, list[tuple[_Stack, int]]]]:
    """The ways that each character allows, those that keep most paths open first.

    Where ranges overlap, one of them begins: no other characters need to be tried.
    """
    single: dict[int, list[tuple[_Stack, int]]] = {}
    ranged: list[tuple[_Stack, int]] = []
    begins: set[int] = set()
    for way, paths in ways.items():
        ranges = way.place.ranges
        begins.update([low for low, _ in ranges])
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            single.setdefault(ranges[0][0], []).append((way, paths))
        else:
            ranged.append((way, paths))
    found = []
    for character in begins:
        follower.steps += 1 + len(ranged)
        matching = single.get(character, []) + [
            (way, paths) for way, paths in ranged if way.allows(character)
        ]
        found.append((character, matching))
    found.sort(key=lambda one: (-sum(paths for _, paths in one[1]), one[0]))
    return found


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
        ranges = joined(_set(text[2 if inverted else 1 : -1]))
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


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, none of which overlaps another."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _complement(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    start = 0
    for low, high in ranges:
        if low > start:
            yield start, low - 1
        start = max(start, high + 1)
    if start <= LAST:
        yield start, LAST
