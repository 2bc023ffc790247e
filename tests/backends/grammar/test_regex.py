"""Tests of regular expressions as GBNF."""

from __future__ import annotations

import re

import pytest
from latimer.backends.grammar import gbnf
from latimer.backends.grammar.gbnf import UnsupportedSchema
from latimer.backends.grammar.regex import to_gbnf
from support.walks import Walker


@pytest.mark.parametrize(
    "pattern",
    [
        r"[0-9]{3}-\w+",
        r"(a|b)*c?",
        r"\s?x.y\S",
        r"[^a-z\d]{2}",
        r"é+|ß{2,4}|(?:漢|字)",
        r"a{2,}?",
        r"\$\d+(\.\d\d)?",
        r"^abc$|^d",
        r"\W\D\[\]\"\\-",
        r"\u0041[\u0042-\u0044]\n",
        "",
    ],
)
def test_whatever_comes_matches(walker: Walker, pattern: str) -> None:
    """Every random text of the grammar matches the regular expression completely."""
    grammar = to_gbnf(pattern)
    assert gbnf.check(grammar) == []
    texts = walker.texts(grammar, 40)
    assert texts
    for text in texts:
        assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.parametrize("space", "\x1c\x85\xa0\u1680\u2003\u2028\u202f\u205f\u3000\ufeff")
def test_rare_spaces_are_no_other_characters(walker: Walker, space: str) -> None:
    """A space of any dialect matches no class without spaces, and a class of everything."""
    for pattern in (r"\S", r"[^\s]", r"[^\s\d]", r"[\S-]", r"[^\S]"):
        assert not walker.accepts(to_gbnf(pattern), space), pattern
    for pattern in (r"[\s\S]", r"[^a]", r"\W"):
        assert walker.accepts(to_gbnf(pattern), space), pattern


@pytest.mark.parametrize("end", "\r\n\u2028\u2029")
def test_a_point_matches_no_end_of_a_line(walker: Walker, end: str) -> None:
    """A point matches no character that ends a line in ECMAScript."""
    assert not walker.accepts(to_gbnf("."), end)
    assert walker.accepts(to_gbnf("[^.]"), end)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(", "is not a valid regular expression"),
        ("(?=a)b", "lookaround"),
        (r"(a)\1", "backreference"),
        (r"a\bc", "inner anchor"),
        ("a^b", "inner anchor"),
        ("a++", "possessive quantifier"),
        ("(?>a)", "atomic group"),
        ("(?i:a)", "inline flags"),
        ("(?i)a", "inline flags"),
        ("(?s)a.b", "inline flags"),
        ("a{3000}", "at most 2000 repetitions"),
        ("[" * 3, "is not a valid regular expression"),
    ],
)
def test_what_has_no_grammar_is_refused(pattern: str, words: str) -> None:
    """The converter rejects a regular expression that GBNF cannot express."""
    with pytest.raises(UnsupportedSchema, match=words):
        to_gbnf(pattern)
