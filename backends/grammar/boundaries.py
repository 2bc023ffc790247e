"""A check of the tokens in GBNF, which llama.cpp also looks for inside other tokens (sans-I/O).

To learn whether a token may come next, llama.cpp follows its characters. Where these lead to a
token of the grammar, it compares only the id (`llama_grammar_reject_candidates_for_stack` in
src/llama-grammar.cpp). So after `"a"`, `!<|end|>` allows the token `app`. When this token is
accepted, no way is left, and the process ends.

So the grammar is followed with the parts of a token that characters may have taken. A grammar is
rejected if a token of it could follow a part of a token that it matches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_

from .ambiguity import GrammarPart, TooManyWays, terminals
from .preamble import follow
from .regex import Range, complement, holds, only

# The largest numbers of tokens after characters, and of steps to follow all of them: 160,000 steps
# between rules took 0.04 s.
_MOST_TOKENS, _MOST_STEPS = 16, 200_000


class Inside(Exception):
    """A token of the grammar that could be looked for inside another token."""


def check_boundaries(
    rules: Mapping[str, Sequence[Sequence[GrammarPart]]], piece: Callable[[str], str]
) -> None:
    """Check that no token of a grammar can follow a part of a token that it matches.

    Args:
        rules: the alternates of each rule and group, the one named `root` first of all.
        piece: returns the text of a token by its spelling in GBNF; empty if it is unknown.

    Raises:
        Inside: the first token that could.
        TooManyWays: the grammar is too large to know.
    """
    flow = _Flow(rules, "", _MOST_STEPS)
    after = flow.found
    for token in after:
        # Any token may have such a part.
        if token.startswith("!"):
            raise Inside(token)
    if len(after) > _MOST_TOKENS:
        raise TooManyWays
    for token in after:
        mark = piece(token)
        if len(mark) > 1:
            flow = _Flow(rules, mark, flow.steps)
            if token in flow.found:
                raise Inside(token)


class _Flow:
    """The states in which each rule can be entered and left, as bits.

    A state is the length of the longest part of the mark that characters may have taken from a
    token. Without a mark it is 1 after any character. The states after an optional character
    come once more, above these: a token that follows may come without it, so a way is left.

    Attributes:
        found: the tokens that can be entered in another state than 0.
        steps: the steps that remain.
    """

    def __init__(
        self, rules: Mapping[str, Sequence[Sequence[GrammarPart]]], mark: str, most: int
    ) -> None:
        self._rules = rules
        self._mark = mark
        self._next = follow(mark)
        self._border = _border(mark)
        self._size = max(len(mark), 2)
        self._entered = dict.fromkeys(rules, 0)
        self._left = dict.fromkeys(rules, 0)
        self._relations: dict[str, Sequence[int]] = {}
        self.steps = most
        self.found: dict[str, None] = {}
        users: defaultdict[str, set[str]] = defaultdict(set)
        for name, alternates in rules.items():
            for part in (part for one in alternates for part in one):
                if part.rule is not None:
                    users[part.rule].add(name)
        self._entered["root"] = 1
        self._todo = {"root": None}
        while self._todo:
            name = next(iter(self._todo))
            del self._todo[name]
            left = 0
            for alternate in rules[name]:
                left |= self._along(alternate, self._entered[name])
            if left != self._left[name]:
                self._left[name] = left
                self._todo |= dict.fromkeys(users[name])

    def _along(self, parts: Sequence[GrammarPart], states: int) -> int:
        for part in parts:
            self.steps -= 1
            if self.steps < 0:
                raise TooManyWays
            if self._takes_all(part):
                # Where characters may go on to the end of the token, a way is left.
                states = 1 if states else 0
                continue
            once = self._after(part, states)
            if part.most != 1:
                # More states than these are not reached by further repetitions of a mark.
                reached = states | once
                while (more := reached | self._after(part, reached)) != reached:
                    reached = more
                once = self._after(part, reached)
            if not part.least and self._is_one(part):
                once <<= self._size
            states = once if part.least else states | once
        return states

    def _is_one(self, part: GrammarPart) -> bool:
        """Return True for a set of characters, or a text of one."""
        if part.rule is not None or part.text.startswith(("<", "!")):
            return False
        return len([*terminals(part.text)]) == 1

    def _takes_all(self, part: GrammarPart) -> bool:
        """Return True if any number of characters, those of the mark as well, may come."""
        if part.rule is not None or part.most is not None or not self._mark:
            return False
        sets = [*terminals(part.text)]
        return len(sets) == 1 and all(
            any(first <= ord(one) <= last for first, last in sets[0]) for one in self._mark
        )

    def _after(self, part: GrammarPart, states: int) -> int:
        if not states:
            return 0
        if part.rule is not None:
            if states & ~self._entered[part.rule]:
                self._entered[part.rule] |= states
                self._todo[part.rule] = None
            return self._left[part.rule]
        inside = states & ((1 << self._size) - 1)
        if part.text.startswith(("<", "!")):
            if inside > 1:
                self.found[part.text] = None
            return 1
        return _joined(self._relation(part.text), inside | states >> self._size)

    def _relation(self, text: str) -> Sequence[int]:
        """Return the states after characters, for each state before them."""
        if text not in self._relations:
            found = [1 << state for state in range(self._size)]
            for ranges in terminals(text):
                after = self._after_one([Range(*one) for one in ranges])
                found = [_joined(after, states) for states in found]
            self._relations[text] = found
        return self._relations[text]

    def _after_one(self, ranges: Sequence[Range]) -> Sequence[int]:
        """Return the states after one character of a set, for each state before it."""
        if not self._mark:
            return (2, 2)
        known = [one for one in self._next[0] if holds(ranges, ord(one))]
        others = bool(complement([*complement(ranges), *map(only, self._next[0])]))
        found = []
        for after in self._next:
            sizes = {after[one] for one in known}
            states = [self._border if size == len(self._mark) else size for size in sizes]
            found.append(reduce(or_, (1 << state for state in states), int(others)))
        return found


def _joined(after: Sequence[int], states: int) -> int:
    return reduce(or_, (one for at, one in enumerate(after) if states >> at & 1), 0)


def _border(mark: str) -> int:
    """Return the length of the longest end of a text that is also its beginning."""
    return next((size for size in range(len(mark) - 1, 0, -1) if mark.endswith(mark[:size])), 0)
