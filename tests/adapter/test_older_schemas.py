"""Tests of JSON schemas of older drafts in every field that takes a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
# A tuple as drafts 4 to 2019-09 have it, without naming one of them.
PAIR = {
    "id": "http://x/pair",
    "type": "array",
    "items": [{"$ref": "#/definitions/few"}, {"type": "null"}],
    "additionalItems": False,
    "minItems": 2,
    "definitions": {"few": {"type": "integer", "minimum": 3, "exclusiveMinimum": True,
                            "maximum": 5}},
}  # fmt: skip
NAMED = {"name": "pair", "schema": PAIR}
ASKED = [{"role": "user", "content": "Count to 12."}]
CASES: list[tuple[str, dict[str, Any]]] = [
    (H, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
    (H, {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}}),
    (H, {"response_format": {"type": "json_object", "schema": PAIR}}),
    (H, {"response_format": {"type": "json_schema", "schema": PAIR}}),
    (H, {"json_schema": PAIR}),
    (H, {"format": PAIR}),
    (C, {"structured_outputs": {"json": PAIR}}),
    (C, {"guided_json": json.dumps(PAIR)}),
    (R, {"text": {"format": {"type": "json_schema", **NAMED}}}),
]
GIVEN: dict[str, dict[str, Any]] = {
    C: {"prompt": "Count", "max_tokens": 40},
    H: {"messages": ASKED},
    R: {"input": ASKED},
}


def text_of(path: str, reply: Any) -> str:
    """Return the text of a reply."""
    if path == R:
        return str(reply["output"][-1]["content"][0]["text"])
    (choice,) = reply["choices"]
    return str(choice["text"] if path == C else choice["message"]["content"])


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_an_answer_follows_a_schema_of_an_older_draft(
    engine: str, apps: Any, client_of: Any
) -> None:
    """In each field, the list of `items`, `definitions` and the flags of bounds are enforced."""
    async with client_of(apps(engine)) as client:
        for path, changes in CASES:
            body = {"model": "demo", "temperature": 0, **GIVEN[path], **changes}
            reply = await client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            first, second = json.loads(text_of(path, reply.json()))
            assert first in (4, 5), changes
            assert second is None


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_tool_has_a_schema_of_an_older_draft(
    engine: str, apps: Any, client_of: Any
) -> None:
    """The arguments of a strict function follow it."""
    parameters = {"type": "object", "properties": {"pair": {**PAIR, "id": "pair"}},
                  "required": ["pair"], "definitions": PAIR["definitions"]}  # fmt: skip
    tool = {"name": "f", "parameters": parameters, "strict": True}
    body = {"model": "demo", "temperature": 0, "messages": ASKED, "tool_choice": "required",
            "tools": [{"type": "function", "function": tool}]}  # fmt: skip
    async with client_of(apps(engine)) as client:
        reply = await client.post(H, json=body)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    first, second = json.loads(call["function"]["arguments"])["pair"]
    assert first in (4, 5)
    assert second is None


# Draft 3, as generators of tools still write it.
DRAFT_3 = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "required": True, "divisibleBy": 1},
        "note": {"type": "any", "required": False},
        "list": {"type": "array", "items": []},
    },
    "dependencies": {"note": "list"},
}
M = "/v1/messages"


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_tool_has_a_schema_of_draft_3(engine: str, apps: Any, client_of: Any) -> None:
    """Its call has what the schema requires; a function that is strict names what is not kept."""
    function = {"name": "f", "parameters": DRAFT_3}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (H, {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}),
        (R, {"tools": [{"type": "function", **function}], "tool_choice": "required"}),
        (M, {"tools": [{"name": "f", "input_schema": DRAFT_3}], "tool_choice": {"type": "any"}}),
    ]
    more: dict[str, dict[str, Any]] = {
        H: {"messages": ASKED},
        R: {"input": ASKED},
        M: {"messages": ASKED, "max_tokens": 99},
    }
    async with client_of(apps(engine)) as client:
        for path, body in bodies:
            whole = {"model": "demo", "temperature": 0, **more[path], **body}
            reply = await client.post(path, json=whole)
            assert reply.status_code == 200, reply.text
            assert isinstance(called(path, reply.json())["count"], int)
        strict = {"type": "function", "function": {**function, "strict": True}}
        refused = await client.post(H, json={"model": "demo", "messages": ASKED, "tools": [strict]})
    assert refused.status_code == 400
    assert "'dependencies' cannot be enforced" in refused.json()["error"]["message"]


def called(path: str, reply: Any) -> dict[str, Any]:
    """Return the arguments of the only call in a reply."""
    if path == M:
        (block,) = reply["content"]
        found: dict[str, Any] = block["input"]
        return found
    if path == R:
        (item,) = reply["output"]
        return dict(json.loads(item["arguments"]))
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    return dict(json.loads(call["function"]["arguments"]))
