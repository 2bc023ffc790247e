"""Schemas of arguments in tags: references, unions, required names, and names with the tags."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from latimer.adapter.chat.formats import ToolCallFormat
from latimer.backends.grammar.gbnf import UnsupportedSchema
from support.walks import Walker

from .test_tags import TAGGED, grammar_of, read

# DeepSeek V4 differs from V3.2 in the markers only.
each = pytest.mark.parametrize(
    "form", [one for one in TAGGED if one.title != "deepseek-v4"], ids=lambda form: form.title
)

INTEGER = {"type": "integer"}
STRING = {"type": "string"}
MARKS = "</arg_value></parameter>"
DEFS = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "zip": {"type": "string", "description": "5 digits"},
    "either": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
    "small": {"type": "integer", "maximum": 5},
    "names": {"type": "array", "items": {"enum": ["a", MARKS]}},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, STRING]},
}


def of(schema: Any, **fields: Any) -> dict[str, Any]:
    """Return a schema with one property, "a", which is required."""
    return {
        "type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFS,
        "additionalProperties": False, **fields,
    }  # fmt: skip


def call(form: ToolCallFormat, *arguments: tuple[str, str, bool]) -> str:
    """Return a call; each argument is a name, the text of the value, and False for JSON."""
    tags = form.tags  # type: ignore[attr-defined]
    line = "\n" if tags.lines else ""
    text = f"{form.begin}{tags.function}f{tags.named}{line}"
    for name, written, is_text in arguments:
        after = tags.text if is_text else tags.json
        text += f"{tags.key}{name}{after}{tags.value}{line}{written}{line}{tags.value_end}{line}"
    end: str = tags.end
    return text + end + ("" if end == form.end else form.end)


def ref(name: str) -> dict[str, str]:
    """Return a reference to a definition."""
    return {"$ref": f"#/$defs/{name}"}


# Each: a schema, the text of a value, and the value.
WRITTEN: list[tuple[Any, str, Any]] = [
    (ref("unit"), "celsius", "celsius"),
    (ref("either"), "celsius", "celsius"),
    (ref("either"), "null", None),
    ({"allOf": [ref("unit")], "default": "celsius"}, "fahrenheit", "fahrenheit"),
    ({"anyOf": [DEFS["unit"], {"type": "null"}]}, "celsius", "celsius"),
    ({"type": ["string", "null"], "enum": ["x", None]}, "x", "x"),
    ({"type": ["string", "null"], "enum": ["x", None]}, "null", None),
    (ref("zip"), "01234", "01234"),
    (ref("zip"), "12", "12"),
    ({"allOf": [STRING]}, "12", "12"),
    ({"type": ["string", "null"], "maxLength": 9}, "12", "12"),
    ({"type": ["string", "null"], "maxLength": 9}, "null", None),
    ({"anyOf": [STRING, ref("small")]}, "5", 5),
    ({"anyOf": [ref("small"), STRING]}, "no 7", "no 7"),
    ({"oneOf": [STRING, ref("names")]}, "a", "a"),
    ({"oneOf": [STRING, ref("names")]}, f'["{MARKS}"]', [MARKS]),
    ({"enum": ["a", 1, {"b": "c"}]}, '{"b": "c"}', {"b": "c"}),
    ({"enum": ["a", 1, {"b": "c"}]}, "a", "a"),
    (ref("loop"), "a", "a"),
]  # fmt: skip


@each
@pytest.mark.parametrize(("schema", "written", "value"), WRITTEN)
def test_what_can_be_a_string_is_text(
    walker: Walker, form: ToolCallFormat, schema: Any, written: str, value: Any
) -> None:
    """A string by reference, in a union or in a list is text without quotes, and read as one."""
    text = call(form, ("a", written, isinstance(value, str)))
    whole = of(schema)
    assert walker.accepts(grammar_of(form, whole), text)
    assert read(form, text, whole) == {"a": value}
    if "</" not in written:
        assert read(form, text, whole, enforced=False) == {"a": value}


# Each: a schema, and the text of a value that it does not allow.
WRONG: list[tuple[Any, str]] = [
    (ref("unit"), '"celsius"'),
    (ref("unit"), "kelvin"),
    (ref("either"), '"celsius"'),
    ({"anyOf": [STRING, ref("small")]}, "7"),
    ({"oneOf": [STRING, ref("names")]}, "[1]"),
    ({"oneOf": [STRING, ref("names")]}, " [1]"),
    ({"enum": ["a", 1, {"b": "c"}]}, "2"),
]


@each
@pytest.mark.parametrize(("schema", "written"), WRONG)
def test_what_would_be_read_as_another_value(
    walker: Walker, form: ToolCallFormat, schema: Any, written: str
) -> None:
    """Text that would be read as JSON that the schema forbids cannot be written."""
    text = grammar_of(form, of(schema))
    assert not walker.accepts(text, call(form, ("a", written, False)))
    assert form.tags.is_marked or not walker.accepts(  # type: ignore[attr-defined]
        text, call(form, ("a", written, True))
    )


@each
def test_references_begin_at_the_root(walker: Walker, form: ToolCallFormat) -> None:
    """A reference in an argument points into the whole schema, also a circular one."""
    tree = {
        "type": "object",
        "properties": {
            "children": {"type": "array", "items": {"$ref": "#"}},
            "size": {"$ref": "#/definitions/size"},
            "same": {"$ref": "#/properties/size"},
        },
        "definitions": {"size": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["children", "same"],
        "additionalProperties": False,
    }
    for strict in (False, True):
        text = grammar_of(form, tree, strict)
        found = [read(form, one, tree) for one in walker.texts(text, 20)]
        assert len(found) > 10
        assert any(one["children"] for one in found)
        for one in found:
            Draft202012Validator(tree).validate(one)


PLACE = {"type": "object", "properties": {"k": INTEGER}, "required": ["k"]}
TOPS: list[Any] = [
    {"$ref": "#/$defs/place", "$defs": {"place": PLACE}},
    {"type": "object", "allOf": [{"$ref": "#/$defs/place"}], "$defs": {"place": PLACE}},
    {"allOf": [PLACE, {"properties": {"b": INTEGER}, "required": ["b"]}]},
    {"properties": {"a": INTEGER}, "required": ["a", "b"], "additionalProperties": INTEGER},
    {"required": ["b"], "additionalProperties": INTEGER},
]


@each
@pytest.mark.parametrize("schema", TOPS)
def test_whole_arguments_by_reference(walker: Walker, form: ToolCallFormat, schema: Any) -> None:
    """A reference, `allOf` and names in `required` at the top of a schema are followed."""
    for strict in (False, True):
        found = walker.texts(grammar_of(form, schema, strict), 8)
        assert len(found) > 3
        for one in found:
            Draft202012Validator(schema).validate(read(form, one, schema))


@each
def test_alternatives_of_whole_arguments(walker: Walker, form: ToolCallFormat) -> None:
    """Alternatives at the top are followed, unless the function is strict."""
    options = [
        {"properties": {"kind": {"const": kind}, "a": value}, "required": ["kind", "a"]}
        for kind, value in (("x", INTEGER), ("y", {"enum": ["1", "z"]}), ("z", {"type": "boolean"}))
    ]
    schema = {"type": "object", "oneOf": options}
    found = [read(form, one, schema) for one in walker.texts(grammar_of(form, schema), 30)]
    assert {one["kind"] for one in found} == {"x", "y", "z"}
    assert all(one.keys() == {"kind", "a"} for one in found)
    with pytest.raises(UnsupportedSchema) as caught:
        grammar_of(form, schema, strict=True)
    assert caught.value.path == (0, "oneOf")


@each
def test_required_names_that_are_not_allowed(form: ToolCallFormat) -> None:
    """A strict schema that requires a forbidden name is an error, as in the formats with JSON."""
    schema = of(INTEGER, required=["a", "b"])
    with pytest.raises(UnsupportedSchema) as caught:
        grammar_of(form, schema, strict=True)
    assert caught.value.path == (0, "required")
    assert grammar_of(form, schema) == grammar_of(form, of(INTEGER))


NAMES = ['q"', 'q">', "a<b", "a>b", "", " a ", "a\nb", "</arg_key>", '" string="true">', "é" * 200]


@each
@pytest.mark.parametrize("name", NAMES)
def test_names_with_the_tags(walker: Walker, form: ToolCallFormat, name: str) -> None:
    """Every name of a property that the grammar writes is read as it is."""
    schema = {
        "type": "object", "properties": {name: INTEGER, "other": INTEGER}, "required": [name],
        "additionalProperties": False,
    }  # fmt: skip
    text = call(form, (name, "5", False), ("other", "6", False))
    assert walker.accepts(grammar_of(form, schema, strict=True), text)
    assert read(form, text, schema) == {name: 5, "other": 6}


@each
def test_names_that_hide_each_other(form: ToolCallFormat) -> None:
    """A name that would be read as another is an error in a strict schema, or is omitted."""
    tags = form.tags  # type: ignore[attr-defined]
    name = f"a{tags.after_key[0]}"
    schema = {"properties": {"a": INTEGER, name: INTEGER}}
    with pytest.raises(UnsupportedSchema) as caught:
        grammar_of(form, schema, strict=True)
    assert caught.value.path == (0, "properties", name)
    assert grammar_of(form, schema) == grammar_of(form, {"properties": {"a": INTEGER}})


@each
def test_listed_values_with_the_tags(walker: Walker, form: ToolCallFormat) -> None:
    """Listed texts may contain the tag after them, if they do not begin with another text."""
    tags = form.tags  # type: ignore[attr-defined]
    listed = [f"x{tags.closing}y", tags.closing, f"{tags.closing}\n", " x ", '"', "\\"]
    for schema in (of({"enum": listed}), of({"anyOf": [{"enum": listed}, INTEGER]})):
        text = grammar_of(form, schema, strict=True)
        for one in listed:
            written = call(form, ("a", one, True))
            assert walker.accepts(text, written)
            assert read(form, written, schema) == {"a": one}
    hidden = of({"enum": ["x", f"x{tags.closing}y"]})
    with pytest.raises(UnsupportedSchema) as caught:
        grammar_of(form, hidden, strict=True)
    assert caught.value.path == (0, "properties", "a", "enum")
    assert grammar_of(form, hidden) == grammar_of(form, of({"enum": ["x"]}))


@each
def test_listed_texts_that_are_json(walker: Walker, form: ToolCallFormat) -> None:
    """A text that would be read as JSON is written where the tag says it, or is an error."""
    hidden = f"null{form.tags.closing}y"  # type: ignore[attr-defined]
    schema = of({"enum": ["5", 5, "[", [1], None, hidden]})
    found = [read(form, one, schema) for one in walker.texts(grammar_of(form, schema), 60)]
    for one in found:
        Draft202012Validator(schema).validate(one)
    values = [one["a"] for one in found]
    is_marked = form.tags.is_marked  # type: ignore[attr-defined]
    assert ("5" in values) is is_marked
    text = grammar_of(form, schema)
    assert walker.accepts(text, call(form, ("a", hidden, True))) is is_marked
    assert walker.accepts(text, call(form, ("a", "null", False)))
    assert read(form, call(form, ("a", "null", False)), schema) == {"a": None}
    assert 5 in values
    assert [1] in values
    if not is_marked:
        with pytest.raises(UnsupportedSchema):
            grammar_of(form, schema, strict=True)


@each
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"anyOf": [INTEGER, {"type": "string", "pattern": "a"}]}, ("anyOf", 1, "pattern")),
        ({"type": ["string", "integer"], "maxLength": 2}, ("maxLength",)),
        ({"oneOf": [STRING, {"enum": ["a", 1]}]}, ("oneOf",)),
        ({"$ref": "#/$defs/none"}, ("$ref",)),
        ({"anyOf": [STRING, {"type": "array", "uniqueItems": True}]}, ("anyOf", 1, "uniqueItems")),
    ],
)  # fmt: skip
def test_strict_unions_that_cannot_be_followed(
    form: ToolCallFormat, schema: Any, path: tuple[Any, ...]
) -> None:
    """A keyword of a strict union that is not enforced is an error; else it is dropped."""
    with pytest.raises(UnsupportedSchema) as caught:
        grammar_of(form, of(schema), strict=True)
    assert caught.value.path == (0, "properties", "a", *path)
    assert grammar_of(form, of(schema))


@each
def test_schemas_that_never_end(form: ToolCallFormat) -> None:
    """Circular and branching schemas are bounded; a value is then any value."""
    branches = {f"d{i}": {"anyOf": [ref(f"d{i + 1}")] * 3} for i in range(40)}
    parts = {f"e{i}": {"allOf": [ref(f"e{i + 1}")] * 9} for i in range(20)}
    defs = {**branches, "d40": INTEGER, **parts, "e20": INTEGER, "x": ref("y"), "y": ref("x")}
    for name in ("d0", "e0", "x"):
        schema = of(ref(name), **{"$defs": defs})
        assert grammar_of(form, schema)
        assert read(form, call(form, ("a", "1", False)), schema) == {"a": 1}
        with pytest.raises(UnsupportedSchema):
            grammar_of(form, schema, strict=True)
