"""Tests of free text before a grammar."""

from __future__ import annotations

import random

import pytest
from latimer.backends.base import Grammar, Preamble
from latimer.backends.grammar import as_gbnf, gbnf
from latimer.backends.grammar.preamble import renamed, until
from support.samples import sample
from support.walks import Walker

MARKERS = ("</think>", "ab", "aab", "abab", "[/]", "é🔥é", "--^]")
ANSWER = Grammar("regex", "[xyz]{2}", "regex")


def accepts(rules: dict[str, str], text: str, marker: str) -> bool:
    """Return True if the rules of `until` accept a text with `!` after the marker."""
    state = "s"
    names = list(rules)
    for position, character in enumerate(text):
        follow = None
        for part in rules[state].split(" | "):
            head, _, rest = part.partition(" ")
            if head.startswith("[^"):
                inside = head[2:-1].replace("\\", "")
                follow = follow or (rest if character not in inside else None)
            elif head == f'"{character}"' or (not head.isascii() and character in head):
                follow = rest
        if follow == '"!"':
            return text[position + 1 :] == "!"
        assert follow in names, (text, marker)
        state = follow
    return False


@pytest.mark.parametrize("marker", ["ab", "aab", "abab", "aabaaa"])
def test_the_first_marker_ends_the_text(marker: str) -> None:
    """The first marker ends the free text, also after partial markers."""
    rules = until(marker, "s", '"!"')
    generator = random.Random(1)
    for _ in range(sample(500, 2_000)):
        text = "".join(generator.choices("abc", k=generator.randint(0, 14))) + marker + "!"
        first = text.index(marker) + len(marker)
        assert accepts(rules, text, marker) == (text[first:] == "!")


@pytest.mark.parametrize("marker", MARKERS)
def test_walks_end_with_their_first_marker(walker: Walker, marker: str) -> None:
    """In llama.cpp's walks through the rules, the first marker ends the free text."""
    rules = until(marker, "root", '"!"')
    text = "\n".join(f"{name} ::= {rule}" for name, rule in rules.items())
    gbnf.check(text)
    texts = walker.texts(text, sample(12, 30), most=400, toward=marker)
    assert texts
    for found in texts:
        assert found.index(marker) == len(found) - len(marker) - 1


def test_text_that_may_end_without_a_marker(walker: Walker) -> None:
    """Free text that ends without a marker contains none."""
    rules = until("ab", "root", '"!"', may_end=True)
    text = "\n".join(f"{name} ::= {rule}" for name, rule in rules.items())
    found = walker.texts(text, sample(30, 60), most=60, toward="ab")
    assert any(one.endswith("ab!") for one in found)
    assert any("ab" not in one for one in found)
    assert all("ab" not in one or one.index("ab") == len(one) - 3 for one in found)


def test_an_answer_behind_a_thought(walker: Walker) -> None:
    """The answer follows its grammar, with or without reasoning before it."""
    maybe = as_gbnf(ANSWER._replace(after=Preamble("<t>", "</t>", False)))
    answers = walker.texts(maybe, sample(30, 80), most=200, toward="</t>")
    assert any("</t>" in one for one in answers)
    for one in answers:
        answer = one.rpartition("</t>")[2].strip()
        assert set(answer) <= set("xyz")
        assert len(answer) == 2
    begun = as_gbnf(ANSWER._replace(after=Preamble("<t>", "b", True)))
    thoughts = walker.texts(begun, sample(20, 40), most=200, toward="b")
    assert thoughts
    assert all("b" in one for one in thoughts)


def test_tags_that_are_tokens_are_named() -> None:
    """Only the token itself ends the reasoning when the end tag is a control token."""
    special = frozenset({"</think>"})
    text = as_gbnf(ANSWER._replace(after=Preamble("<think>", "</think>", True, special)))
    assert gbnf.check(text) == ["</think>", "</think>"]


def test_rules_are_renamed_and_nothing_else() -> None:
    """Renaming a rule leaves literals, sets, comments and longer names unchanged."""
    text = 'root ::= "root" [root] root-2 # root\nroot-2 ::= root? <root>'
    assert renamed(text, "root", "x") == ('x ::= "root" [root] root-2 # root\nroot-2 ::= x? <root>')
