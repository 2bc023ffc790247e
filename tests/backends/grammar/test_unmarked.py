"""Tests of grammars whose texts must not contain a mark."""

from __future__ import annotations

import re
from itertools import product

import pytest
from latimer.backends.base import Grammar
from latimer.backends.grammar import gbnf
from latimer.backends.grammar.gbnf import UnsupportedSchema
from latimer.backends.grammar.lark import embedded
from latimer.backends.grammar.regex import PLAIN
from latimer.backends.grammar.unmarked import unmarked
from support.walks import Walker


def rules_of(pattern: str, mark: str) -> dict[str, str]:
    """Return the rules for the texts of a regular expression without a mark."""
    return unmarked(embedded(Grammar("regex", pattern, ""), "root", "i", PLAIN), "root", mark)


@pytest.mark.parametrize(
    "pattern",
    ["[<a>]*", "[<a>b]+", "(<|a|>)*", "([<a>]*b)+", "([^b]+b|a>)?", "a(<|[a>])*", "<b?", "()"],
)
@pytest.mark.parametrize("mark", ["<a>", "<<a"])
def test_only_the_mark_is_excluded(walker: Walker, pattern: str, mark: str) -> None:
    """The rules allow exactly the texts of the grammar that do not contain the mark."""
    rules = rules_of(pattern, mark)
    text = "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())
    gbnf.check(text)
    for letters in (letters for size in range(5) for letters in product("<a>b", repeat=size)):
        one = "".join(letters)
        allowed = re.fullmatch(pattern, one) is not None and mark not in one
        assert walker.accepts(text, one) == allowed, one


@pytest.mark.parametrize(
    "pattern", ["x<a>", "[<a>]{0,4}", "[<a>]*>", "<[ab]+>", "<(a)>|b", "(<a)?>", "[<a>]{2,}"]
)
def test_a_mark_that_other_parts_form_is_an_error(pattern: str) -> None:
    """A grammar is rejected if the mark is not inside one repetition of a set."""
    with pytest.raises(UnsupportedSchema, match="can contain '<a>'"):
        rules_of(pattern, "<a>")


def test_the_work_is_limited() -> None:
    """A grammar whose rules would be followed again and again is rejected in time."""
    names = " ".join(f"r{number}" for number in range(500))
    rules = {f"r{number}": f'"{"<a>"[number % 3]}" r{number + 1}' for number in range(500)}
    with pytest.raises(UnsupportedSchema, match="too large"):
        unmarked({"root": names, **rules, "r500": '"b"'}, "root", "<a>")


def test_grammars_without_the_mark_stay_as_they_are() -> None:
    """Rules that cannot form the mark are not changed."""
    for pattern in ("[a-z]*", "<b>|<[b-z]>", "(<a\n)*", "<a"):
        rules = embedded(Grammar("regex", pattern, ""), "root", "i", PLAIN)
        assert unmarked(rules, "root", "<a>") is rules
