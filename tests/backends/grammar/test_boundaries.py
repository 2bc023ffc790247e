"""Tests of tokens in GBNF that llama.cpp would look for inside other tokens."""

from __future__ import annotations

import pytest
from latimer.backends.base import Grammar, Preamble
from latimer.backends.grammar import gbnf_of
from latimer.backends.grammar.gbnf import WrongGrammar


def piece(token: str) -> str:
    """Return the text of a token in a vocabulary of which token 7 is known."""
    return "apple" if token == "<[7]>" else token


@pytest.mark.parametrize(
    ("grammar", "token"),
    [
        ('root ::= "a" !<x>', "!<x>"),
        ('root ::= "a" !<x>*', "!<x>"),
        ('root ::= [a-z]+ !<[5]>* "x"', "!<[5]>"),
        ('root ::= "ab"? !<x>', "!<x>"),
        ('root ::= "a" " "? !<x>', "!<x>"),
        ('root ::= "a"? b !<x>\nb ::= "b" | ""', "!<x>"),
        ('root ::= ("a" | "") !<x>', "!<x>"),
        ('root ::= (!<x> "a")*', "!<x>"),
        ('root ::= a* b\na ::= "b"\nb ::= !<x>', "!<x>"),
        ('root ::= "<" </think>', "</think>"),
        ('root ::= "x</th" </think>', "</think>"),
        ("root ::= [<] [/x] </think>", "</think>"),
        ("root ::= [^\\n]{3} </think>", "</think>"),
        ("root ::= [^\\n] [^k\\n]* </think>", "</think>"),
        ('root ::= "<"? "/" </think>', "</think>"),
        ('root ::= a </x>\na ::= "b" | "c<"', "</x>"),
        ('root ::= "a" <[7]>', "<[7]>"),
        ('root ::= "x" "ap" <[7]>', "<[7]>"),
    ],
)
def test_a_token_after_a_part_of_a_token_is_refused(grammar: str, token: str) -> None:
    """A grammar with which llama.cpp would end the process is an error that names the token."""
    with pytest.raises(WrongGrammar, match="characters that end inside a token") as error:
        gbnf_of(Grammar("gbnf", grammar, ""), piece)
    assert f"'{token}'" in str(error.value)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= <think> !</think>* </think> .*",
        'root ::= <[1]> <[2]> !<[3]> "a" <[1]>',
        'root ::= "" !<x> | "b"',
        'root ::= "a"? !<x>',
        "root ::= </think> [ \\n]{0,4} a\na ::= !<x>* (<x> .*)?",
        "root ::= [ ]* [\\n]* !<x>",
        'root ::= !<x>* b\nb ::= "b" | c\nc ::= "d" b',
        'root ::= (!<x> "a" <y>)*',
        'root ::= [^<]* </think> "a"',
        "root ::= [^\\n]* </think>",
        "root ::= [^k\\n]* </think>",
        'root ::= "<b>" .* </think>',
        'root ::= "</x" </think>',
        "root ::= [<] [x] </think>",
        'root ::= "pe" <[7]>',
    ],
)
def test_a_token_after_whole_tokens_is_allowed(grammar: str) -> None:
    """A grammar is accepted if no token of it can follow a part of a token that it matches."""
    assert gbnf_of(Grammar("gbnf", grammar, ""), piece)


def test_reasoning_between_texts_ends_with_a_text() -> None:
    """After reasoning that begins with text, its end is text, too."""
    special = frozenset({"</think>"})
    for is_open, has_token in ((False, False), (True, True)):
        after = Preamble("<think>", "</think>", is_open, special)
        found = gbnf_of(Grammar("json_schema", "{}", "", after))
        assert ("!</think>*" in found) == has_token


def test_few_tokens_can_follow_characters() -> None:
    """A grammar can have thousands of tokens, but only a few after characters."""
    text = "root ::= " + " ".join(f"<[{number}]>" for number in range(4_000))
    assert gbnf_of(Grammar("gbnf", text, ""))
    pairs = "root ::= " + " ".join(f'"a" <[{number}]>' for number in range(400))
    with pytest.raises(WrongGrammar, match="too many tokens"):
        gbnf_of(Grammar("gbnf", pairs, ""))


def test_the_adapters_own_grammars_are_not_followed() -> None:
    """A large grammar of strict tools is not refused because it takes many steps to follow."""
    calls = "".join(f't{number} ::= "a" {"key " * 400} </x{number % 5}>\n' for number in range(200))
    names = " | ".join(f"t{number}" for number in range(200))
    text = f'root ::= <x> ({names})\n{calls}key ::= "," [0-9]+\n'
    assert gbnf_of(Grammar("gbnf", text, "", is_own=True))
