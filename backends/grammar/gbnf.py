"""Validation of GBNF before an engine parses it (grammars/README.md, src/llama-grammar.cpp).

llama.cpp's own parser overflows the stack on deep nesting. It takes all memory for `"a"{3,2}` or
for a left recursion that it does not detect, and follows some grammars for years. It prints the
whole text of an invalid grammar to the terminal. koboldcpp ignores an invalid grammar. So no engine
gets one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...schemas import limits
from ..errors import shortened, summed_up
from .ambiguity import GrammarPart, TooManyWays, check_ways


class UnsupportedSchema(Exception):
    """A schema keyword or a part of a regular expression that a grammar cannot enforce.

    Args:
        path: the place in the schema, as keys and indices; empty for a regular expression.
        reason: the constraint, and an alternative.
    """

    def __init__(self, reason: str, path: Sequence[str | int] = ()) -> None:
        self.reason = summed_up(reason)
        super().__init__(self.reason)
        self.path = tuple(path)

    @property
    def where(self) -> str:
        """The path in the form of OpenAI's errors: `.properties.age.minimum`, `.anyOf[0]`."""
        steps = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return shortened("".join(steps))

    @property
    def context(self) -> str:
        """The path in the form of OpenAI's error messages: `('properties', 'age')`."""
        return shortened(str(self.path))


MAX_SIZE = limits.GRAMMAR.maximum
MAX_NESTING = limits.GROUPS.maximum
MAX_REPETITION = limits.REPETITIONS.maximum
# The largest number of items with repetitions expanded, and of paths through the beginnings of
# rules.
MAX_ITEMS = limits.ITEMS.maximum
MAX_PATHS = 20_000_000

_CHAR = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[trn\\\"\[\]-])"
# Possessive, to prevent backtracking: `####` could be four comments or one.
_SPACE = r"(?:[ \t]|[#][^\r\n]*+)*+"
_GAP = r"(?:[ \t\r\n]|[#][^\r\n]*+)*+"
ITEM = re.compile(
    rf"""(?P<literal>"(?:{_CHAR}|[^"\\])*+")
    |(?P<set>\[\^?(?:{_CHAR}|[^\]\\])*+\])
    |(?P<token>!?<(?:\[\d{{1,9}}\]|[^>\[][^>]*)>)
    |(?P<name>[a-zA-Z0-9-]+)
    |(?P<any>\.)
    |(?P<open>\()|(?P<close>\))|(?P<or>\|)
    |(?P<repeat>[*+?]|\{{{_GAP}(?P<min>\d+){_GAP}(?P<range>,{_GAP}(?P<max>\d+)?{_GAP})?\}})
    """,
    re.VERBOSE,
)
RULE = re.compile(rf"(?P<name>[a-zA-Z0-9-]+){_SPACE}::={_GAP}")
_BLANK = re.compile(_SPACE)
BLANK_LINES = re.compile(_GAP)
_LINE_END = re.compile(r"\r\n?|\n|$")


class WrongGrammar(ValueError):
    """A grammar that must not reach an engine; the message has the place and the reason."""


class _Item(NamedTuple):
    """A part of an alternate.

    Args:
        rule: the rule or group that it refers to; None for characters or a token.
        optional: True if it may be repeated zero times.
        times: the number of copies when its repetitions are expanded.
        endless: True if its repetitions have no upper limit.
        text: the source of characters or a token.
        least: the least number of repetitions.
    """

    rule: str | None
    optional: bool = False
    times: int = 1
    endless: bool = False
    text: str = ""
    least: int = 1


@dataclass(slots=True)
class _Group:
    """The alternates of a rule or of a parenthesized group."""

    name: str
    alternates: list[list[_Item]] = field(default_factory=lambda: [[]])

    @property
    def shown(self) -> str:
        """The name of the rule that contains it, for messages."""
        return shortened(self.name.split("(")[0])


def check(text: str, most: int = MAX_SIZE) -> list[str]:
    """Validate a grammar and return the tokens in it, `<[id]>` or `<spelling>`.

    The caller has to check that the tokens exist.

    Args:
        most: the largest number of characters.

    Raises:
        WrongGrammar: llama.cpp would reject the grammar, crash, or hang.
    """
    check_size(text, most)
    if "\0" in text:
        raise WrongGrammar("it contains a NUL character; write \\x00")
    reader = _Reader(text)
    rules = reader.rules()
    if "root" not in rules:
        raise WrongGrammar("there is no rule 'root'")
    for group in rules.values():
        for item in _items(group):
            if item.rule is not None and item.rule not in rules:
                raise WrongGrammar(f"there is no rule '{shortened(item.rule)}'")
            if (
                item.endless
                and item.rule is not None
                and any(
                    all(inner is _NOTHING for inner in alternate)
                    for alternate in rules[item.rule].alternates
                )
            ):
                raise WrongGrammar(
                    f"rule '{group.shown}' repeats an item that can be empty, without a maximum"
                )
    size = sum(item.times for group in rules.values() for item in _items(group))
    if size > MAX_ITEMS:
        raise WrongGrammar(
            f"its repetitions expand to {size} items; at most {MAX_ITEMS} are allowed"
        )
    _check_left_recursion(rules)
    _check_open_recursion(rules)
    try:
        check_ways(_parts(rules))
    except TooManyWays:
        raise WrongGrammar(
            "it is too ambiguous; write the common beginning of alternatives only once, and use "
            "fewer optional items"
        ) from None
    return reader.tokens


def check_size(text: str, most: int = MAX_SIZE) -> None:
    """Raise `WrongGrammar` for a text that is too long."""
    if len(text) > most:
        raise WrongGrammar(f"it is {len(text)} characters long; at most {most} are allowed")


def tokens(text: str) -> list[str]:
    """Return the tokens in a grammar that has passed `check`."""
    reader = _Reader(text)
    reader.rules()
    return reader.tokens


class _Reader:
    """A parser of rules without recursion, so that nesting cannot overflow the stack."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._groups = 0
        self.tokens: list[str] = []

    def rules(self) -> dict[str, _Group]:
        """Return every rule by its name, and every group by a name that no rule can have."""
        found: dict[str, _Group] = {}
        self._skip(BLANK_LINES)
        while self._position < len(self._text):
            rule = RULE.match(self._text, self._position)
            if rule is None:
                if not found and self._text.startswith("{", self._position):
                    raise WrongGrammar(
                        "it is JSON, not GBNF ('root ::= …'); send a schema in 'json_schema'"
                    )
                raise self._error("expected a rule, 'name ::= …'")
            self._position = rule.end()
            for group in self._body(rule["name"]):
                found[group.name] = group
            end = _LINE_END.match(self._text, self._position)
            if end is None:
                raise self._error("expected another item or the end of the rule")
            self._position = end.end()
            self._skip(BLANK_LINES)
        return found

    def _body(self, name: str) -> Iterator[_Group]:
        """Yield the groups in a rule, then the rule itself."""
        open_groups = [_Group(name)]
        while (match := ITEM.match(self._text, self._position)) is not None:
            kind = match.lastgroup
            group = open_groups[-1]
            if kind == "close":
                if len(open_groups) == 1:
                    raise self._error("this ')' has no matching '('")
                yield open_groups.pop()
                open_groups[-1].alternates[-1].append(_Item(group.name))
            elif kind == "open":
                if len(open_groups) > MAX_NESTING:
                    raise self._error(f"groups are nested more than {MAX_NESTING} levels deep")
                self._groups += 1
                open_groups.append(_Group(f"{name}({self._groups}"))
            elif kind == "or":
                group.alternates.append([])
            elif kind == "repeat":
                self._repeat(group.alternates[-1], match)
            elif match[0] not in ('""', "[]", "[^]"):
                if kind == "token":
                    self.tokens.append(match[0].lstrip("!"))
                name_or_text = (match[0], "") if kind == "name" else (None, match[0])
                group.alternates[-1].append(_Item(name_or_text[0], text=name_or_text[1]))
            else:
                # An empty item, which cannot be repeated.
                group.alternates[-1].append(_NOTHING)
            self._position = match.end()
            self._skip(BLANK_LINES if len(open_groups) > 1 or kind == "or" else _BLANK)
        if len(open_groups) > 1:
            raise self._error("expected ')' or another item")
        yield open_groups[0]

    def _repeat(self, alternate: list[_Item], match: re.Match[str]) -> None:
        if not alternate or alternate[-1] is _NOTHING:
            raise self._error(f"there is no item before '{shortened(match[0])}' to repeat")
        least, most = {"*": (0, 1), "+": (1, 2), "?": (0, 1)}.get(match[0], (0, 0))
        if match["min"] is not None:
            least = int(match["min"][:9])
            most = int((match["max"] or "1")[:9]) if match["range"] else least
            if match["max"] is not None and most < least:
                raise self._error(
                    f"the maximum of '{shortened(match[0])}' is less than its minimum"
                )
        # Some versions of llama.cpp ignore a maximum above this limit, and others the grammar.
        if max(least, most) > MAX_REPETITION:
            raise self._error(
                f"at most {MAX_REPETITION} repetitions are allowed, or any number: {{{least},}}"
                if least <= MAX_REPETITION
                else f"at most {MAX_REPETITION} repetitions are allowed"
            )
        item = alternate.pop()
        endless = match[0] in "*+" or (match["range"] and not match["max"])
        if endless and item.optional:
            raise self._error("an item that can be empty needs a maximum of repetitions")
        times = item.times * max(least, 1 if endless else most, 1)
        if times > MAX_REPETITION:
            raise self._error(f"at most {MAX_REPETITION} repetitions are allowed")
        optional = item.optional or least == 0
        endless = item.endless or bool(endless)
        alternate.append(_Item(item.rule, optional, times, endless, item.text, item.least * least))

    def _skip(self, blank: re.Pattern[str]) -> None:
        match = blank.match(self._text, self._position)
        if match is not None:
            self._position = match.end()

    def _error(self, reason: str) -> WrongGrammar:
        before = self._text[: self._position]
        line = before.count("\n") + 1
        column = len(before) - before.rfind("\n")
        rest = self._text[self._position : self._position + 20].split("\n")[0]
        return WrongGrammar(f"line {line}, column {column}, at '{rest}': {reason}")


_NOTHING = _Item(None, optional=True, times=0)


def _items(group: _Group) -> Iterator[_Item]:
    for alternate in group.alternates:
        yield from alternate


def parts_of(text: str) -> dict[str, list[list[GrammarPart]]]:
    """Return the alternates of every rule and group, those of a group by a name with `(`.

    Raises:
        WrongGrammar: the grammar is malformed.
    """
    return _parts(_Reader(text).rules())


def _parts(rules: dict[str, _Group]) -> dict[str, list[list[GrammarPart]]]:
    return {
        name: [
            [
                GrammarPart(item.rule, item.text, item.least, None if item.endless else item.times)
                for item in alternate
                if item is not _NOTHING
            ]
            for alternate in group.alternates
        ]
        for name, group in rules.items()
    }


@dataclass(slots=True)
class _Waiting:
    """An alternate of a rule that is nullable once `missing` more of its items are."""

    name: str
    missing: int


def _nullable(rules: dict[str, _Group]) -> set[str]:
    """Return the nullable rules, in time linear in the number of items."""
    found: set[str] = set()
    ready: list[str] = []
    waiting: defaultdict[str, list[_Waiting]] = defaultdict(list)
    for name, group in rules.items():
        for alternate in group.alternates:
            needed = [item.rule for item in alternate if not item.optional]
            if not needed:
                ready.append(name)
            elif None not in needed:
                one = _Waiting(name, len(needed))
                for rule in needed:
                    waiting[str(rule)].append(one)
    while ready:
        name = ready.pop()
        if name in found:
            continue
        found.add(name)
        for one in waiting.pop(name, ()):
            one.missing -= 1
            if not one.missing:
                ready.append(one.name)
    return found


def _check_left_recursion(rules: dict[str, _Group]) -> None:
    """Reject left recursion, and too many paths through the beginnings of rules."""
    nullable = _nullable(rules)
    begins = {name: list(_begins(group, nullable)) for name, group in rules.items()}
    paths: dict[str, int] = {}
    for name in rules:
        if name in paths:
            continue
        # Each item is visited once, since the iterators keep their positions.
        open_rules, ahead = [(name, iter(begins[name]))], {name}
        while open_rules:
            current, rest = open_rules[-1]
            follow = next((item.rule for item in rest if item.rule not in paths), None)
            if follow is None:
                reached = sum(item.times * paths[item.rule or ""] for item in begins[current])
                paths[current] = min(1 + reached, MAX_PATHS + 1)
                ahead.discard(current)
                open_rules.pop()
            elif follow in ahead:
                shown = rules[current].shown
                raise WrongGrammar(f"rule '{shown}' is left-recursive; use right recursion instead")
            else:
                open_rules.append((follow, iter(begins[follow])))
                ahead.add(follow)
    if sum(paths.values()) > MAX_PATHS:
        raise WrongGrammar("too many paths lead from its rules to their first items")


def _check_open_recursion(rules: dict[str, _Group]) -> None:
    """Reject a rule that contains itself with only optional parts after it.

    Each recursion adds another optional part to the open ones: `a ::= "x" a "y"?`.
    """
    nullable = _nullable(rules)
    follow: dict[str, dict[str, bool]] = {name: {} for name in rules}
    for name, group in rules.items():
        for rule, more in _ends(group, nullable):
            follow[name][rule] = follow[name].get(rule, False) or more
    circle = _circles(follow)
    for name, group in rules.items():
        if any(more and circle[rule] == circle[name] for rule, more in follow[name].items()):
            raise WrongGrammar(
                f"rule '{group.shown}' contains itself, followed only by optional items; end it "
                "with itself, or add a required item after it"
            )


def _circles(follow: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return the number of each rule's strongly connected component (Kosaraju)."""
    order: list[str] = []
    before: defaultdict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for start in follow:
        open_rules = [(start, iter(follow[start]))] if start not in seen else []
        seen.add(start)
        while open_rules:
            name, rest = open_rules[-1]
            rule = next((one for one in rest if one not in seen), None)
            if rule is None:
                order.append(name)
                open_rules.pop()
            else:
                seen.add(rule)
                open_rules.append((rule, iter(follow[rule])))
    for name, ahead in follow.items():
        for rule in ahead:
            before[rule].append(name)
    found: dict[str, int] = {}
    for number, start in enumerate(reversed(order)):
        todo = [] if start in found else [start]
        while todo:
            name = todo.pop()
            if name not in found:
                found[name] = number
                todo += before[name]
    return found


def _ends(group: _Group, nullable: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield the rules with only optional parts after them, with True if there are such parts."""
    for alternate in group.alternates:
        more = False
        for item in reversed(alternate):
            if item.rule is not None:
                again = item.endless or item.times > item.least
                yield item.rule, more or (again and (item.endless or item.times > 1))
            if not (item.optional or item.rule in nullable):
                break
            more = more or item is not _NOTHING


def _begins(group: _Group, nullable: set[str]) -> Iterator[_Item]:
    """Yield the items with rules with which an alternate may begin."""
    for alternate in group.alternates:
        for item in alternate:
            if item.rule is not None:
                yield item
            if not (item.optional or item.rule in nullable):
                break
