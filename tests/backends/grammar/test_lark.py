"""Tests of Lark's grammars as GBNF."""

from __future__ import annotations

import json

import llguidance
import pytest
from latimer.backends.base import Grammar
from latimer.backends.grammar import gbnf
from latimer.backends.grammar.gbnf import UnsupportedSchema
from latimer.backends.grammar.lark import COMMON, embedded
from latimer.backends.grammar.regex import IN_JSON, PLAIN, Encoding
from latimer.backends.llama_cpp.grammars import _tokenizer
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from support.walks import Walker

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF move? change?
filename: /(.{1,3})/
add_line: "+" /(.{0,3})/ LF -> line
move: "*** Move to: " filename LF
change: (context | change_line)+ eof?
context: ("@@" | "@@ " /(.{1,3})/) LF
change_line: ("+" | "-" | " ") /(.{0,3})/ LF
eof: "*** End of File" LF

%import common.LF
"""
SUM = """
// A calculator, with left recursion.
?start: sum
?sum: product
    | sum "+" product   -> add
    | sum "-" product
?product: atom
    | product "*" atom
?atom: NUMBER
     | "-" atom
     | "(" sum ")"
%import common (INT, WS_INLINE)
NUMBER: INT
%ignore WS_INLINE
"""
WORDS = r"""
start: KEY WS /[a-z_]{1,5}/ ("," WS? NAME)~0..3 [";"] END
KEY: "select"i | "\x41\u00e9\t\"\\"
NAME: "a".."c"+
WS: " "
END: /\/+[^"\\]/
"""


def gbnf_of(text: str, encoding: Encoding = PLAIN) -> str:
    """Return a converted grammar."""
    rules = embedded(Grammar("lark", text, ""), "text", "x-", encoding)
    rules["root"] = "text" if encoding is PLAIN else '"\\"" text "\\""'
    return "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


@pytest.mark.slow
@pytest.mark.parametrize("text", [PATCH, SUM, WORDS], ids=["patch", "sum", "words"])
@pytest.mark.parametrize("encoding", [PLAIN, IN_JSON], ids=["plain", "in JSON"])
def test_whatever_comes_is_of_the_grammar(
    walker: Walker, demo_loaded: LoadedModel, text: str, encoding: Encoding
) -> None:
    """llguidance, which reads Lark itself, accepts every random text of the converted grammar."""
    grammar = gbnf_of(text, encoding)
    assert gbnf.check(grammar) == []
    tokenizer = _tokenizer(Vocabulary(demo_loaded))
    start = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(text))
    assert not start.is_error(), start.get_error()
    found = walker.texts(grammar, 30, most=400)
    assert len(found) > 5
    for one in found:
        plain = one if encoding is PLAIN else json.loads(one)
        matcher = start.deep_copy()
        tokens = tokenizer.tokenize_bytes(plain.encode())
        assert matcher.consume_tokens(tokens), plain
        assert matcher.is_accepting(), plain


@pytest.mark.parametrize("name", COMMON)
def test_common_terminals(walker: Walker, name: str) -> None:
    """Each terminal of Lark's library that is known can be imported, also under another name."""
    for line in (f"%import common.{name}", f"%import common.{name} -> OWN\nOTHER.2: /a/"):
        used = "OWN" if "->" in line else name
        assert walker.texts(gbnf_of(f"start: {used}\n{line}"), 3, most=30)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is no rule 'start'"),
        ("start: a", "there is no rule 'a'"),
        ("start: (", "line 1: unexpected 'the end of the line'"),
        ('start: "a" )', "line 1: unexpected ')'"),
        ('start: "a"\nstart: "b"', "rule 'start' is defined twice"),
        ('start: "a', "line 1: unexpected '\"a'"),
        ('\n\n= "a"', "line 3: unexpected"),
        ("start: start", "rule 'start' never ends"),
        ('start: "a" -> 5', "line 1: unexpected '5'"),
        ('start: "a"~x', "line 1: unexpected 'x'"),
        ('start: "a".."bc"', "line 1: unexpected '\"bc\"'"),
        ('start: "\\UFFFFFFFF"', "line 1: an escape is not a character; the last one is"),
    ],
)
def test_malformed_grammars(text: str, reason: str) -> None:
    """A malformed grammar is an error that names the line or the rule."""
    with pytest.raises(gbnf.WrongGrammar) as error:
        gbnf_of(text)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        'start: %json {"type": "object"}',
        "start: <|end|>",
        "start: A & B\nA: /a+/\nB: /b/",
        "start: /a(?=b)/",
        "start: /a/i",
        "start: A{x}",
        'start: "a"{1,2}',
        "start[lazy]: /a/",
        "%import other.NAME\nstart: NAME",
        "%import common.SQL_COMMENT\nstart: SQL_COMMENT",
        '%declare A\nstart: "a"',
        "start: " + "(" * 5_000 + '"a"' + ")" * 5_000,
    ],
)  # fmt: skip
def test_what_gbnf_cannot_say(text: str) -> None:
    """A feature of Lark or llguidance that GBNF lacks is not enforced, but not malformed."""
    with pytest.raises(UnsupportedSchema):
        gbnf_of(text)


@pytest.mark.parametrize(
    ("pattern", "error"),
    [("(", gbnf.WrongGrammar), (r"\p{L}", UnsupportedSchema), ("(?<a>b)", UnsupportedSchema),
     ("a(?=b)", UnsupportedSchema), ("a" * 70_000, gbnf.WrongGrammar)],
)  # fmt: skip
def test_regular_expressions_that_are_not_converted(pattern: str, error: type[Exception]) -> None:
    """A malformed regular expression and one with unsupported syntax have different errors."""
    with pytest.raises(error):
        embedded(Grammar("regex", pattern, ""), "text", "x-", PLAIN)
