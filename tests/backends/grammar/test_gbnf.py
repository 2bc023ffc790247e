"""Tests of the GBNF check that runs before an engine reads a grammar."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable

import llama_cpp
import pytest
from latimer.backends.grammar.gbnf import MAX_NESTING, WrongGrammar, check
from latimer.backends.llama_cpp.library import LoadedModel

JSON = r"""
# a JSON value
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""

PIECES = [
    "root", "a", "b", " ::= ", "::=", '"x"', '"\\n"', "[a-z]", '[^"\\\\]', "(", ")", "|", "*", "+",
    "?", "{2}", "{1,3}", "{0,}", "\n", " ", "#c\n", ".", '""', "<[5]>", "\\", '"', "[", "- ",
    "\t", "\r\n", "[]",
]  # fmt: skip


@pytest.mark.parametrize(
    "grammar",
    [
        JSON,
        'root ::= "a"',
        'root ::= ( "a"\n | "b" # either\n)\n',
        'root ::= "(" root ")" | "x"',
        'root ::= [^\\]\\n-]{2,5} . "\\U0001F600"',
        'root ::= "a" |\n "b"\r\n',
        'root ::= ""',
        "root ::= " + "(" * MAX_NESTING + '"a"' + ")" * MAX_NESTING,
    ],
)
def test_right_grammars_pass(grammar: str) -> None:
    """The check accepts GBNF as llama.cpp documents it."""
    assert check(grammar) == []


def test_named_tokens_are_told() -> None:
    """The check returns the tokens that a grammar names, for the caller to look up."""
    assert check('root ::= <[12]> !<|im_end|>* "<[3]>"') == ["<[12]>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "there is no rule 'root'"),
        ('x ::= "a"', "there is no rule 'root'"),
        ("root ::= x", "there is no rule 'x'"),
        ("root", "line 1, column 1, at 'root': expected a rule"),
        (' {"type": "object"}', "it is JSON, not GBNF ('root ::= …'); send a schema in "),
        ('root ::= "a"\n  | "b"', "line 2, column 3, at '| \"b\"': expected a rule"),
        (
            'root ::= "a',
            "line 1, column 10, at '\"a': expected another item or the end of the rule",
        ),
        ('root ::= "\\q"', "expected another item or the end of the rule"),
        ('root ::= ("a"', "expected ')' or another item"),
        ('root ::= "a")', "this ')' has no matching '('"),
        ("root ::= *", "there is no item before '*' to repeat"),
        ('root ::= ""+', "there is no item before '+' to repeat"),
        ('root ::= "a"{3,2}', "the maximum of '{3,2}' is less than its minimum"),
        ('root ::= "a"{2001}', "at most 2000 repetitions"),
        ('root ::= "a"{3,2001}', "at most 2000 repetitions are allowed, or any number: {3,}"),
        ('root ::= "a"{50}{50}', "at most 2000 repetitions"),
        ('root ::= "a"?*', "an item that can be empty needs a maximum of repetitions"),
        ('root ::= ("a" |)*', "rule 'root' repeats an item that can be empty, without a maximum"),
        ('root ::= root "a"', "rule 'root' is left-recursive"),
        ('root ::= y\ny ::= z x y "q" | "p"\nz ::= x\nx ::= ""', "rule 'y' is left-recursive"),
        ("root ::= " + "(" * 100_000, "at most 65536 are allowed"),
        ("root ::= " + "(" * 65, "groups are nested more than 64 levels deep"),
        ('root ::= "a\0"', "it contains a NUL character"),
        ("root ::= " + '"a"{0,2000} ' * 60, "expand to 120000 items"),
    ],
)
def test_wrong_grammars_are_told_why(grammar: str, reason: str) -> None:
    """The error names the place and the reason in terms of the grammar."""
    with pytest.raises(WrongGrammar) as caught:
        check(grammar)
    assert reason in str(caught.value)


def test_a_grammar_that_would_be_walked_for_years_is_refused_at_once() -> None:
    """The check rejects a chain of rules that each begin with the next in two ways, within a
    second."""
    rules = [f"r{i} ::= r{i + 1} | r{i + 1}" for i in range(60)]
    started = time.perf_counter()
    with pytest.raises(WrongGrammar, match="too many paths"):
        check("\n".join([*rules, 'r60 ::= "x"', "root ::= r0"]))
    assert time.perf_counter() - started < 1


def test_a_large_grammar_is_checked_quickly() -> None:
    """The check of the largest grammar takes less than a second."""
    rules = "".join(f'r{i} ::= "{i}" r{i + 1}\n' for i in range(2_900))
    started = time.thread_time()
    check(rules + 'r2900 ::= "x"\nroot ::= r0\n')
    assert time.thread_time() - started < 1


LINEAR: dict[str, Callable[[int], str]] = {
    "comments": lambda n: "root " + "#" * n,
    "comments in a rule": lambda n: 'root ::= "a" ' + "# " * (n // 2),
    "an open literal": lambda n: 'root ::= "' + "a" * n,
    "an open repetition": lambda n: 'root ::= "a"{' + " " * n,
    "a large set": lambda n: "root ::= [^" + "ab" * (n // 2) + "]",
    "groups": lambda n: "root ::= " + "()" * (n // 2),
    "a chain": lambda n: _chain(n // 16, '"a"'),
    "a chain of nothing": lambda n: _chain(n // 16, '""'),
    "many alternates": lambda n: (
        "root ::= "
        + " | ".join(f"r{i}" for i in range(n // 20))
        + "".join(f'\nr{i} ::= "a"' for i in range(n // 20))
    ),
}


def _chain(count: int, last: str) -> str:
    rules = [f"r{i} ::= r{i + 1}" for i in range(count)]
    return "\n".join(["root ::= r0", *rules, f"r{count} ::= {last}"])


@pytest.mark.parametrize("name", LINEAR)
def test_reading_takes_time_by_the_size(name: str) -> None:
    """The check takes time linear in the size of the grammar."""

    def seconds(size: int) -> float:
        text = LINEAR[name](size)
        start = time.thread_time()
        _problem(text)
        return time.thread_time() - start

    # Otherwise the garbage collector scans the objects of the other tests again and again.
    gc.disable()
    try:
        # Another program may disturb one attempt.
        assert any(seconds(62_000) < 24 * max(seconds(7_750), 0.0005) for _ in range(3))
    finally:
        gc.enable()


def test_it_agrees_with_llama_cpp(
    demo_loaded: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    """llama.cpp reads every grammar that passes the check, and rejects every one that fails."""
    generator = random.Random(5)
    accepted = 0
    for number in range(8_000):
        start = ["root ::= ", 'root ::= "x" ', "root ::= a b\na ::= "][number % 3]
        text = start + "".join(generator.choices(PIECES, k=generator.randint(1, 9)))
        # Rules that are defined twice, or undefined and unused, are read differently.
        if text.count("::=") - start.count("::="):
            continue
        text += '\nb ::= "q"\n' if number % 3 == 2 else ""
        problem = _problem(text)
        if problem is None:
            accepted += 1
            assert _reads(demo_loaded, text), text
        # llama.cpp crashes on some of the others, so it does not get them.
        elif not any(
            words in problem for words in ("itself", "recursive", "less than", "ambiguous")
        ):
            assert not _reads(demo_loaded, text), (text, problem)
    assert accepted > 800
    capfd.readouterr()


def _problem(grammar: str) -> str | None:
    try:
        check(grammar)
    except WrongGrammar as error:
        return str(error)
    return None


def _reads(model: LoadedModel, text: str) -> bool:
    pointer = llama_cpp.llama_sampler_init_grammar(model.vocab, text.encode(), b"root")
    if not pointer:
        return False
    llama_cpp.llama_sampler_free(pointer)
    return True
