"""Tests that each format's parser reads what its grammar for tool calls generates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator
from latimer.adapter.chat.formats import FORMATS, ToolCallFormat
from latimer.adapter.chat.formats.base import (
    WELL_FOLLOWED,
    FunctionSchema,
    GrammarRequest,
    TooLarge,
    beside,
)
from latimer.adapter.chat.formats.base import grammar as grammar_of
from latimer.backends.base import Preamble
from latimer.backends.grammar import gbnf
from latimer.backends.grammar.gbnf import UnsupportedSchema
from latimer.backends.grammar.preamble import token_or_text
from latimer.schemas.limits import SCHEMA
from support.samples import sample
from support.walks import Walker

from .test_formats import whole

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS: Mapping[str, Any] = {
    "get_weather": CITY,
    "ping": {"type": "object", "properties": {}},
    "stop": None,
}
FUNCTIONS = tuple(
    (name, None if schema is None else orjson.dumps(schema), False)
    for name, schema in SCHEMAS.items()
)
NO_MARKS = frozenset[str]()


def grammar(form: ToolCallFormat, functions: Any, *fields: Any) -> str:
    """Return the grammar of a request with some fields."""
    return grammar_of(
        GrammarRequest(form, tuple(FunctionSchema(*one) for one in functions), *fields)
    )


def calls_in(form: ToolCallFormat, text: str, forced: bool) -> list[tuple[str, str]]:
    """Return the calls in a text."""
    parser = form.parser(SCHEMAS, NO_MARKS, False, forced)
    parts = whole([*parser.feed(text.encode()), *parser.end()])
    return [one for one in parts if isinstance(one, tuple)]


@cache
def tokens_in(text: str) -> list[str]:
    """Return the tokens in a valid grammar; formats with the same grammar share the check."""
    return gbnf.check(text)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.title)
@pytest.mark.parametrize("parallel", [False, True], ids=["one", "several"])
def test_forced_calls_are_read_back(walker: Walker, form: ToolCallFormat, parallel: bool) -> None:
    """Forced output calls only offered functions, with arguments that match their schemas."""
    text = grammar(form, FUNCTIONS, parallel, True, NO_MARKS)
    found = walker.texts(text, 40)
    assert len(found) > 10
    names = set()
    for one in found:
        calls = calls_in(form, one, True)
        assert calls, one
        assert parallel or len(calls) == 1, one
        for name, arguments in calls:
            names.add(name)
            value = json.loads(arguments)
            Draft202012Validator(SCHEMAS[name] or {"maxProperties": 0}).validate(value)
            assert name == "get_weather" or value == {}
    assert names == set(SCHEMAS)


@pytest.mark.parametrize(
    "title",
    [
        "hermes", "xml", "tool-call-list", "mistral", "mistral-args", "glm", "minimax",
        "deepseek-v3.2", "kimi-k2", "gemma4", "lfm2", "functionary-v3.1",
    ],
)  # fmt: skip
def test_calls_behind_content(walker: Walker, title: str) -> None:
    """With `tool_choice: auto` text is free, and a text with a marker has a call."""
    form = next(form for form in FORMATS if form.title == title)
    text = grammar(form, FUNCTIONS, True, False, NO_MARKS)
    for one in walker.texts(text, sample(20, 60), most=120):
        assert bool(calls_in(form, one, False)) == (form.begin in one)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.title)
def test_markers_that_are_tokens_are_named(form: ToolCallFormat) -> None:
    """A GBNF grammar refers to markers by their token names where GBNF can name them."""
    text = grammar(form, FUNCTIONS, True, True, frozenset(form.markers))
    preamble = Preamble("", "", False, frozenset(form.markers))
    nameable = {marker for marker in form.markers if token_or_text(marker, preamble) == marker}
    assert {token.lstrip("!") for token in tokens_in(text)} <= nameable
    if form.begin in nameable:
        assert form.begin in tokens_in(text)


def test_what_no_grammar_can_say_is_left_out() -> None:
    """A keyword that no grammar can enforce is dropped from a schema that is not strict."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "string", "not": {"const": "x"}}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    hermes = FORMATS[0]
    loose = grammar(hermes, (("f", orjson.dumps(schema), False),), False, True, NO_MARKS)
    del schema["properties"]["a"]["not"]
    assert loose == grammar(hermes, (("f", orjson.dumps(schema), False),), False, True, NO_MARKS)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {}, False], "minLength": 5},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"not": {"const": 1}}}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}], "type": "object"}}},
    ],
)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.title)
def test_what_no_grammar_can_say_elsewhere_is_left_out(form: ToolCallFormat, schema: Any) -> None:
    """An unenforceable schema behind a reference, also a circular one, gives a valid grammar."""
    text = grammar(form, (("f", orjson.dumps(schema), False),), False, True, NO_MARKS)
    tokens_in(text)


@pytest.mark.slow
def test_many_functions_are_held_to_less() -> None:
    """The largest schemas that are not strict become plain objects in a grammar that is too long.

    The others stay enforced.
    """
    rich = orjson.dumps({"properties": {f"p{i}": {"enum": [f"{i}" * 20]} for i in range(20)}})

    def offered(count: int, strict: bool) -> tuple[tuple[str, bytes, bool], ...]:
        return tuple((f"f{i}", rich, strict) for i in range(count))

    text = grammar(FORMATS[0], offered(128, False), True, False, NO_MARKS)
    gbnf.check(text)
    assert "p19" not in text
    text = grammar(FORMATS[0], offered(40, False), True, False, NO_MARKS)
    assert len(text) < WELL_FOLLOWED
    kept = [index for index in range(40) if re.search(rf"f{index}-.*p19", text)]
    assert 0 < len(kept) < 40
    assert "p19" in grammar(FORMATS[0], offered(3, False), True, False, NO_MARKS)
    text = grammar(FORMATS[0], offered(128, True), True, False, NO_MARKS)
    gbnf.check(text, SCHEMA.maximum)
    assert "p19" in text
    rich = orjson.dumps({"properties": {f"p{i}": {"enum": [f"{i}" * 20]} for i in range(200)}})
    with pytest.raises(TooLarge):
        grammar(FORMATS[0], offered(128, True), True, False, NO_MARKS)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.title)
def test_a_strict_schema_is_all_made_sure_of(form: ToolCallFormat) -> None:
    """A keyword that cannot be enforced is an error in a strict schema, with its path."""
    schema = {"type": "object", "properties": {"a": {"not": {"const": "x"}}}}
    functions = (("e", None, True), ("f", orjson.dumps(schema), True))
    with pytest.raises(UnsupportedSchema) as caught:
        grammar(form, functions, False, True, NO_MARKS)
    assert caught.value.path == (1, "properties", "a", "not")


def test_alternatives_of_whole_arguments_in_a_call_of_python() -> None:
    """LFM2's keyword arguments have no alternatives as a whole; a strict schema says so."""
    lfm2 = next(form for form in FORMATS if form.title == "lfm2")
    schema: Any = {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    with pytest.raises(UnsupportedSchema) as caught:
        grammar(lfm2, (("f", orjson.dumps(schema), True),), False, True, NO_MARKS)
    assert caught.value.path == (0, "anyOf")
    merged: Any = {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"required": ["a"]}}}
    text = grammar(lfm2, (("f", orjson.dumps(merged), True),), False, True, NO_MARKS)
    gbnf.check(text)
    assert '"a" python-ws "="' in text


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, ("properties", "a", "pattern")),
        ({"properties": {"a": {"type": "integer", "not": {}}}}, ("properties", "a", "not")),
        ({"anyOf": []}, ("anyOf",)),
    ],
)
def test_a_strict_schema_of_arguments_in_tags(schema: Any, path: tuple[str, ...]) -> None:
    """A strict schema for arguments in tags is rejected where their text cannot be constrained."""
    xml = next(form for form in FORMATS if form.title == "xml")
    loose = grammar(xml, (("f", orjson.dumps(schema), False),), False, True, NO_MARKS)
    gbnf.check(loose)
    with pytest.raises(UnsupportedSchema) as caught:
        grammar(xml, (("f", orjson.dumps(schema), True),), False, True, NO_MARKS)
    assert caught.value.path == (0, *path)


def test_calls_beside_an_answer(walker: Walker) -> None:
    """With a response format, the output is either a call or an answer in that format."""
    calls = grammar(FORMATS[0], FUNCTIONS, False, True, NO_MARKS)
    text = beside(calls, 'root ::= "[" root? "]"')
    found = walker.texts(text, 60)
    answers = [one for one in found if one.startswith("[")]
    assert 0 < len(answers) < len(found)
    assert all(calls_in(FORMATS[0], one, True) for one in found if one not in answers)
