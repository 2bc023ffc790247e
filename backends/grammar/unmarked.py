"""Grammars of texts without a mark: nothing in them is escaped, and the mark ends them.

A text is followed through the states of Knuth, Morris and Pratt (`preamble.follow`). No beginning
of the mark is also its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import TypeAlias

from .ambiguity import GrammarPart, terminals
from .gbnf import UnsupportedSchema, WrongGrammar, parts_of
from .preamble import follow
from .regex import Range, complement, holds, literal, normal, one_of, only

_Rules: TypeAlias = Mapping[str, list[list[GrammarPart]]]
# Parts to follow, for about half a second.
_MOST_STEPS = 100_000
# For each state, the states after a text as bits.
_Relation: TypeAlias = tuple[int, ...]


def unmarked(rules: dict[str, str], name: str, mark: str) -> dict[str, str]:
    """Return rules for the texts of a grammar that do not contain a mark.

    The endless repetitions of a set of characters exclude the mark.

    Args:
        rules: GBNF without tokens, by the names of rules.
        name: the name of the main rule, and the prefix of the names of new rules.

    Raises:
        UnsupportedSchema: other parts of the grammar allow the mark.
    """
    try:
        parts = parts_of("".join(f"{own} ::= {rule}\n" for own, rule in rules.items()))
    except WrongGrammar as error:
        # An engine cannot follow it.
        raise UnsupportedSchema(str(error)) from None
    if not _Follower(parts, mark).allows_mark(name):
        return rules
    runs = _Runs(parts, name, mark)
    narrow = {
        own: [[runs.narrowed(part) for part in one] for one in alternates]
        for own, alternates in parts.items()
    }
    changed = {_rule_of(own) for own in parts if narrow[own] != parts[own]}
    found = {own: rule for own, rule in rules.items() if own not in changed}
    # Groups become rules.
    found |= {_named(own): _written(narrow[own]) for own in parts if _rule_of(own) in changed}
    found |= runs.rules
    again = parts_of("".join(f"{own} ::= {rule}\n" for own, rule in found.items()))
    if _Follower(again, mark).allows_mark(name):
        raise UnsupportedSchema(
            f"a text of this grammar can contain '{mark.strip()}', which ends it"
        )
    return found


class _Follower:
    """The states that each rule leads to."""

    def __init__(self, rules: _Rules, mark: str) -> None:
        self._rules = rules
        self._size = len(mark)
        self._steps = 0
        self._follow = follow(mark)
        self._same = tuple(1 << state for state in range(self._size + 1))
        self._terminals: dict[str, _Relation] = {}
        self._joined: dict[tuple[_Relation, _Relation], _Relation] = {}
        none = (0,) * (self._size + 1)
        self._found = dict.fromkeys(rules, none)

    def allows_mark(self, name: str) -> bool:
        """Return True if a text of a rule can contain the mark."""
        users: defaultdict[str, set[str]] = defaultdict(set)
        for own, alternates in self._rules.items():
            for part in (part for one in alternates for part in one):
                if part.rule is not None:
                    users[part.rule].add(own)
        todo = dict.fromkeys(self._rules)
        while todo:
            # The oldest: groups come before the rules that contain them.
            own = next(iter(todo))
            del todo[own]
            after = self._either(*(self._sequence(one) for one in self._rules[own]))
            if after != self._found[own]:
                self._found[own] = after
                todo |= dict.fromkeys(users[own])
        return bool(self._found[name][0] >> self._size)

    def _sequence(self, parts: Sequence[GrammarPart]) -> _Relation:
        found = self._same
        self._steps += len(parts)
        if self._steps > _MOST_STEPS:
            raise UnsupportedSchema("it is too large for this model's tool-call format")
        for part in parts:
            once = self._terminal(part.text) if part.rule is None else self._found.get(part.rule)
            if once is None:
                raise UnsupportedSchema(f"there is no rule '{part.rule}'")
            found = self._then(found, self._times(once, part.least))
            if part.most != part.least:
                found = self._then(found, self._up_to(once, part.most, part.least))
        return found

    def _times(self, once: _Relation, times: int) -> _Relation:
        found = self._same
        while times:
            if times & 1:
                found = self._then(found, once)
            once = self._then(once, once)
            times >>= 1
        return found

    def _up_to(self, once: _Relation, most: int | None, least: int) -> _Relation:
        # Every state is reached within as many steps as there are states.
        steps = self._size + 1
        return self._times(
            self._either(self._same, once), steps if most is None else min(most - least, steps)
        )

    def _terminal(self, text: str) -> _Relation:
        if text not in self._terminals:
            found = self._same
            for ranges in terminals(text):
                found = self._then(found, self._character([Range(*one) for one in ranges]))
            self._terminals[text] = found
        return self._terminals[text]

    @property
    def _states(self) -> range:
        return range(self._size + 1)

    def _character(self, ranges: Sequence[Range]) -> _Relation:
        marks = self._follow[0]
        allowed = [one for one in marks if holds(ranges, ord(one))]
        others = bool(complement([*complement(ranges), *map(only, marks)]))
        after = [_any(1 << known[one] for one in allowed) | others for known in self._follow]
        return (*after, 1 << self._size if ranges else 0)

    def _then(self, first: _Relation, second: _Relation) -> _Relation:
        key = (first, second)
        if key not in self._joined:
            self._joined[key] = tuple(
                _any(second[state] for state in self._states if states >> state & 1)
                for states in first
            )
        return self._joined[key]

    def _either(self, *relations: _Relation) -> _Relation:
        return tuple(_any(states) for states in zip(*relations, strict=True))


class _Runs:
    """The rules for endless repetitions of a set, which do not contain the mark."""

    def __init__(self, parts: _Rules, prefix: str, mark: str) -> None:
        self._parts = parts
        self._prefix = prefix
        self._mark = mark
        self._sets: dict[str, list[Range] | None] = {}
        self._known: dict[tuple[Range, ...], str] = {}
        self.rules: dict[str, str] = {}

    def narrowed(self, part: GrammarPart) -> GrammarPart:
        """Return a part, or if it is such a repetition, a rule for it."""
        if part.most is not None or part.least > 1:
            return part
        found = self._set(part._replace(least=1, most=1))
        if found is None or not all(holds(found, ord(one)) for one in self._mark):
            return part
        name = self._run(tuple(found))
        return GrammarPart(name if part.least else f"{name}-0")

    def _set(self, part: GrammarPart) -> list[Range] | None:
        """Return the characters of a part that is one of a set; None for any other part."""
        if (part.least, part.most) != (1, 1):
            return None
        if part.rule is None:
            sets = list(terminals(part.text))
            return normal(Range(*one) for one in sets[0]) if len(sets) == 1 else None
        if part.rule not in self._sets:
            # A rule that contains itself is not a set.
            self._sets[part.rule] = None
            options = [
                self._set(one[0]) if len(one) == 1 else None for one in self._parts[part.rule]
            ]
            if all(one is not None for one in options):
                self._sets[part.rule] = normal(each for one in options for each in one or ())
        return self._sets[part.rule]

    def _run(self, ranges: tuple[Range, ...]) -> str:
        """Return the name of a rule for one or more characters; `-0` after it is for any number."""
        if ranges not in self._known:
            own = self._known[ranges] = f"{self._prefix}-run-{len(self._known)}"
            for state, known in enumerate(follow(self._mark)):
                begun = {character: follows for character, follows in known.items() if follows}
                parts = [
                    f"{literal(character)} {own}-{follows}"
                    for character, follows in begun.items()
                    if follows < len(self._mark)
                ]
                others = complement([*complement(ranges), *map(only, begun)])
                parts += [f"{one_of(others)} {own}-0"] if others else []
                self.rules[f"{own}-{state}"] = " | ".join([*parts, '""'])
                if not state:
                    self.rules[own] = " | ".join(parts)
        return self._known[ranges]


def _any(states: Iterable[int]) -> int:
    return reduce(or_, states, 0)


def _rule_of(group: str) -> str:
    return group.split("(")[0]


def _named(rule: str) -> str:
    """Return a name for a rule or group."""
    return rule.replace("(", "-group-")


def _written(alternates: Sequence[Sequence[GrammarPart]]) -> str:
    return " | ".join(" ".join(map(_part, one)) or '""' for one in alternates)


def _part(part: GrammarPart) -> str:
    text = part.text if part.rule is None else _named(part.rule)
    if part.most is None:
        return f"{text}{{{part.least},}}"
    return text if part.least == part.most == 1 else f"{text}{{{part.least},{part.most}}}"
