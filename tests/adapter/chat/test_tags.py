"""Arguments in tags: text, JSON, and arguments that a schema does not name."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator
from latimer.adapter.chat.formats import FORMATS, ToolCallFormat
from latimer.adapter.chat.formats.base import FunctionSchema, GrammarRequest, grammar
from latimer.adapter.chat.formats.tag_formats import Tagged
from latimer.backends.grammar import gbnf
from latimer.backends.grammar.gbnf import UnsupportedSchema
from support.walks import Walker

from .test_formats import whole

TAGGED = [form for form in FORMATS if isinstance(form, Tagged)]
NO_MARKS = frozenset[str]()
each = pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.title)


def grammar_of(form: ToolCallFormat, schema: Any, strict: bool = False) -> str:
    """Return the grammar of one call of a function."""
    function = FunctionSchema("f", orjson.dumps(schema), strict)
    return grammar(GrammarRequest(form, (function,), False, True, NO_MARKS))


def read(form: ToolCallFormat, text: str, schema: Any, enforced: bool = True) -> Any:
    """Return the arguments of the only call in a text, which arrives byte by byte."""
    parser = form.parser({"f": schema}, NO_MARKS, enforced, enforced)
    data = text.encode()
    parts = [part for at in range(len(data)) for part in parser.feed(data[at : at + 1])]
    found = whole([*parts, *parser.end()])
    assert len(found) == 1, found
    assert found[0][0] == "f"
    return json.loads(found[0][1])


@pytest.mark.slow
@each
def test_values_of_every_kind_match_their_schema(walker: Walker, form: ToolCallFormat) -> None:
    """The values of several types that a grammar allows match the schema when they are parsed."""
    schema = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["°C", "a\n</parameter", "12"]},
            "kind": {"const": "x"},
            "days": {"type": ["integer", "null"]},
            "flag": {"type": "boolean"},
            "deep": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "either": {"anyOf": [{"const": "</parameter>"}, {"const": 2}]},
        },
        "$defs": {"n": {"enum": [1, "</arg_value>", '\n</parameter>"\\', None]}},
        "required": ["unit", "days", "deep", "either"],
        "additionalProperties": False,
    }
    found = walker.texts(grammar_of(form, schema), 40, most=1_000)
    assert len(found) > 15
    validator = Draft202012Validator(schema)
    for text in found:
        validator.validate(read(form, text, schema))
    assert any("</arg_value>" in text.split("deep")[-1] for text in found)


@each
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "additionalProperties": {"enum": [1, "a"]}},
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"patternProperties": {"a": {}}}}},
    ],
)
def test_arguments_that_the_schema_does_not_name(form: ToolCallFormat, schema: Any) -> None:
    """A function whose schema names no properties can be called with arguments, also twice one."""
    tags = form.tags  # type: ignore[attr-defined]
    text = grammar_of(form, schema)
    gbnf.check(text)
    assert "[a-zA-Z0-9_-]{1,64} " in text
    line = "\n" if tags.lines else ""
    one = f"{tags.key}a{tags.json}{tags.value}{line}{{}}{line}{tags.value_end}\n"
    head = f"{form.begin}{tags.function}f{tags.named}\n"
    tail = tags.end + ("" if tags.end == form.end else form.end)
    call = head + one.format("1") + one.format("2") + tail
    assert read(form, call, schema) == {"a": 1}
    broken = form.parser({"f": schema}, NO_MARKS, False, False)
    assert whole([*broken.feed(call.encode()), *broken.end()]) == [call]


@each
def test_no_arguments_are_none(walker: Walker, form: ToolCallFormat) -> None:
    """A function without properties, or with additional ones forbidden, takes no arguments."""
    for schema in (
        {"type": "object", "properties": {}},
        {"type": "object", "additionalProperties": False},
    ):
        found = walker.texts(grammar_of(form, schema), 10)
        assert found
        assert all(read(form, text, schema) == {} for text in found)


@each
@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, " a\n", " a\n"),
        ({"type": "string"}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "true", "true"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, '"12"', '"12"'),
        ({}, "[1]", [1]),
        ({}, "[1", "[1"),
        (True, "a: b", "a: b"),
        ({"type": "number"}, " 1.5", 1.5),
        ({"type": "array", "items": {}}, '["<"]', ["<"]),
        ({"anyOf": [{"type": "object", "properties": {}}, {"type": "string"}]}, "a", "a"),
    ],
)
def test_how_a_value_is_written(
    form: ToolCallFormat, schema: Any, written: str, value: Any
) -> None:
    """Text is taken as it is; a value that may be text or another type is JSON if it fits."""
    tags = form.tags  # type: ignore[attr-defined]
    if tags.text != tags.json:
        # The tag says what is text.
        is_text = isinstance(value, str)
        after = tags.text if is_text else tags.json
    else:
        after = tags.text
    line = "\n" if tags.lines else ""
    argument = f"{tags.key}a{after}{tags.value}{line}{written}{line}{tags.value_end}\n"
    tail = tags.end + ("" if tags.end == form.end else form.end)
    call = f"{form.begin}{tags.function}f{tags.named}\n{argument}{tail}"
    own = {"type": "object", "properties": {"a": schema}}
    assert read(form, call, own, enforced=False) == {"a": value}


@each
def test_strict_texts_without_a_grammar_are_refused(form: ToolCallFormat) -> None:
    """A strict function is rejected where text in tags cannot be constrained."""
    for schema in ({"type": "string", "pattern": "a"}, {"type": "string", "maxLength": 3}):
        with pytest.raises(UnsupportedSchema):
            grammar_of(form, {"type": "object", "properties": {"a": schema}}, strict=True)
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    gbnf.check(grammar_of(form, {"type": "object", "properties": {"a": optional}}, strict=True))
