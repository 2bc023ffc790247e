"""Grammars that keep too many ways open are refused before an engine follows them."""

from __future__ import annotations

import random
import time

import llama_cpp
import pytest
from latimer.backends.ambiguity import LAST, terminals
from latimer.backends.gbnf import WrongGrammar, check
from latimer.backends.llama_cpp.library import LoadedModel

DOUBLED = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(10))
TOO_MANY = {
    "rules that may be nothing, doubled": DOUBLED + 'r10 ::= "a"?',
    "much that may be missing": "root ::= " + '"a"? ' * 300,
    "the same behind a long text": f'root ::= "{"x" * 1_000}" b\nb ::= ' + '"a"? ' * 300,
    "the same in a set": "root ::= " + "[a-m]? [g-z]? " * 150,
    "the same outside a set": "root ::= " + "[^a]? [^b]? " * 150,
    "alternatives that begin alike, nested": (
        'root ::= e\ne ::= t "+" e | t "-" e | t\nt ::= "(" e ")" | [0-9]+'
    ),
}
FEW = {
    "alternatives that are told apart": ('root ::= e\ne ::= t ([+-] e)?\nt ::= "(" e ")" | [0-9]+'),
    "some that may be missing": "root ::= " + '"a"? ' * 50,
    "a long list": "root ::= " + " | ".join(f'"value-{i:04d}"' for i in range(1_000)),
    "a chain of optional parts": "root ::= " + '"a" ("a" ' * 60 + '"a"' + ")?" * 60,
    "repetitions of repetitions": 'root ::= (([a-z]{1,9} " "){1,50} "\\n"){1,20}',
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_ways_are_refused_at_once(name: str) -> None:
    """A grammar whose ways multiply is found out in a moment, wherever they do."""
    start = time.thread_time()
    with pytest.raises(WrongGrammar, match="too many ways at once"):
        check(TOO_MANY[name])
    assert time.thread_time() - start < 1


@pytest.mark.parametrize("name", FEW)
def test_few_ways_pass(name: str, demo_loaded: LoadedModel) -> None:
    """What an engine can follow is let through, and is followed quickly."""
    check(FEW[name])
    assert slowest(demo_loaded, FEW[name], 20) < 0.25


def slowest(model: LoadedModel, grammar: str, steps: int) -> float:
    """Seconds that llama.cpp takes for its slowest character on a random way."""
    pointer = llama_cpp.llama_sampler_init_grammar(model.vocab, grammar.encode(), b"root")
    assert pointer
    numbers, found = random.Random(0), 0.0
    letters = list(range(llama_cpp.llama_vocab_n_tokens(model.vocab)))
    try:
        for _ in range(steps):
            numbers.shuffle(letters)
            allowed = next((one for one in letters if _allows(pointer, one)), None)
            if allowed is None or llama_cpp.llama_vocab_is_eog(model.vocab, allowed):
                break
            start = time.thread_time()
            llama_cpp.llama_sampler_accept(pointer, allowed)
            found = max(found, time.thread_time() - start)
    finally:
        llama_cpp.llama_sampler_free(pointer)
    return found


def _allows(pointer: object, token: int) -> bool:
    data = (llama_cpp.llama_token_data * 1)(llama_cpp.llama_token_data(token, 0.0, 0.0))
    array = llama_cpp.llama_token_data_array(data, 1, -1, False)
    llama_cpp.llama_sampler_apply(pointer, array)
    return bool(data[0].logit == 0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"ab"', [((97, 97),), ((98, 98),)]),
        (r'"\n\x41\u00e9\""', [((10, 10),), ((65, 65),), ((233, 233),), ((34, 34),)]),
        ("[a-cx]", [((97, 99), (120, 120))]),
        ("[^b-c]", [((0, 97), (100, LAST))]),
        (r"[a\-b-]", [((45, 45), (45, 45), (97, 97), (98, 98))]),
        (".", [((0, LAST),)]),
    ],
)
def test_terminals_are_read_as_llama_cpp_reads_them(text: str, expected: object) -> None:
    """Escapes, ranges and sets that are turned round allow what they say."""
    assert list(terminals(text)) == expected
