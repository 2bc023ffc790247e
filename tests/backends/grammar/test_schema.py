"""Tests of JSON schemas as GBNF: enforced keywords, and rejected ones with their path."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.backends.grammar import gbnf
from latimer.backends.grammar.dialects import check_schema, modern
from latimer.backends.grammar.gbnf import UnsupportedSchema
from latimer.backends.grammar.regex import integers, numbers
from latimer.backends.grammar.schema import STRING_FORMATS, path_to, to_gbnf
from support.samples import sample
from support.schemas import SCHEMAS, error_of
from support.walks import Walker

MORE: dict[str, Any] = {
    "other keys": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "ab": {"type": "null"}, "": {"type": "null"}},
        "additionalProperties": {"type": "integer"},
    },
    "all optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
    },
    "nobody said what it is": {"type": "object", "required": ["z"]},
    "a list that refers to itself": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": -3, "maximum": 3},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "other keys beside a strange one": {
        "type": "object", "properties": {"\n": {"const": 1}},
        "additionalProperties": {"type": "null"},
    },
    "no keys": {"type": "object", "additionalProperties": False},
    "no items": {"type": "array", "maxItems": 0},
    "tuple of nothing else": {"prefixItems": [{"type": "null"}] * 2, "items": False},
    "old tuple": {"$schema": "http://json-schema.org/draft-07/schema#",
                  "items": [{"type": "null"}, {"const": 1}], "additionalItems": False},
    "values of a type": {"enum": ["a", 1, None], "type": ["string", "null"]},
    "branches beside": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "anyOf": [{"required": ["a"]}, {"properties": {"b": {"const": 1}}, "required": ["b"]}],
    },
    "reference beside": {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 5,
                         "maximum": 6},
    "reference by position": {"anyOf": [{"const": 1}, {"type": "array", "items":
                              {"$ref": "#/anyOf/0"}, "maxItems": 2}]},
    "pattern anywhere": {"type": "string", "pattern": "^a|b$"},
    "remarks": {"title": "x", "description": "y", "default": 1, "examples": [], "const": 2},
    "anything": {},
    "nothing asked": {"type": "array", "uniqueItems": False, "items": {"type": "null"}},
    **{f"format {name}": {"type": "string", "format": name} for name in STRING_FORMATS},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("schema", [*SCHEMAS.values(), *MORE.values()], ids=[*SCHEMAS, *MORE])
def test_whatever_comes_satisfies_it(walker: Walker, schema: Any) -> None:
    """Every random text of the grammar is JSON that satisfies the schema."""
    grammar = to_gbnf(json.dumps(schema))
    assert gbnf.check(grammar) == []
    texts = walker.texts(grammar, sample(40, 60))
    assert texts
    for text in texts:
        assert error_of(json.loads(text), schema) is None, text


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "array", "uniqueItems": True}, ".uniqueItems"),
        ({"properties": {"a": {"multipleOf": 3}}}, ".properties.a.multipleOf"),
        ({"anyOf": [{"const": 1}, {"not": {"type": "null"}}]}, ".anyOf[1].not"),
        ({"patternProperties": {"^a": {}}}, ".patternProperties"),
        ({"type": "object", "minProperties": 2}, ".minProperties"),
        ({"type": "object", "maxProperties": 2}, ".maxProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf"),
        ({"$ref": "http://example.com/x"}, ".$ref"),
        ({"$ref": "#/$defs/nowhere"}, ".$ref"),
        ({"type": "string", "format": "iri"}, ".format"),
        ({"type": "string", "pattern": "(?=a)b"}, ".pattern"),
        ({"type": "string", "pattern": "("}, ".pattern"),
        ({"type": "string", "pattern": "a", "minLength": 3}, ".pattern"),
        ({"type": "number", "minimum": 0.2, "maximum": 0.4}, ""),
        ({"type": "string", "minLength": 5, "maxLength": 3}, ".minLength"),
        ({"type": "array", "minItems": 5, "maxItems": 3}, ".minItems"),
        ({"allOf": [{"type": ["number", "integer"]}, {"type": "boolean"}]}, ".type"),
        ({"allOf": [{"const": 1}, {"const": True}]}, ".const"),
        ({"const": 1, "type": "string"}, ".const"),
        ({"required": ["a"], "additionalProperties": False}, ".required"),
        ({"properties": {"a": False}, "required": ["a"]}, ".required"),
        ({"if": {}, "then": {}}, ".if"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, ".pattern"),
        ({"allOf": [{"additionalProperties": False}, {"properties": {"a": {}}}]},
         ".additionalProperties"),
        ({"enum": ["a"], "pattern": "("}, ""),
        ({"anyOf": [{"enum": [{"a": 1}], "properties": {"a": {"$ref": "#/$defs/n"}}}],
          "$defs": {"n": {}}}, ".anyOf[0]"),
        ({"type": "strange"}, ".type"),
        ({"type": "object", "properties": []}, ".properties"),
        ({"required": "a"}, ".required"),
        (False, ""),
    ],
    ids=lambda value: json.dumps(value)[:40],
)  # fmt: skip
def test_what_cannot_be_made_sure_of_is_refused(schema: Any, where: str) -> None:
    """The converter rejects a keyword that it cannot enforce, and names its place in the schema."""
    with pytest.raises(UnsupportedSchema) as caught:
        to_gbnf(json.dumps(schema))
    assert caught.value.where == where


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
        {"type": "object", "properties": {"a": {"$ref": "#", "minProperties": 0}}},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#"}}, "$ref": "#/$defs/a"},
    ],
)
def test_what_goes_round_in_a_circle_is_refused(schema: Any) -> None:
    """The converter rejects a reference that has no end."""
    with pytest.raises(UnsupportedSchema, match="circular"):
        to_gbnf(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, (0, 1)),
        ({"minimum": -0.8, "maximum": -0.2}, (-1, 0)),
        ({"minimum": 2.5, "exclusiveMaximum": 3}, (2, 3)),
    ],
)
def test_a_range_without_an_integer_says_what_to_send(
    schema: dict[str, Any], bounds: tuple[int, int]
) -> None:
    """The error names bounds that enclose the range, and a schema with these is converted."""
    low, high = bounds
    with pytest.raises(UnsupportedSchema) as caught:
        to_gbnf(json.dumps({"type": "number", **schema}))
    assert f"Send 'minimum': {low} and 'maximum': {high} ('ge' and 'le' in" in caught.value.reason
    assert to_gbnf(json.dumps({"type": "number", "minimum": low, "maximum": high}))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "number", "minimum": 5, "maximum": 3}, "no number is in its range"),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "no integer is in"),
        ({"type": "integer", "minimum": 10**20, "maximum": 10**21}, "enforced up to 15 digits"),
        ({"type": "number", "minimum": 10**20}, "enforced up to 15 digits"),
    ],
)
def test_a_range_without_a_value_is_named(schema: dict[str, Any], reason: str) -> None:
    """An empty range, or one beyond the digits that a grammar writes, is rejected as such."""
    with pytest.raises(UnsupportedSchema, match=reason):
        to_gbnf(json.dumps(schema))


@given(st.integers(-2000, 2000), st.integers(-2000, 2000))
def test_ranges_of_integers_are_exact(one: int, other: int) -> None:
    """The grammar of an integer range accepts exactly its integers."""
    low, high = min(one, other), max(one, other)
    rule = integers(low, high)
    assert rule is not None
    for value in (low - 1, low, (low + high) // 2, high, high + 1):
        assert _matches(rule, str(value)) == (low <= value <= high), (rule, value)


@given(st.integers(-99, 99), st.integers(-99, 99), st.decimals(-120, 120, places=2))
def test_ranges_of_numbers_hold(one: int, other: int, value: Any) -> None:
    """The grammar of a number range accepts no number outside it."""
    low, high = min(one, other), max(one, other)
    rule = numbers(low, high)
    assert rule is not None
    if _matches(rule, str(value)):
        assert low <= value <= high


def test_a_keyword_is_found_in_a_schema() -> None:
    """The search for a keyword does not match a property of the same name."""
    schema: Any = {"properties": {"not": {"items": [{"not": {}}]}}}
    assert path_to(schema, "not") == ("properties", "not", "items", 0, "not")
    assert path_to(schema, "contains") is None


def _matches(rule: str, text: str) -> bool:
    """Return True if a rule of digits matches a text.

    Such a rule is a regular expression except for quotes and spaces.
    """
    import re

    pattern = rule.replace('"-"', "-").replace('"."', "[.]").replace(" ", "")
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("named", [True, False])
def test_exclusive_bounds_as_flags(named: bool) -> None:
    """Exclusive bounds of draft 4 are flags, and are enforced also if no dialect is named."""
    schema: dict[str, Any] = {"type": "integer", "minimum": 5, "exclusiveMinimum": True}
    schema |= {"maximum": 7, "exclusiveMaximum": False}
    if named:
        schema["$schema"] = "http://json-schema.org/draft-04/schema#"
    assert to_gbnf(json.dumps(schema)) == to_gbnf(
        json.dumps({"type": "integer", "exclusiveMinimum": 5, "maximum": 7})
    )


INTEGER: dict[str, Any] = {"type": "integer"}
PAIR: dict[str, Any] = {"prefixItems": [INTEGER, {"type": "null"}], "items": False}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"items": PAIR["prefixItems"], "additionalItems": False}, PAIR),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": PAIR["prefixItems"],
          "additionalItems": False}, PAIR),
        ({"items": PAIR["prefixItems"]}, {"prefixItems": PAIR["prefixItems"]}),
        ({"items": INTEGER, "additionalItems": False, "maxItems": 2},
         {"items": INTEGER, "maxItems": 2}),
        # The name of no published dialect.
        ({"$schema": "http://json-schema.org/schema#", **INTEGER}, INTEGER),
        # References by the schema's own address.
        *(({key: "http://x/y", "properties": {"a": {"$ref": "http://x/y#/definitions/A"}},
            "definitions": {"A": INTEGER}},
           {"properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": INTEGER}})
          for key in ("id", "$id")),
        ({"id": "http://x/y#", "properties": {"a": {"anyOf": [{"$ref": "http://x/y"}, INTEGER]}}},
         {"properties": {"a": {"anyOf": [{"$ref": "#"}, INTEGER]}}}),
        # Properties and values with these names are no keywords.
        ({"properties": {"id": INTEGER, "items": INTEGER}, "required": ["id"]},
         {"properties": {"id": INTEGER, "items": INTEGER}, "required": ["id"]}),
        ({"enum": [{"items": [1]}]}, {"enum": [{"items": [1]}]}),
        # An empty list of `items` leaves all of them to `additionalItems`.
        ({"items": [], "additionalItems": INTEGER}, {"items": INTEGER}),
        ({"type": "array", "items": []}, {"type": "array"}),
        # Draft 3: each property says if it is required, also behind a reference.
        ({"properties": {"a": {**INTEGER, "required": True}, "b": {**INTEGER, "required": False}},
          "required": True}, {"properties": {"a": INTEGER, "b": INTEGER}, "required": ["a"]}),
        ({"properties": {"a": {"$ref": "#/definitions/A"}, "b": INTEGER}, "required": ["b"],
          "definitions": {"A": {**INTEGER, "required": True}}},
         {"properties": {"a": {"$ref": "#/definitions/A"}, "b": INTEGER}, "required": ["b", "a"],
          "definitions": {"A": INTEGER}}),
        ({"properties": {"a": {"type": "any"}, "b": {"type": ["null", "any"]}}},
         {"properties": {"a": {}, "b": {}}}),
        ({"type": ["null", {"type": "integer", "minimum": 3}]},
         {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 3}]}),
        ({"extends": {"properties": {"a": INTEGER}}}, {"allOf": [{"properties": {"a": INTEGER}}]}),
        ({"divisibleBy": 1, **INTEGER}, {"multipleOf": 1, **INTEGER}),
    ],
)  # fmt: skip
def test_older_drafts(old: dict[str, Any], new: dict[str, Any]) -> None:
    """A schema of an older draft has the grammar of the same schema in the latest one."""
    before = json.dumps(old)
    assert to_gbnf(before) == to_gbnf(json.dumps(new))
    assert json.dumps(old) == before


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        # Integers with a fraction of zero.
        ({"prefixItems": [True, True], "maxItems": 2.0}, {"prefixItems": [True, True],
                                                          "maxItems": 2}),
        ({"minItems": 2.0}, {"minItems": 2}),
        ({"minLength": 2.0, "maxLength": 3.0}, {"minLength": 2, "maxLength": 3}),
        # Numbers that are multiples of 1.
        ({"type": "number", "multipleOf": 1}, INTEGER),
        ({"multipleOf": 1.0, "minimum": 2, "maximum": 5}, {**INTEGER, "minimum": 2, "maximum": 5}),
        # Types that are listed twice, and true, which is not 1.
        ({"type": ["integer", "number"], "allOf": [{"type": "integer"}]}, {"type": ["integer"]}),
        ({"type": "number", "allOf": [{"type": ["integer", "string"]}]}, {"type": ["integer"]}),
        ({"allOf": [{"enum": [1, 2]}, {"enum": [True, 2.0]}]}, {"enum": [2]}),
        ({"allOf": [{"const": {"a": [1]}}, {"const": {"a": [1.0]}}]}, {"const": {"a": [1]}}),
        # References are fragments of URIs, and a number may be a name.
        ({"$ref": "#/$defs/A%3CB%25%3E", "$defs": {"A<B%>": INTEGER}},
         {"$ref": "#/$defs/A<B%>", "$defs": {"A<B%>": INTEGER}}),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a%20b": INTEGER}},
         {"$ref": "#/$defs/a b", "$defs": {"a b": INTEGER}}),
        ({"$ref": "#/$defs/007", "$defs": {"007": INTEGER}},
         {"$ref": "#/$defs/7", "$defs": {"7": INTEGER}}),
    ],
)  # fmt: skip
def test_spellings_of_one_schema(schema: dict[str, Any], same: dict[str, Any]) -> None:
    """Two spellings of one schema have the same grammar."""
    assert to_gbnf(json.dumps(schema)) == to_gbnf(json.dumps(same))


@pytest.mark.parametrize(
    ("schema", "kept"),
    [
        # Names that are no addresses, also of parts, and of properties.
        ({"$id": "Output Format", "properties": {"a": {"$id": "a%", **INTEGER}}},
         {"properties": {"a": INTEGER}}),
        ({"$id": "#x", "properties": {"$id": {"$id": "b c", "enum": [{"$id": "d e"}]}}},
         {"properties": {"$id": {"enum": [{"$id": "d e"}]}}}),
        ({"$id": "日本", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": INTEGER}},
         {"properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": INTEGER}}),
        # Those that a reference needs, and those where the pointers of a part begin.
        *((one, one) for one in (
            {"$id": "http://x/", "anyOf": [{"$id": "q", **INTEGER}, {"$ref": "http://x/q"}]},
            {"anyOf": [{"$id": "#q", **INTEGER}, {"$ref": "#q"}]},
            {"items": {"$id": "q", "anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": INTEGER}}},
        )),
    ],
)  # fmt: skip
def test_names_that_identify_nothing_are_dropped(
    schema: dict[str, Any], kept: dict[str, Any]
) -> None:
    """An `$id` that no reference needs is dropped, since clients put any text there."""
    assert modern(schema) == kept


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("größe", "gr%C3%B6%C3%9Fe"), ("first name", "first%20name"), ("A<B>", "A%3CB%3E"),
        ("50%", "50%25"), ("%41", "%2541"), ("a#b", "a%23b"), ("a%20b", "a%2520b"),
        ("a b", "a%20b"), ("A.b-c_(d)", "A.b-c_(d)"),
    ],
)  # fmt: skip
def test_references_are_addresses(name: str, target: str) -> None:
    """A name that a generator has not encoded is encoded in a reference, as engines require."""
    for one in (name, target):
        schema = {"properties": {"default": {"$ref": f"#/$defs/{one}"}}, "$defs": {name: INTEGER}}
        assert modern(schema)["properties"]["default"] == {"$ref": f"#/$defs/{target}"}
    jsonschema_rs.validator_for(modern(schema))


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"dependencies": {"a": "b"}}, "dependencies"),
        ({"dependencies": {"items": ["b"], "enum": {"required": ["c"]}}}, "dependencies"),
        ({"disallow": "string"}, "not"),
        ({"disallow": ["string", {"type": "any"}]}, "not"),
        ({"divisibleBy": 2, **INTEGER}, "multipleOf"),
    ],
)
def test_keywords_of_older_drafts_that_no_grammar_enforces(
    schema: dict[str, Any], keyword: str
) -> None:
    """They are valid schemas, and an error where a schema must be enforced, never ignored."""
    check_schema(schema)
    with pytest.raises(UnsupportedSchema, match=f"'{keyword}' cannot be enforced"):
        to_gbnf(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "any", "required": "true"}}},
        {"properties": {"a": {"type": "date"}}},
        {"properties": {"a": {"anyOf": []}}},
        {"properties": {"a": {"required": True, "$ref": "#/b"}, "c": None}},
        {"required": True, "properties": []},
        {"required": [{}], "properties": {"a": {"required": True}}},
        {"type": [{"type": "string"}], "anyOf": 3},
        {"extends": {"type": "integer"}, "allOf": {}},
    ],
)
def test_what_no_draft_allows_stays_an_error(schema: dict[str, Any]) -> None:
    """A value that is a schema of no draft is refused."""
    with pytest.raises(UnsupportedSchema):
        check_schema(schema)


def test_references_elsewhere_stay_errors() -> None:
    """A reference to another address is never resolved."""
    schema = {"$id": "http://x/y", "properties": {"a": {"$ref": "http://x/yz#/definitions/A"}}}
    with pytest.raises(UnsupportedSchema, match="outside the schema"):
        to_gbnf(json.dumps(schema))
