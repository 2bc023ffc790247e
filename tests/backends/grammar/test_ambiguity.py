"""Tests that grammars with too many parallel parses are rejected before an engine runs them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import gguf
import llama_cpp
import numpy as np
import pytest
from latimer.backends.grammar.ambiguity import LAST, terminals
from latimer.backends.grammar.gbnf import WrongGrammar, check
from latimer.backends.llama_cpp.grammars import Candidates
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from support import gguf_files
from support.marks import MODELS
from support.samples import sample

DOUBLED = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(10))
TOO_MANY = {
    "the same twice": 'root ::= ("a" | "a")*',
    "what may be missing, nested": 'root ::= a\na ::= "x" a "y"? | "z"',
    "rules doubled behind fifty others": "root ::= "
    + " | ".join(f'"{chr(0x4E00 + i)}"' for i in range(200))
    + " | r0\n"
    + DOUBLED.split("\n", 1)[1]
    + 'r10 ::= "a"?',
    "words without an end": "root ::= w+\nw ::= [a-z]+",
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
    "a rule that is only a group, repeated": 'root ::= r{1,5}\nr ::= ("a"{1,4} "-")',
    "some that may be missing": "root ::= " + '"a"? ' * 5,
    "a long list": "root ::= " + " | ".join(f'"value-{i:04d}"' for i in range(1_000)),
    "a chain of optional parts": "root ::= " + '"a" ("a" ' * 60 + '"a"' + ")?" * 60,
    "repetitions of repetitions": 'root ::= (([a-z]{1,9} " "){1,50} "\\n"){1,20}',
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_ways_are_refused_at_once(name: str) -> None:
    """The check rejects a grammar whose parses multiply, within a second."""
    start = time.thread_time()
    with pytest.raises(WrongGrammar, match=r"too ambiguous|contains itself"):
        check(TOO_MANY[name])
    assert time.thread_time() - start < 1


@pytest.fixture(scope="module")
def long_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocabulary]:
    """A vocabulary with runs of one and two letters, as large vocabularies have runs of spaces."""
    source = MODELS / "spm.gguf"
    fields = gguf.GGUFReader(source).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    words = [place for place, text in enumerate(tokens) if kinds[place] == 1 and len(text) > 3]
    runs = ["a" * size for size in (2, 3, 4, 8, 16, 24)] + ["ab" * size for size in (2, 4, 8, 12)]
    for place, run in zip(words, runs, strict=False):
        tokens[place] = run
    path = tmp_path_factory.mktemp("runs") / "runs.gguf"
    gguf_files.copy(source, path, changes={"tokenizer.ggml.tokens": tokens})
    model = LoadedModel(path, Options(gpu_layers=0))
    yield Vocabulary(model)
    model.close()


@pytest.mark.parametrize("name", FEW)
def test_few_ways_pass(name: str, long_tokens: Vocabulary) -> None:
    """A grammar with few parallel parses passes the check, and llama.cpp samples it quickly."""
    check(FEW[name])
    assert slowest(long_tokens, FEW[name], random.Random(0)) < 0.5


@pytest.mark.slow
def test_what_passes_is_followed_quickly(long_tokens: Vocabulary) -> None:
    """Every random grammar that passes is fast in llama.cpp, and more than a third pass."""
    numbers = random.Random(3)
    passed = 0
    for _ in range(sample(120, 300)):
        rules = [f"r{i} ::= {expression(numbers, 3)}\n" for i in range(3)]
        text = f"root ::= {expression(numbers, 4)} {expression(numbers, 4)}\n{''.join(rules)}"
        try:
            check(text)
        except WrongGrammar:
            continue
        passed += 1
        assert slowest(long_tokens, text, numbers) < 2, text
    assert passed > sample(40, 100)


def expression(numbers: random.Random, depth: int) -> str:
    """Return a random part of a grammar over two letters."""
    kind = numbers.random()
    if depth == 0 or kind < 0.3:
        return numbers.choice(['"a"', '"b"', "[ab]", '"ab"', "[^b]", "."])
    parts = [expression(numbers, depth - 1) for _ in range(numbers.randint(2, 4))]
    if kind < 0.5:
        return f"({' '.join(parts)})"
    if kind < 0.65:
        return f"({' | '.join(parts)})"
    if kind < 0.95:
        return f"({parts[0]}){numbers.choice(['?', '*', '+', '{0,3}', '{2}', '{0,9}'])}"
    return numbers.choice(["r0", "r1", "r2"])


def slowest(vocabulary: Vocabulary, grammar: str, numbers: random.Random) -> float:
    """Return the seconds of llama.cpp's slowest step on a random path of eight tokens."""
    pointer = llama_cpp.llama_sampler_init_grammar(vocabulary.pointer, grammar.encode(), b"root")
    assert pointer
    candidates, found = Candidates(vocabulary.size), 0.0
    try:
        for _ in range(8):
            start = time.thread_time()
            candidates.fill(0.0)
            candidates.apply(pointer)
            allowed = np.flatnonzero(candidates.entries["logit"] == 0.0).tolist()
            some = numbers.sample(allowed, min(4, len(allowed)))
            token = max(some, key=lambda one: len(vocabulary.pieces[one]), default=-1)
            if token < 0 or token in vocabulary.ends:
                break
            llama_cpp.llama_sampler_accept(pointer, token)
            found = max(found, time.thread_time() - start)
    finally:
        llama_cpp.llama_sampler_free(pointer)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"ab"', [((97, 97),), ((98, 98),)]),
        (r'"\n\x41\u00e9\""', [((10, 10),), ((65, 65),), ((233, 233),), ((34, 34),)]),
        ("[a-cx]", [((97, 99), (120, 120))]),
        ("[^b-c]", [((0, 97), (100, LAST))]),
        (r"[a\-b-]", [((45, 45), (97, 98))]),
        (".", [((0, LAST),)]),
    ],
)
def test_terminals_are_read_as_llama_cpp_reads_them(text: str, expected: object) -> None:
    """Escapes, ranges and negated sets give the characters that llama.cpp reads."""
    assert list(terminals(text)) == expected
