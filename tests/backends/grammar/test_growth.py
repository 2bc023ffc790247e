"""Tests of schemas and regular expressions that could take much more time than their length."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from latimer.backends.base import Grammar
from latimer.backends.grammar import gbnf_of
from latimer.backends.grammar.dialects import check_schema
from latimer.backends.grammar.gbnf import UnsupportedSchema, WrongGrammar
from latimer.backends.grammar.regex import repetitions
from latimer.schemas.limits import SCHEMA

pytestmark = pytest.mark.slow

# Limit of CPU time for each of them, in seconds.
SECONDS = 6.0
OBJECT = {"type": "object"}


def doubling(keyword: str) -> Any:
    """Return definitions that each reference the next one twice."""
    defs: dict[str, Any] = {
        f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}", "minLength": n}] * 2} for n in range(40)
    }
    return {"$defs": {**defs, "d40": {"type": "string"}}, "$ref": "#/$defs/d0", "maxLength": 99}


def nested(count: int) -> Any:
    """Return definitions that each contain the next one three times when expanded."""
    defs: dict[str, Any] = {
        f"d{n}": {**OBJECT, "properties": {
            key: {"$ref": f"#/$defs/d{n + 1}", "minProperties": 0} for key in "abc"}}
        for n in range(count)
    }  # fmt: skip
    return {"$defs": {**defs, f"d{count}": OBJECT}, "$ref": "#/$defs/d0"}


SCHEMAS: dict[str, Callable[[], Any]] = {
    "doubling anyOf": lambda: doubling("anyOf"),
    "doubling allOf": lambda: doubling("allOf"),
    "doubling oneOf": lambda: doubling("oneOf"),
    "written out three times a level": lambda: nested(30),
    "oneOf of hundreds": lambda: {"oneOf": [{"const": n} for n in range(600)]},
    "15,000 properties": lambda: {
        **OBJECT, "properties": {f"p{n}": {"type": "string"} for n in range(15_000)}},
    "15,000 required names": lambda: {**OBJECT, "required": [f"p{n}" for n in range(15_000)]},
    "names of 1,500 characters": lambda: {
        **OBJECT, "properties": {"x" * 1_500: True}, "additionalProperties": True},
    "20,000 values twice": lambda: {
        "allOf": [{"enum": [f"a{n}" for n in range(20_000)]},
                  {"enum": [f"a{n}" for n in range(19_999, -1, -1)]}]},
    "20,000 values that the rest allows": lambda: {
        "enum": list(range(20_000)), "minimum": 0, "type": "integer"},
    "a pointer of 5,000 digits": lambda: {"$ref": "#/$defs/" + "9" * 5_000},
    "a $schema that is none": lambda: {"$schema": 5, "type": "string"},
    "a reference to a machine": lambda: {
        "enum": [["x"]], "items": {"$ref": "http://127.0.0.1:1/x"}},
    "a reference to a file": lambda: {"enum": [["x"]], "items": {"$ref": "file:///etc/passwd"}},
    "a pattern that backtracks": lambda: {
        "type": "string", "enum": ["a" * 32 + "!"], "pattern": "^(a+)+$"},
    "limits of 19 digits": lambda: {"type": "integer", "minimum": 10**18, "maximum": 2**63},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_take_bounded_time(name: str) -> None:
    """A schema becomes a grammar, or is rejected with a short message, within seconds."""
    schema = SCHEMAS[name]()
    start, said = time.thread_time(), ""
    try:
        check_schema(schema)
        text = gbnf_of(Grammar("json_schema", orjson.dumps(schema).decode(), "json_schema"))
        assert len(text) <= SCHEMA.maximum
    except (UnsupportedSchema, WrongGrammar) as error:
        said = str(error)
    assert len(said) < 600
    assert time.thread_time() - start < SECONDS


EXPRESSIONS: dict[str, str] = {
    "a large set": "[^" + "".join(chr(0x4E00 + 2 * n) for n in range(10_000)) + "]",
    "brackets": "(" * 5_000 + "a" + ")" * 5_000,
    "repetitions of repetitions": "(" * 40 + "a" + "{0,9})" * 40,
    "many branches": "|".join(f"w{n}" for n in range(8_000)),
    "a repetition of 5,000 digits": "a{" + "9" * 5_000 + "}",
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_take_bounded_time(name: str) -> None:
    """A regular expression becomes a grammar, or is rejected, within seconds."""
    start, said = time.thread_time(), ""
    try:
        gbnf_of(Grammar("regex", EXPRESSIONS[name], "regex"))
    except (UnsupportedSchema, WrongGrammar) as error:
        said = str(error)
    assert len(said) < 600
    assert time.thread_time() - start < SECONDS


@pytest.mark.parametrize("part", ["[", "{1", "(", "\\", "[^]", "a{9}"])
def test_repetitions_are_counted_in_time_by_the_size(part: str) -> None:
    """Counting repetitions takes linear time, also with unclosed brackets."""
    start = time.thread_time()
    repetitions(part * (2**20 // len(part)))
    assert time.thread_time() - start < SECONDS


def test_repetitions_of_repetitions_multiply() -> None:
    """Nested repetitions multiply, and a set or an escape counts as one part."""
    assert repetitions("((a{1000}){1000}b){9}") == 9_000_009
    assert repetitions(r"[(]{5}\({7}a{2,3}b*") == 5 + 7 + 3 + 1
