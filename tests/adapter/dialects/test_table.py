"""Tests of the table of other servers' fields: complete, consistent, and documented."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from adapter.dialects.outcomes import AROUND, BASES, EQUAL, body_of, equal, own, rows, sent
from latimer.adapter.dialects import GROUPS, TABLES, Field, Where, replaced, table
from latimer.adapter.errors import InvalidRequest, with_names
from latimer.adapter.validation import parse
from latimer.schemas.openai.chat import ChatRequest
from latimer.schemas.openai.common import Request
from latimer.schemas.openai.completions import CompletionRequest
from latimer.schemas.openai.responses import ResponseRequest
from pydantic import TypeAdapter

PAGE = Path(__file__).parents[3] / "docs" / "dialects.md"
START = "<!-- table -->\n"
SCHEMAS: dict[Where, type[Request]] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "responses": ResponseRequest,
}
# Fields that are only set if the request omits them.
DEFAULTS = {"repeat_last_n", "ignore_eos"}
ADAPTERS: dict[Where, TypeAdapter[Any]] = {
    where: TypeAdapter(schema) for where, schema in SCHEMAS.items()
}


def read(where: Where, body: dict[str, Any]) -> dict[str, Any]:
    """Return the parsed request, with the fields of other servers replaced."""
    request = parse(ADAPTERS[where], (), body)
    draft = replaced(body, request.__pydantic_extra__, where)
    if draft is not None:
        request = parse(ADAPTERS[where], (), draft.body)
    found: dict[str, Any] = request.model_dump(exclude_none=True)
    return found


def refusal_of(where: Where, body: dict[str, Any]) -> InvalidRequest | None:
    """Return the error for a request, or None if it is valid."""
    try:
        read(where, body)
    except InvalidRequest as error:
        return error
    return None


def paths(fields: dict[str, Any]) -> set[str]:
    """Return the names of fields, and the paths of those inside the reasoning options."""
    return fields.keys() | {f"reasoning.{name}" for name in fields.get("reasoning", ())}


def test_the_page_shows_the_table() -> None:
    """docs/dialects.md shows the table; `LATIMER_SNAPSHOT=1` writes it again."""
    text = PAGE.read_text()
    before = text.partition(START)[0]
    if os.environ.get("LATIMER_SNAPSHOT"):
        PAGE.write_text(before + START + "\n" + table())
    assert PAGE.read_text() == before + START + "\n" + table()


def test_no_field_has_two_rows() -> None:
    """Each field has one row for each endpoint."""
    for where, fields in TABLES.items():
        if where != "responses":
            names = [f.name for group in GROUPS.values() for f in group if f.on in (None, where)]
            assert len(names) == len(set(names)) == len(fields)
    own = [(f.name, f.on) for group in GROUPS.values() for f in group]
    assert len(own) == len(set(own))


def test_responses_have_the_fields_of_chat() -> None:
    """Every field of chat is one of the Responses API, unless that has it under another name."""
    missing = TABLES["chat"].keys() - TABLES["responses"].keys()
    assert {name.partition(".")[0] for name in missing} == {
        "reasoning", "reasoning_effort", "response_format",
    }  # fmt: skip


@pytest.mark.parametrize("where", TABLES)
def test_rows_agree_with_the_schema(where: Where) -> None:
    """A field of Latimer's schema is mapped to itself, and only that is."""
    known = SCHEMAS[where].model_fields
    for field in TABLES[where].values():
        outer, _, inner = field.name.rpartition(".")
        is_same = field.verdict == "mapped" and field.apply is None
        assert is_same == ((inner if outer == "options" else field.name) in known), field.name


def test_every_mapped_field_has_an_outcome() -> None:
    """Each mapped field, and no other field, has an equal request of Latimer's own."""
    mapped = {field.name for _, field in rows("mapped") if field.apply is not None}
    assert mapped == EQUAL.keys()


@pytest.mark.parametrize(
    ("where", "field"), rows("mapped"), ids=lambda one: one if isinstance(one, str) else one.name
)
def test_a_mapped_field_equals_another_request(where: Where, field: Field) -> None:
    """A mapped field gives the same request as the fields that it is mapped to."""
    theirs = body_of(where, field, sent(field.name, field.example))
    ours = body_of(where, field, equal(where, field))
    assert read(where, theirs) == read(where, ours)
    assert field.name in EQUAL or read(where, theirs) != read(where, body_of(where, field, {}))


@pytest.mark.parametrize("where", TABLES)
def test_values_without_effect_change_nothing(where: Where) -> None:
    """A neutral value of a field, and null, give the same request as no field."""
    for field in TABLES[where].values():
        if field.verdict == "mapped" and field.apply is None:
            continue
        for value in (None, *(one for one in field.neutral if not callable(one))):
            body = body_of(where, field, {})
            assert read(where, {**body, **sent(field.name, value)}) == read(where, body), field.name


@pytest.mark.parametrize("where", TABLES)
def test_examples_have_an_effect(where: Where) -> None:
    """The example of each field is not neutral, and a refused one is refused by name, with its
    hint."""
    for field in TABLES[where].values():
        assert field.has_effect(field.example)
        body = body_of(where, field, sent(field.name, field.example))
        if field.verdict == "refused":
            error = refusal_of(where, body)
            assert error is not None, f"'{field.name}' is refused in the table, but served"
            assert (error.param, error.code) == (field.name, "unsupported_parameter")
            hint = field.note
            if where == "responses":
                hint = hint.replace("'messages'", "'input'")
                hint = hint.replace("'max_completion_tokens'", "'max_output_tokens'")
                hint = hint.replace("'reasoning_effort'", "'reasoning.effort'")
                hint = hint.replace("'max_tokens'", "'max_output_tokens'")
            assert error.message.endswith(f"'{field.name}' is not supported. {hint}")


@pytest.mark.parametrize("where", TABLES)
def test_ignored_fields_are_listed(where: Where) -> None:
    """Ignored fields are listed, and the request is the same without them."""
    for place, field in rows("ignored"):
        if place == where:
            body = body_of(where, field, {})
            fields = sent(field.name, field.example)
            assert read(where, {**body, **fields}) == read(where, body)
            draft = replaced({**body, **fields}, fields, where)
            assert draft is not None
            assert (draft.ignored, draft.unknown) == ([field.name], [])


@pytest.mark.parametrize("where", TABLES)
def test_errors_name_the_fields_that_were_sent(where: Where) -> None:
    """An error about a field that another one is mapped to names the client's field."""
    for place, field in rows("mapped"):
        if place == where and field.apply is not None:
            fields = sent(field.name, field.example)
            draft = replaced(body_of(where, field, fields), fields, where)
            assert draft is not None
            for name in draft.names.keys() & paths(equal(where, field)) - DEFAULTS:
                error = with_names(InvalidRequest(f"Invalid '{name}'.", name), draft.names)
                own = str(error.param)
                assert own.startswith((field.name, *AROUND.get((where, field.name), {})))
                assert str(error) == f"Invalid '{own}'."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n_predict": 20, "max_tokens": 26}, "n_predict"),
        ({"n_predict": 20, "num_predict": 26}, "num_predict"),
        ({"rep_pen": 1.2, "repeat_penalty": 1.1}, "rep_pen"),
        ({"options": {"temperature": 1}, "temperature": 0.5}, "options.temperature"),
        ({"options": []}, "options"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 5]}, "guided_choice[1]"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_grammar": "yes"}, "guided_grammar"),
        ({"guided_grammar": 5}, "guided_grammar"),
        ({"structured_outputs": {"json": {"type": "object"}}, "guided_json": {}}, "guided_json"),
        ({"custom_token_bans": "a"}, "custom_token_bans"),
        ({"custom_token_bans": 5}, "custom_token_bans"),
        ({"do_sample": 5}, "do_sample"),
        ({"stopping_strings": '"blin'}, "stopping_strings"),
        ({"stopping_strings": '"a" "b"'}, "stopping_strings"),
        ({"stopping_strings": '"\\x41"'}, "stopping_strings"),
        ({"custom_stopping_strings": '["a", 5]'}, "custom_stopping_strings"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "5"}, "json_schema"),
        ({"guided_json": '"' + "a" * 2**20 + '"'}, "guided_json"),
        ({"dynamic_temperature": 1}, "dynamic_temperature"),
        ({"dynamic_temperature": True}, "dynatemp_low"),
        ({"dynamic_temperature": True, "dynatemp_low": 1}, "dynatemp_high"),
        ({"dynamic_temperature": True, "dynatemp_low": 1, "dynatemp_high": 0.5}, "dynatemp_low"),
        ({"dynamic_temperature": True, "dynatemp_low": "a", "dynatemp_high": 1}, "dynatemp_low"),
        ({"dynamic_temperature": True, "dynatemp_low": 0, "dynatemp_high": 1, "temperature": 1,
          "dynatemp_range": 0.5}, "dynatemp_high"),
        ({"dynatemp_low": "a"}, "dynatemp_low"),
    ],
)  # fmt: skip
def test_contradictions_and_wrong_values_name_the_field(fields: dict[str, Any], param: str) -> None:
    """A field that contradicts another, or has a wrong value, is a 400 that names it."""
    for where, base in BASES.items():
        with pytest.raises(InvalidRequest) as caught:
            read(where, {"model": "m", **base, **own(where, fields)})
        assert caught.value.param == param
        assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n_predict": 20, "max_tokens": 20}, {"max_tokens": 20}),
        ({"rep_pen": 1.2, "rep_pen_range": 64}, {"repeat_penalty": 1.2, "repeat_last_n": 64}),
        ({"rep_pen_range": 64, "rep_pen": 1.2}, {"repeat_penalty": 1.2, "repeat_last_n": 64}),
        ({"repetition_penalty": 1.2, "repeat_last_n": 9},
         {"repeat_penalty": 1.2, "repeat_last_n": 9}),
        ({"repetition_penalty_range": 0}, {"repeat_last_n": -1}),
        ({"repetition_penalty_range": 0, "rep_pen_range": 0, "repeat_last_n": 0},
         {"repeat_last_n": 0}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": {"type": "object"}}),
        ({"format": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json": '{"a": 1}', "regex": None}}, {"json_schema": {"a": 1}}),
        ({"guided_choice": ["a", "a", 'b"\n']}, {"grammar": 'root ::= "a" | "b\\x22\\x0A"'}),
        ({"guided_grammar": "%llguidance {}\nstart: /a+/"},
         {"lark": "%llguidance {}\nstart: /a+/"}),
        ({"guided_grammar": '?start: "a" "b"'}, {"lark": '?start: "a" "b"'}),
        ({"guided_grammar": 'root ::= "a:" b\nb ::= "c: d"'},
         {"grammar": 'root ::= "a:" b\nb ::= "c: d"'}),
        ({"sampler_seed": -1}, {}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"logit_bias": {"9": 1}, "custom_token_bans": "5"},
         {"logit_bias": {"9": 1.0, "5": -100.0}}),
        ({"samplers": "edskypmxt"}, {}),
        ({"n_predict": -2.0}, {"max_tokens": -2}),
        ({"n_predict": -1.0}, {"max_tokens": -1}),
        ({"num_predict": 30.0}, {"max_tokens": 30}),
        ({"max_length": 30.0}, {"max_tokens": 30}),
        ({"max_new_tokens": 30.0}, {"max_tokens": 30}),
        ({"options": {"num_predict": 30.0, "seed": 4.0}}, {"max_tokens": 30, "seed": 4}),
        ({"sampler_seed": 3.0, "options": {"temperature": 0.5}}, {"seed": 3, "temperature": 0.5}),
        ({"stopping_strings": '"blin"'}, {"stop": ["blin"]}),
        ({"custom_stopping_strings": '["blin"]'}, {"stop": ["blin"]}),
        ({"stopping_strings": '"\\n#", \'it\\\'s "so"\''}, {"stop": ["\n#", 'it\'s "so"']}),
        ({"stopping_strings": "\n###"}, {"stop": "\n###"}),
        ({"stopping_strings": "[/INST]"}, {"stop": "[/INST]"}),
        ({"stopping_strings": "[]", "custom_stopping_strings": ""}, {}),
        ({"json_schema": '{"type": "object"}'}, {"json_schema": {"type": "object"}}),
        ({"json_schema": ""}, {}),
        ({"dynamic_temperature": True, "dynatemp_low": 0.5, "dynatemp_high": 1.5,
          "dynatemp_range": 0.5, "temperature": 1}, {"dynatemp_range": 0.5, "temperature": 1}),
        ({"dynamic_temperature": True, "dynatemp_low": 0.1, "dynatemp_high": 0.8,
          "dynatemp_range": 0.35, "temperature": 0.45},
         {"dynatemp_range": 0.35, "temperature": 0.45}),
        ({"dynamic_temperature": True, "dynatemp_low": 0.5, "dynatemp_high": 1, "temperature": 1},
         {"dynatemp_range": 0.25, "temperature": 0.75}),
        ({"dynamic_temperature": True, "dynatemp_range": 0.5}, {"dynatemp_range": 0.5}),
        ({"dynatemp_low": 1, "dynatemp_high": 1}, {}),
        ({"usage": {"include": True}, "stream": True},
         {"stream": True, "stream_options": {"include_usage": True}}),
    ],
)  # fmt: skip
def test_values_are_translated(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    """Values keep their meaning in Latimer's own fields."""
    for where, base in BASES.items():
        body = {"model": "m", **base}
        theirs, ours = own(where, fields), own(where, expected)
        assert read(where, {**body, **theirs}) == read(where, {**body, **ours})


def test_a_placeholder_is_searched_in_place() -> None:
    """koboldcpp's placeholders are searched in the texts of messages, of which none is copied."""
    extra = {"replace_instruct_placeholders": True}
    for text in ("Hi {{[INPUT]}}", [{"type": "text", "text": "{{[INPUT]}}"}]):
        with pytest.raises(InvalidRequest, match="replace_instruct_placeholders"):
            replaced({"messages": [{"role": "user", "content": text}], **extra}, extra, "chat")
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 20_000_000}]}]
    tracemalloc.start()
    try:
        assert replaced({"messages": messages, **extra}, extra, "chat") is not None
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_reasoning_in_all_spellings() -> None:
    """The fields of every server for reasoning give the same request."""
    spellings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": True}, {"enable_thinking": True}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"think": True}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "high", "enabled": True, "exclude": False}},
         {"reasoning_effort": "high", "enable_thinking": True}),
    ]  # fmt: skip
    body = {"model": "m", **BASES["chat"]}
    for fields, expected in spellings:
        assert read("chat", {**body, **fields}) == read("chat", {**body, **expected})
    for wrong in ({"thinking": {"type": "maybe"}}, {"thinking": 5}, {"think": "loud"}):
        with pytest.raises(InvalidRequest):
            read("chat", {**body, **wrong})
