"""A check of the number of parse stacks that a grammar needs in llama.cpp (sans-I/O).

llama.cpp has a parse stack for each way to read the text so far (`llama_grammar_advance_stack` in
src/llama-grammar.cpp), and compares each new stack with all others. Alternates that begin alike and
optional parts multiply the stacks: a grammar of 160 characters can hang an engine forever.

So the grammar is followed here first, and always at the place with the most ways. A grammar that
opens too many ways is rejected. A grammar passes if the search budget ends first.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from ...schemas.limits import PATHS, WAYS

# The largest number of steps for one character. llama.cpp needs 2 to 5 us for each, since it
# compares each new way with all others.
MOST_STEPS = 10_000
# The longest tokens to follow, in characters: of one repeated character, and of different ones.
LONGEST_TOKEN, MIXED_TOKEN = 48, 16
# Characters after which a token with one path per way counts as unambiguous.
UNTIL_AMBIGUOUS = 6
# Steps to follow a grammar for: half a second.
BUDGET = 300_000
# The number of characters to try at each position of a token.
MOST_GREEDY = 3
LAST = 0x10FFFF

Ranges: TypeAlias = tuple[tuple[int, int], ...]


class GrammarPart(NamedTuple):
    """A part of an alternate.

    Args:
        rule: the rule that it refers to, or None for a terminal.
        text: the source of a terminal: a literal, a set, a token or a dot.
        least, most: the limits of its repetitions; None is unlimited.
    """

    rule: str | None
    text: str = ""
    least: int = 1
    most: int | None = 1


class TooManyWays(Exception):
    """A grammar with more simultaneous ways than an engine can handle."""


class _Place:
    """An element of an expanded alternate, and the elements after it.

    Args:
        rule: the rule that it refers to, or None for a terminal.
        ranges: the characters of a terminal.
        rest: the next element, or None at the end.
    """

    __slots__ = ("ranges", "rest", "rule")

    def __init__(self, rule: str | None, ranges: Ranges, rest: _Place | None) -> None:
        self.rule = rule
        self.ranges = ranges
        self.rest = rest


class _Stack:
    """A place, and the stack to continue with after it; equal stacks are one object.

    Attributes:
        opened: the ways that it opens and the steps to them, once it was followed.
    """

    __slots__ = ("_key", "below", "opened", "place")

    def __init__(self, place: _Place, below: _Stack | None) -> None:
        self.place = place
        self.below = below
        self.opened: tuple[dict[_Stack, None], int] | None = None
        self._key: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """The places, each at most twice; equal for stacks that differ in recursion depth only."""
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
        """Return True if a character may come next."""
        ranges = self.place.ranges
        place = bisect_right(ranges, (character, LAST * 3)) - 1
        return place >= 0 and character <= ranges[place][1]


Ways: TypeAlias = "dict[_Stack, int]"
# A character, and the ways that allow it.
Following: TypeAlias = "tuple[int, list[tuple[_Stack, int]]]"


class _Follower:
    """A simulation of llama.cpp's grammar parser that counts steps and ways.

    `Ways` maps each way to the number of paths that lead to it.
    """

    def __init__(self, rules: Mapping[str, list[list[GrammarPart]]]) -> None:
        self._source = rules
        self._places: dict[str, list[_Place | None]] = {}
        self._stacks: dict[tuple[int, int], _Stack] = {}
        self._ranges: dict[str, list[Ranges]] = {}
        self.steps = 0

    def begin(self) -> Ways:
        """Return the ways that are open before the first character."""
        return dict.fromkeys(self._opened(self._stack(_Place("root", (), None), None)), 1)

    def after(self, ways: Iterable[tuple[_Stack, int]]) -> Ways:
        """Return the ways that are open after a character that these ways allow."""
        found: dict[_Stack, int] = {}
        before = self.steps
        for way, paths in ways:
            self.steps += 1
            place = way.place
            rest = self._stack(place.rest, way.below) if place.rest is not None else way.below
            if rest is not None:
                for one in self._opened(rest):
                    found[one] = found.get(one, 0) + paths
            if self.steps - before > MOST_STEPS or len(found) > WAYS.maximum:
                raise TooManyWays
        return found

    def skipped(self, ways: Ways) -> Ways:
        """Skip to the last of consecutive terminals, if only one way is open."""
        if len(ways) != 1:
            return ways
        (way,) = ways
        place = way.place
        while place.rest is not None and place.rest.rule is None:
            place = place.rest
        return ways if place is way.place else {self._stack(place, way.below): 1}

    def _opened(self, stack: _Stack) -> dict[_Stack, None]:
        """Return the ways that a stack opens; those of a stack that was followed count as much."""
        if stack.opened is None:
            before = self.steps
            found = self._open(stack)
            stack.opened = found, self.steps - before
            return found
        found, steps = stack.opened
        self.steps += steps
        return found

    def _open(self, stack: _Stack) -> dict[_Stack, None]:
        """Follow references until each way has a terminal next."""
        found: dict[_Stack, None] = {}
        todo = [stack]
        before = self.steps
        while todo:
            self.steps += 1
            if self.steps - before > MOST_STEPS or len(found) > WAYS.maximum:
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
        """Return the elements of an alternate, with repetitions expanded as in llama.cpp."""
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
        """Return llama.cpp's rule for the optional repetitions: `S' ::= S S' |`, or a chain."""
        once = part._replace(least=1, most=1)
        what = part.rule or part.text
        if part.most is None:
            name = f"{what}{{*"
            if name not in self._places:
                self._places[name] = []
                self._places[name] += [self._once(once, _Place(name, (), None)), None]
            return name
        left: _Place | None = None
        for count in range(1, part.most - part.least + 1):
            # Groups have names with a `(`.
            name = f"{what}{{{count}"
            if name not in self._places:
                self._places[name] = [self._once(once, left), None]
            left = _Place(name, (), None)
        return name


def check_ways(rules: Mapping[str, list[list[GrammarPart]]]) -> None:
    """Follow a grammar to all of its places, and to those with the most ways first.

    A set of ways is followed once. A recursion is followed twice, and further while it opens more
    ways each time.

    Args:
        rules: alternates by the names of rules; `root` is the first.

    Raises:
        TooManyWays: the grammar opens more ways than an engine can handle.
    """
    follower = _Follower(rules)
    begin = follower.begin()
    count = 0
    seen: dict[frozenset[tuple[int, ...]], int] = {}
    heap = [(-len(begin), count, begin)]
    while heap and follower.steps < BUDGET:
        _, _, ways = heapq.heappop(heap)
        before = follower.steps
        following = _next(follower, ways)
        # Each of the three loops over them counts.
        follower.steps += 2 * (follower.steps - before)
        _check_token(follower, following)
        for _, matching in following:
            # Path counts start again with each token.
            open_ways = follower.skipped(dict.fromkeys(follower.after(matching), 1))
            key = frozenset([way.key for way in open_ways])
            if len(open_ways) > seen.get(key, 0):
                seen[key] = len(open_ways)
                count += 1
                heapq.heappush(heap, (-len(open_ways), count, open_ways))


def _check_token(follower: _Follower, following: list[Following]) -> None:
    """Follow the characters of a token along the most paths.

    llama.cpp follows each path through a token separately (`llama_grammar_reject_candidates`). Two
    ways to read a space are four billion ways to read a token of 32 spaces. Long tokens repeat one
    character; other tokens have few characters.
    """
    ahead: Ways = {}
    for step in range(MIXED_TOKEN):
        several = _next(follower, ahead) if step else following
        tried = [follower.after(matching) for _, matching in several[:MOST_GREEDY]]
        ahead = max(tried, key=_paths, default={})
        paths = _paths(ahead)
        if paths > PATHS.maximum:
            raise TooManyWays
        if not ahead or (step >= UNTIL_AMBIGUOUS and paths == len(ahead)):
            break
    for character, matching in following[:MOST_GREEDY]:
        for _ in range(LONGEST_TOKEN):
            ahead = follower.after(matching)
            if _paths(ahead) > PATHS.maximum:
                raise TooManyWays
            matching = [(way, paths) for way, paths in ahead.items() if way.allows(character)]
            if not matching or _paths(ahead) == len(ahead) == 1:
                break


def _paths(ways: Ways) -> int:
    return sum(ways.values())


def _next(follower: _Follower, ways: Ways) -> list[Following]:
    """Return characters with the ways that each keeps open, those with the most paths first.

    Only the first characters of ranges are tried, since each overlap of ranges begins with one.
    """
    single: dict[int, list[tuple[_Stack, int]]] = {}
    ranged: list[tuple[_Stack, int]] = []
    begins: set[int] = set()
    for way in ways.items():
        ranges = way[0].place.ranges
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            single.setdefault(ranges[0][0], []).append(way)
        else:
            begins.update([low for low, _ in ranges])
            ranged.append(way)
    begins.update(single)
    follower.steps += len(begins) * (1 + len(ranged))
    found = []
    for character in begins:
        matching = single.get(character, []) + [way for way in ranged if way[0].allows(character)]
        found.append((-sum([paths for _, paths in matching]), character, matching))
    # No two have the same character.
    found.sort()
    return [(character, matching) for _, character, matching in found]


_CHARACTER = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"}


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """Yield the characters of a literal or a set, with False for those that are escaped."""
    for match in _CHARACTER.finditer(text):
        number = match[1] or match[2] or match[3]
        if number:
            yield int(number, 16), False
        elif match[4]:
            yield ord(_ESCAPES.get(match[4], match[4])), False
        else:
            yield ord(match[5]), True


def terminals(text: str) -> Iterator[Ranges]:
    """Yield the characters that each element of a terminal allows.

    A token is a single character above all real ones.
    """
    if text.startswith('"'):
        for code, _ in _characters(text[1:-1]):
            yield ((code, code),)
    elif text == ".":
        yield ((0, LAST),)
    elif text.startswith("["):
        inverted = text.startswith("[^")
        ranges = joined(_set(text[2 if inverted else 1 : -1]))
        yield tuple(others(ranges)) if inverted else tuple(ranges)
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
    """Return ranges in order and without overlaps."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def others(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of all other characters; `ranges` are `joined`."""
    start = 0
    for low, high in ranges:
        if low > start:
            yield start, low - 1
        start = max(start, high + 1)
    if start <= LAST:
        yield start, LAST
