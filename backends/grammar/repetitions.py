"""Repetitions of GBNF in the form that llama.cpp's parser accepts (src/llama-grammar.cpp).

The parser counts the rules that a repetition makes: its maximum, times those that the repeated
group makes itself. It rejects 2,000 and more of them, in some versions only of groups. llama-server
then responds with an error of its sampler. koboldcpp says so on its console only, and generates
without the grammar.

A group that has a rule of its own counts as one, and one repetition can follow another. So all that
`gbnf.check` allows can be written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .gbnf import BLANK_LINES, ITEM, RULE

# The largest number of rules that one repetition may make.
MOST_RULES = 1_999
# The least and the largest number of repetitions; None has no limit.
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(slots=True)
class _Group:
    """A group or a rule that is read.

    Args:
        since: the number of names that the parser knew before it.
        parts: the source of its items.
        rules: how many rules the parser counts for the last item.
        before: the number of names that it knew before this item.
    """

    since: int
    parts: list[str] = field(default_factory=list)
    rules: int = 1
    before: int = 0


def accepted(text: str) -> str:
    """Return a grammar that the parsers of all versions accept.

    Args:
        text: a grammar that `gbnf.check` allows.
    """
    return _Writer(text).written()


class _Writer:
    """A reader of rules that counts names as the parser does, and writes the rules again."""

    def __init__(self, text: str) -> None:
        self._text = text
        # The names that the parser knows, in their order; those that it has made up are empty.
        self._names: list[str] = []
        self._known: set[str] = set()
        self._prefix = "repeated-"
        while self._prefix in text:
            self._prefix += "-"
        self._rules: list[str] = []
        self._new: list[str] = []

    def written(self) -> str:
        """Return the grammar with its new rules; most grammars get none, and stay as they are."""
        groups: list[_Group] = []
        position = self._after_blank(0)
        while position < len(self._text):
            rule = RULE.match(self._text, position) if len(groups) < 2 else None
            if rule is not None:
                self._end(groups)
                self._meet(rule["name"])
                groups = [_Group(len(self._names), [f"{rule['name']} ::="])]
                position = rule.end()
            else:
                match = ITEM.match(self._text, position)
                assert match is not None, "the grammar was not checked"
                self._add(groups, match)
                position = self._after_blank(match.end())
        self._end(groups)
        return "\n".join(self._rules + self._new) + "\n" if self._new else self._text

    def _after_blank(self, position: int) -> int:
        blank = BLANK_LINES.match(self._text, position)
        return position if blank is None else blank.end()

    def _end(self, groups: list[_Group]) -> None:
        if groups:
            self._rules.append(" ".join(groups[0].parts))

    def _meet(self, name: str) -> None:
        if name not in self._known:
            self._known.add(name)
            self._names.append(name)

    def _add(self, groups: list[_Group], match: re.Match[str]) -> None:
        kind, group = match.lastgroup, groups[-1]
        if kind == "open":
            groups.append(_Group(len(self._names)))
            self._names.append("")
        elif kind == "close":
            inner = groups.pop()
            group = groups[-1]
            group.parts.append(f"({' '.join(inner.parts)})")
            group.rules, group.before = len(self._names) - inner.since, inner.since
        elif kind == "or":
            group.parts.append("|")
        elif kind == "repeat":
            self._repeat(group, match)
        else:
            group.rules, group.before = 1, len(self._names)
            if kind == "name":
                self._meet(match[0])
            group.parts.append(match[0])

    def _repeat(self, group: _Group, match: re.Match[str]) -> None:
        least, most = _times(match)
        total = most or least or 1
        if group.rules > 1 and group.rules * total > MOST_RULES:
            self._name(group)
        if total > MOST_RULES:
            item, rest = group.parts[-1], "" if most is None else most - 1
            group.parts[-1] = f"{item} {item}{{{max(least - 1, 0)},{rest}}}"
            if not least:
                group.parts[-1] += ' | ""'
            self._name(group)
            return
        group.parts[-1] += match[0]
        group.rules *= total
        self._names += [""] * (1 if most is None else most - least)

    def _name(self, group: _Group) -> None:
        """Give the last item of a group a rule of its own, which the parser meets later."""
        name = f"{self._prefix}{len(self._new) + 1}"
        self._new.append(f"{name} ::= {group.parts[-1]}")
        group.parts[-1] = name
        self._known.difference_update(self._names[group.before :])
        del self._names[group.before :]
        self._meet(name)
        group.rules = 1


def _times(match: re.Match[str]) -> tuple[int, int | None]:
    """Return the least and the largest number of a repetition; None for no limit."""
    if match["min"] is None:
        return _SIGNS[match[0]]
    least = int(match["min"])
    if not match["range"]:
        return least, least
    return least, int(match["max"]) if match["max"] else None
