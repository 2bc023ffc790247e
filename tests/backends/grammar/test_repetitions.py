"""Tests of repetitions that every version of llama.cpp's parser accepts."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latimer.backends.base import Grammar, GrammarKind
from latimer.backends.grammar import gbnf, gbnf_of
from latimer.backends.grammar.gbnf import WrongGrammar
from latimer.backends.grammar.repetitions import MOST_RULES, accepted

_WORD = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|(?P<name>[a-z0-9-]+)|(?P<open>\()'
    r"|(?P<close>\))|(?P<or>\|)|(?P<times>[*+?]|\{(?P<min>\d+)(?P<range>,(?P<max>\d+)?)?\})"
)


def largest(grammar: str) -> int:
    """Return the largest number of rules of a repetition, as `handle_repetitions` counts them."""
    known: set[str] = set()
    found = made = 0
    for rule in grammar.strip().split("\n"):
        name, body = rule.split(" ::= ")
        known.add(name)
        opened: list[int] = []
        before = 1
        for word in _WORD.finditer(body):
            kind = word.lastgroup
            if word["times"] is not None:
                least, most = {"*": (0, 0), "+": (1, 0), "?": (0, 1)}.get(word[0], (0, 0))
                if word["min"]:
                    least = int(word["min"])
                    most = int(word["max"] or 0) if word["range"] else least
                before *= most or least or 1
                found = max(found, before)
                made += most - least if most else 1
            elif kind == "open":
                opened.append(len(known) + made)
                made += 1
            elif kind == "close":
                before = len(known) + made - opened.pop()
            elif kind != "or":
                before = 1
                known |= {word[0]} if kind == "name" else set()
    return found


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a"{3,1999} # as it is\n',
        'root ::= ("a"{1,40} "-"){1,49}',
        'root ::= r{1,1999}\nr ::= "a"{1,1999}',
        'root ::= "a"* [b]+ ("c" | "d")?',
    ],
)
def test_what_the_parser_accepts_stays(grammar: str) -> None:
    """A grammar with few rules for each repetition is sent as it was written."""
    assert accepted(grammar) == grammar


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= "a"{2000}', 'root ::= R1\nR1 ::= "a" "a"{1999,1999}'),
        ('root ::= [a]{3,2000} "b"', 'root ::= R1 "b"\nR1 ::= [a] [a]{2,1999}'),
        ("root ::= r{0,2000}\nr ::= [x]", 'root ::= R1\nr ::= [x]\nR1 ::= r r{0,1999} | ""'),
        ('root ::= "a"{2000,}', 'root ::= R1\nR1 ::= "a" "a"{1999,}'),
        ('root ::= ("a"{1,40}){1,50}', 'root ::= R1{1,50}\nR1 ::= ("a"{1,40})'),
        ('root ::= "a"{1,40}{1,50}', 'root ::= R1{1,50}\nR1 ::= "a"{1,40}'),
        (
            'root ::= (("a"{0,50} "b"){0,50} | [c]){0,2000}',
            'root ::= R3\nR1 ::= ("a"{0,50} "b")\nR2 ::= (R1{0,50} | [c])\n'
            'R3 ::= R2 R2{0,1999} | ""',
        ),
        ('root ::= "repeated-"{2000}', 'root ::= S1\nS1 ::= "repeated-" "repeated-"{1999,1999}'),
    ],
)
def test_repetitions_are_divided(grammar: str, expected: str) -> None:
    """A group with many rules gets a rule of its own, and the first of 2,000 times is split off."""
    expected = expected.replace("R", "repeated-").replace("S", "repeated--")
    assert accepted(grammar) == f"{expected}\n"


def _repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    times = st.sampled_from(["", "*", "+", "?", "{7}", "{40}", "{2,}", "{0,60}", "{5,200}"])
    item = st.builds("{}{}".format, st.sampled_from(['"a"', "[b-d]", "more"]), times)
    group = st.builds("({}){}".format, inner, times)
    return st.lists(item | group, min_size=1, max_size=3).map(" ".join)


@settings(max_examples=25)
@given(st.recursive(st.just('"x"'), _repeated, max_leaves=8))
def test_no_repetition_makes_many_rules(body: str) -> None:
    """In each grammar that the check allows, ambiguous or not, a repetition makes fewer than 2,000
    rules."""
    grammar = f'root ::= {body}\nmore ::= "m"{{1,9}} "n"'
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Ambiguous ones take long to check, and are divided as others are.
            patch.setattr(gbnf, "check_ways", lambda _: None)
            gbnf.check(grammar)
    except WrongGrammar:
        return
    assert largest(accepted(grammar)) <= MOST_RULES


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", {"type": "string", "maxLength": 2000}),
        ("json_schema", {"type": "string", "minLength": 2000, "maxLength": 2000}),
        ("json_schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 2000}),
        ("json_schema", {"type": "array", "items": {"type": "string"}, "minItems": 2000}),
        ("regex", "([A-Z]{2,50}-){1,100}"),
        ("regex", "([a-z]{2,40} ){1,49}"),
        ("gbnf", 'root ::= ([a-z]{1,50} "-"){1,100}'),
    ],
)
def test_schemas_and_expressions_are_accepted(kind: GrammarKind, text: object) -> None:
    """The grammars of schemas and expressions with large numbers are accepted, too."""
    source = text if isinstance(text, str) else json.dumps(text)
    assert largest(gbnf_of(Grammar(kind, source, "grammar"))) <= MOST_RULES


def _as_expression(grammar: str) -> str:
    """Return a grammar without recursion as a regular expression."""
    rules = dict(rule.split(" ::= ") for rule in grammar.strip().split("\n"))
    text = rules.pop("root")
    while any(name in text for name in rules):
        for name, body in rules.items():
            text = re.sub(rf"{name}\b", f"({body})", text)
    return text.replace(" ", "").replace('"', "")


@pytest.mark.parametrize(
    "grammar", ['root ::= "a"{2000}', 'root ::= "a"{3,2000}', "root ::= [a]{0,2000}"]
)
def test_the_same_texts_match(grammar: str) -> None:
    """A grammar that is written again matches the same texts."""
    before, after = map(re.compile, map(_as_expression, (grammar, accepted(grammar))))
    for size in (0, 1, 2, 3, 1999, 2000, 2001):
        text = "a" * size
        assert bool(before.fullmatch(text)) is bool(after.fullmatch(text)), size
