"""Grammars of arguments that are not written as JSON: their order, and what they can express."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from latimer.adapter.chat.formats import FORMATS
from latimer.adapter.chat.formats.base import FunctionSchema, GrammarRequest
from latimer.adapter.chat.formats.base import grammar as grammar_of
from latimer.backends.base import Grammar
from latimer.backends.grammar.gbnf import UnsupportedSchema
from latimer.backends.llama_cpp.library import LoadedModel
from support.walks import Walker

from .test_formats import whole

FORM_OF = {form.title: form for form in FORMATS}
GEMMA = FORM_OF["gemma4"]
# An object whose properties Gemma writes in another order: `City`, `zone`.
PLACE = {
    "type": "object",
    "properties": {"zone": {"type": "integer"}, "City": {"const": {"y": 1, "X": [2]}}},
    "required": ["City", "at"],
}
WHERE = {"properties": {"where": PLACE, "id": {"type": "integer"}}, "required": ["where"]}


def grammar(title: str, schema: Any, strict: bool = False) -> str:
    """Return the grammar of one call of a function."""
    function = FunctionSchema("f", orjson.dumps(schema), strict)
    return grammar_of(GrammarRequest(FORM_OF[title], (function,), False, True, frozenset()))


def refused(title: str, schema: Any) -> tuple[str | int, ...]:
    """Return the path at which a strict schema is rejected."""
    with pytest.raises(UnsupportedSchema) as caught:
        grammar(title, schema, True)
    return caught.value.path


def test_arguments_in_the_order_of_the_template(demo_loaded: LoadedModel) -> None:
    """Gemma writes the properties of each object by name, so the grammar has the same order."""
    found = Walker(demo_loaded).texts(grammar("gemma4", WHERE), 60, 900)
    assert any("zone:" in one for one in found)
    for one in found:
        for names in (("id:", "where:"), ("{at:", "City:{X:[2],y:1}", "zone:")):
            places = [one.index(name) for name in names if name in one]
            assert places == sorted(places), one
            assert len(places) >= len(names) - 1, one


def test_earlier_calls_in_the_order_of_the_template() -> None:
    """Calls in a template without calls are written as Gemma writes them."""
    place = {"zone": 5, "City": {"y": 1, "X": [2]}, "at": ""}
    wanted = '<|tool_call>call:f{id:1,where:{at:<|"|><|"|>,City:{X:[2],y:1},zone:5}}<tool_call|>'
    assert GEMMA.render([("f", {"where": place, "id": 1})]) == wanted


# Each: a format, and a name that it cannot express.
UNSAID = [
    *(("lfm2", name) for name in ("it's", 'q"', "a=b", "c,d", "a\nb", "", " a ")),
    ("gemma4", '<|"|>'),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "names"),
    [("lfm2", ("a.b", "$x y", "ü", "a:b", "a\\b")), ("gemma4", ("it's", "a=b", " a ", "<|"))],
)
def test_odd_names_are_read(demo_loaded: LoadedModel, title: str, names: Sequence[str]) -> None:
    """The parser reads every name that the grammar writes; no other name is empty."""
    schema = {
        "properties": {name: {"type": "integer"} for name in names},
        "required": names,
        "additionalProperties": {"type": "null"},
    }
    found = Walker(demo_loaded).texts(grammar(title, schema, True), 20, 600)
    assert found
    for one in found:
        parser = FORM_OF[title].parser({"f": schema}, frozenset(), False, True)
        calls = whole([*parser.feed(one.encode()), *parser.end()])
        for call in calls:
            arguments = orjson.loads(call[1])
            assert [type(arguments[name]) for name in names] == [int] * len(names)
            assert "" not in arguments


@pytest.mark.parametrize(
    "given",
    [
        Grammar("regex", r"""[a'"\\\n]{1,4}""", "tools"),
        Grammar("lark", r"""start: ("a" | "'" | "\"" | "\\" | "\n")~1..4""", "tools"),
    ],
)
def test_inputs_in_both_quotes(demo_loaded: LoadedModel, given: Grammar) -> None:
    """LFM2's model can write the input of a custom tool in single or in double quotes."""
    form = FORM_OF["lfm2"]
    functions = (FunctionSchema("f", None, False, given),)
    text = grammar_of(GrammarRequest(form, functions, False, True, frozenset()))
    quotes = set()
    for one in Walker(demo_loaded).texts(text, 80, 60):
        quotes.add(one[one.index("=") + 1 :].lstrip()[0])
        parser = form.parser({"f": None}, frozenset(), False, True)
        (call,) = whole([*parser.feed(one.encode()), *parser.end()])
        assert re.fullmatch(r"""[a'"\\\n]{1,4}""", orjson.loads(call[1])["input"])
    assert quotes == {"'", '"'}


@pytest.mark.parametrize(("title", "name"), UNSAID)
def test_names_that_a_format_cannot_express(title: str, name: str) -> None:
    """A strict schema with such a name is an error; otherwise the property is omitted."""
    schema = {"properties": {name: {"type": "integer"}, "b": {}}, "required": [name, "b"]}
    assert refused(title, schema) == (0, "properties", name)
    assert refused(title, {"properties": {"b": {}}, "required": ["b", name]}) == (0, "required", 1)
    assert grammar(title, schema) == grammar(title, {"properties": {"b": {}}, "required": ["b"]})


@pytest.mark.parametrize("name", ["it's", 'q"'])
def test_a_function_without_a_name_that_can_be_written(name: str) -> None:
    """If no name of a function can be written, its calls have no arguments."""
    none = grammar("lfm2", {"properties": {}, "required": []})
    assert none == grammar("lfm2", {"properties": {}, "additionalProperties": False})
    assert grammar("lfm2", {"properties": {name: {}}}) == none
    assert grammar("lfm2", {"properties": {name: {}}, "required": [name]}) == none


@pytest.mark.parametrize("given", [{"const": ['<|"|>q']}, {"enum": ["a", {'<|"|>': 1}]}])
def test_values_that_gemma_cannot_express(given: Any) -> None:
    """Gemma's strings have no escape for their mark: a strict schema with one is an error."""
    assert refused("gemma4", {"properties": {"a": given}}) == (0, "properties", "a", *given)
    loose = grammar("gemma4", {"properties": {"a": given}})
    assert loose == grammar("gemma4", {"properties": {"a": {}}})


# Each: the schema of a string, texts that Gemma can write for it, and texts that it cannot.
STRINGS: Sequence[tuple[Any, Sequence[str], Sequence[str]]] = [
    (
        {"type": "string"},
        (
            "",
            "<",
            "<<<",
            "let x = f <| 5 done",
            "<|im_start|>user hello",
            "if a<",
            '<|"|',
            '<<|"a>',
        ),
        ('<|"|>', 'a<|"|>b', '<<|"|>', '<|"<|"|>>', "\x00"),
    ),
    (
        {"minLength": 1},
        ("a", "<", "<<", '<|"', '<|"|', '<a href="x">|</a>'),
        ("", 'a<|"|>', '<|"|>'),
    ),
    ({"minLength": 3}, ('<|"', "<|>|", 'let <|"|', 'a|b<i id="c">'), ("<|", '<|"|>', 'ab<|"|>')),
    ({"maxLength": 5}, ("", "<|im", '<">"', "<<<|<", '<|"||'), ("<|im_s", '<|"|>')),
    ({"minLength": 2, "maxLength": 3}, ("<|", '|">', "ab<"), ("<", "<|im")),
    ({"pattern": "^[a-z<]+$"}, ("a<b", "<"), ("<|", "")),
    ({"pattern": "<"}, ("<|im_start|>", '<b a="">', '<|"|'), ('<|"|>', "b", "<\x00")),
    ({"pattern": '^a(<\\|"\\|>|<+b)c$'}, ("a<bc", "a<<bc"), ('a<|"|>c', "ac")),
    ({"pattern": '^a(<\\|"\\|>)*c$'}, ("ac",), ('a<|"|>c',)),
]


@pytest.mark.parametrize(("given", "written", "unwritten"), STRINGS)
def test_strings_that_gemma_can_write(
    demo_loaded: LoadedModel, given: Any, written: Sequence[str], unwritten: Sequence[str]
) -> None:
    """Gemma's strings contain everything but their whole mark, and every text is read again."""
    schema = {"properties": {"a": {"type": "string", **given}}, "required": ["a"]}
    text = grammar("gemma4", schema, True)
    walker = Walker(demo_loaded)
    for one in written:
        call = GEMMA.render([("f", {"a": one})])
        assert walker.accepts(text, call), one
        parser = GEMMA.parser({"f": schema}, frozenset(), False, True)
        (found,) = whole([*parser.feed(call.encode()), *parser.end()])
        assert orjson.loads(found[1]) == {"a": one}
    for one in unwritten:
        assert not walker.accepts(text, GEMMA.render([("f", {"a": one})])), one


def test_patterns_that_gemma_cannot_express() -> None:
    """A strict pattern that only texts with the whole mark match is an error."""
    given = {"type": "string", "pattern": r'^a<\|"\|>b$'}
    assert refused("gemma4", {"properties": {"a": given}}) == (0, "properties", "a", "pattern")
    loose = grammar("gemma4", {"properties": {"a": given}})
    assert loose == grammar("gemma4", {"properties": {"a": {"type": "string"}}})


@pytest.mark.parametrize(
    "more",
    [
        {"minProperties": 1},
        {"patternProperties": {"^a": {}}},
        {"propertyNames": {"maxLength": 3}},
        {"anyOf": [{"required": ["a"]}]},
        {"unevaluatedProperties": True},
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("title", ["lfm2", "gemma4", "kimi-k2"])
def test_keywords_that_ask_for_arguments_leave_them_free(title: str, more: dict[str, Any]) -> None:
    """A schema without properties allows arguments if another keyword does, enforced or not."""
    schema: dict[str, Any] = {"properties": {}, "required": []}
    assert grammar(title, {**schema, **more}) != grammar(title, schema)
