"""Tests of custom tools: their grammars in every format, and their inputs as they arrive."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.chat.formats import FORMATS, HERMES, ToolCallFormat
from latimer.adapter.chat.formats.base import FunctionSchema, GrammarRequest
from latimer.adapter.chat.formats.base import grammar as grammar_of
from latimer.adapter.chat.formats.tag_formats import Tagged
from latimer.adapter.chat.tools import InputReader, ToolSet, enforceable, unenforced
from latimer.backends.base import Grammar
from latimer.backends.errors import InvalidGrammar
from latimer.backends.grammar.notation import MARK
from latimer.schemas.openai.messages import Function
from support.walks import Walker

from .test_formats import whole

TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
QUOTED = Grammar("regex", r'[a-c]{1,3}\n"[<\\é]"', "")
LARK = Grammar("lark", 'start: ("a" | "\\"" | "\\n")~1..4', "")


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.title)
@pytest.mark.parametrize(
    ("grammar", "pattern"), [(QUOTED, QUOTED.text), (LARK, r'[a"\n]{1,4}')], ids=["regex", "lark"]
)
def test_inputs_follow_their_grammar(
    walker: Walker, form: ToolCallFormat, grammar: Grammar, pattern: str
) -> None:
    """In every format, the input of a forced custom tool call matches the tool's grammar."""
    function = FunctionSchema("run", orjson.dumps(TEXT), False, grammar)
    text = grammar_of(GrammarRequest(form, (function,), False, True, frozenset()))
    found = walker.texts(text, 20)
    assert len(found) > 5
    for one in found:
        parser = form.parser({"run": TEXT}, frozenset(), False, True)
        (call,) = (
            part
            for part in whole([*parser.feed(one.encode()), *parser.end()])
            if isinstance(part, tuple)
        )
        reader = InputReader()
        value = reader.feed(call[1]) + reader.end()
        assert re.fullmatch(pattern, value), value


UNESCAPED = [form for form in FORMATS if isinstance(form, Tagged) or form.title == "gemma4"]
PATCH = r"""start: "*** Begin Patch" LF line+ "*** End Patch" LF?
line: ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""


def end_of(form: ToolCallFormat) -> str:
    """Return the mark after a text in a call."""
    return form.tags.closing if isinstance(form, Tagged) else MARK


@pytest.mark.parametrize("form", UNESCAPED, ids=lambda form: form.title)
def test_an_input_is_never_cut_at_its_mark(walker: Walker, form: ToolCallFormat) -> None:
    """The grammar of a patch excludes the mark after the input, and only that."""
    function = FunctionSchema("run", orjson.dumps(TEXT), False, Grammar("lark", PATCH, ""))
    text = grammar_of(GrammarRequest(form, (function,), False, True, frozenset()))
    mark = end_of(form)
    tag = mark.strip()
    for line in ("if (a < b) { x <", f"</{tag[:-1]}<x></y>", f"<{tag[2:]}", "é<|x|>"):
        given = f"*** Begin Patch\n+{line}\n-\n*** End Patch\n"
        call = form.render([("run", {"input": given})])
        assert walker.accepts(text, call), call
        parser = form.parser({"run": TEXT}, frozenset(), True, True)
        (found,) = whole([*parser.feed(call.encode()), *parser.end()])
        assert json.loads(found[1]) == {"input": given}
        for at in (17, len(given) - 18):
            cut = form.render([("run", {"input": f"{given[:at]}{mark}{given[at:]}"})])
            assert not walker.accepts(text, cut)


@pytest.mark.parametrize("form", UNESCAPED, ids=lambda form: form.title)
async def test_an_input_with_its_mark_is_not_enforced(form: ToolCallFormat) -> None:
    """A format whose texts may need the mark after them is listed as not enforced."""
    mark = re.escape(end_of(form))
    tools = tool_set(a=Grammar("regex", f"a{mark}[0-9]", ""), b=QUOTED)
    enforced = await enforceable(tools, form)
    assert enforced == {"b": QUOTED}
    assert unenforced(tools, enforced) == ["tools[0].custom.format"]


@given(st.text(), st.booleans(), st.lists(st.integers(0, 200), max_size=8))
def test_an_input_is_read_as_it_arrives(text: str, is_ascii: bool, cuts: list[int]) -> None:
    """The parts of an input join to the whole input for every split of the arguments."""
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader = InputReader()
    places = [0, *sorted(cut % (len(arguments) + 1) for cut in cuts), len(arguments)]
    parts = [reader.feed(arguments[one:other]) for one, other in pairwise(places)]
    assert "".join([*parts, reader.end()]) == text


def test_inputs_stream() -> None:
    """Characters of an input are sent immediately, and escapes when they are complete."""
    reader = InputReader()
    parts = ['{"in', 'put": "a', "b\\", "nc\\ud83d", "\\ude0", '0d"', "}"]
    assert [reader.feed(part) for part in parts] == ["", "a", "b", "\nc", "", "\U0001f600d", ""]
    assert reader.end() == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"why": "b", "input": "a"}', "a"),
        ('{"input": {"a": 1}}', '{"a":1}'),
        ('{"other": "a"}', ""),
        ("[]", ""),
        ('{"input": "a\\ud83db"}', "a\ufffdb"),
        ('{"input": "cut o', "cut o"),
    ],
)
def test_arguments_that_no_grammar_made(arguments: str, expected: str) -> None:
    """Arguments in another format and truncated arguments have an input, too."""
    reader = InputReader()
    assert reader.feed(arguments) + reader.end() == expected


def tool_set(**grammars: Grammar | None) -> ToolSet:
    """Return custom tools with the given grammars."""
    functions = [Function(name=name, parameters=TEXT) for name in grammars]
    paths = [f"tools[{index}].custom" for index in range(len(functions))]
    return ToolSet(list(enumerate(functions)), functions, "auto", True, False, paths, grammars)


async def test_what_cannot_be_enforced_is_listed() -> None:
    """A format that cannot be enforced is listed with its path."""
    ahead = Grammar("regex", "a(?=b)", "")
    endless = Grammar("lark", 'start: ("a"?)*', "")
    tools = tool_set(a=LARK, b=ahead, c=None, d=endless, e=QUOTED)
    enforced = await enforceable(tools, HERMES)
    assert enforced == {"a": LARK, "e": QUOTED}
    assert unenforced(tools, enforced) == ["tools[1].custom.format", "tools[3].custom.format"]
    assert len(unenforced(tools, {})) == 4


async def test_a_malformed_grammar_is_the_clients_mistake() -> None:
    """The error of a malformed grammar names its definition."""
    path = "tools[0].custom.format.grammar.definition"
    for kind, text in (("lark", "start: ("), ("regex", "(")):
        with pytest.raises(InvalidGrammar) as error:
            await enforceable(tool_set(a=Grammar(kind, text, path)), HERMES)  # type: ignore[arg-type]
        assert error.value.param == path
