"""Tests of the requests that real clients send: nothing in them is unknown, and all are served."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from conftest import Client
from latimer.adapter import OpenAIAdapter
from latimer.adapter.validation import unknown_fields
from latimer.backends.llama_cpp import LlamaCpp
from support.response_events import events_in

from .clients import CLIENTS, Sent
from .requests import read, request_of

R = "/v1/responses"


@pytest.mark.parametrize("name", CLIENTS)
def test_a_clients_request_is_understood(name: str) -> None:
    """Each item and each tool of a client's request has its place, or is listed."""
    sent: Sent = CLIENTS[name]
    conversation, tools = read(**sent.body)
    assert [message.role for message in conversation.messages] == sent.roles
    assert [*tools.names] == sent.names
    assert [*tools.ignored, *conversation.ignored] == sent.ignored
    assert unknown_fields(request_of(**sent.body)) == []


@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "langchain-openai"])
async def test_a_clients_request_is_answered(demo: httpx2.AsyncClient, name: str) -> None:
    """A client's request is answered, and names what has no effect."""
    sent: Sent = CLIENTS[name]
    reply = await demo.post(R, json={**sent.body, "max_output_tokens": 16})
    assert reply.status_code == 200, reply.text
    whole = events_in(reply.text)[-1]["response"] if sent.body.get("stream") else reply.json()
    assert whole["status"] in ("completed", "incomplete")
    listed = reply.headers.get("x-latimer-ignored", "").split(", ")
    assert set(sent.ignored) <= set(listed)


TOOL = {"name": "f", "parameters": {"type": "object"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


async def test_the_prompt_is_that_of_chat(demo: httpx2.AsyncClient) -> None:
    """A conversation with tools has as many prompt tokens as in chat, in any order of outputs."""
    chat = await demo.post("/v1/chat/completions", json={
        "model": "demo", "max_tokens": 1, "tools": [{"type": "function", "function": TOOL}],
        "messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "a", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "one"},
            {"role": "tool", "tool_call_id": "call_2", "content": "two"},
        ],
    })  # fmt: skip
    calls = [
        {"type": "function_call", "call_id": one, "name": "f", "arguments": "{}"}
        for one in ("call_1", "call_2")
    ]
    outputs = [
        {"type": "function_call_output", "call_id": one, "output": text}
        for one, text in (("call_1", "one"), ("call_2", "two"))
    ]
    for order in (1, -1):
        items = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"},
                 *calls, *outputs[::order]]  # fmt: skip
        reply = await demo.post(R, json={
            "model": "demo", "instructions": "Be brief.", "input": items,
            "tools": [{"type": "function", **TOOL}], "max_output_tokens": 16,
        })  # fmt: skip
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]


async def test_a_final_message_of_the_assistant_is_not_continued(demo: httpx2.AsyncClient) -> None:
    """A turn begins after an assistant's message, unless the request continues that message."""
    items = [{"role": "user", "content": "Count to 12."}, {"role": "assistant", "content": "1, 2"}]
    texts = []
    for fields in ({}, {"continue_final_message": True}):
        body = {"model": "demo", "input": items, "temperature": 0, "max_output_tokens": 16}
        reply = await demo.post(R, json={**body, **fields})
        assert reply.status_code == 200, reply.text
        texts.append(reply.json()["output"][0]["content"][0]["text"])
    assert texts[1].startswith(", 3")
    assert texts[0] != texts[1]


SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_object"}}},
        {"json_schema": SCHEMA},
        {"guided_json": SCHEMA},
    ],
)
async def test_a_text_follows_its_format(demo: httpx2.AsyncClient, fields: dict[str, Any]) -> None:
    """A text follows `text.format`, and the fields of Latimer and of other servers."""
    body = {"model": "demo", "input": "Is Paris in France?", "temperature": 0, **fields}
    reply = await demo.post(R, json={**body, "max_output_tokens": 60})
    assert reply.status_code == 200, reply.text
    text = reply.json()["output"][0]["content"][0]["text"]
    if fields.get("text") != {"format": {"type": "json_object"}}:
        assert isinstance(json.loads(text)["a"], bool)
    assert text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "x"}}}},
         "text.format.schema", None),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema",
         "unknown_parameter"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "text.format",
         "invalid_value"),
        ({"lark": "start: ("}, "lark", "invalid_value"),
        ({"tools": [{"type": "custom", "name": "p", "format": {
            "type": "grammar", "syntax": "regex", "definition": "("}}]},
         "tools[0].format.definition", "invalid_value"),
        ({"min_tokens": 20, "max_output_tokens": 16}, "min_tokens", "invalid_value"),
        ({"n_predict": -3}, "n_predict", "integer_below_min_value"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "data:image/png;base64,aGk="}]}]},
         "input[0].content[0].type", "unsupported_parameter"),
    ],
)  # fmt: skip
async def test_errors_name_the_fields_of_the_request(
    demo: httpx2.AsyncClient, fields: dict[str, Any], param: str, code: str | None
) -> None:
    """An error that chat's code finds names the field of the Responses request."""
    reply = await demo.post(R, json={"model": "demo", "input": "Hi", **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert "max_tokens" not in error["message"]
    assert "response_format." not in error["message"]


async def test_strict_rejects_what_it_ignores(client_of: Client) -> None:
    """A strict server rejects what has no effect, and the fields that OpenAI's API lacks."""
    backend = LlamaCpp()
    app = OpenAIAdapter(backend, any_model=True, strict=True)
    body = {"model": "demo", "input": "Hi", "max_output_tokens": 16}
    async with client_of(app) as client:
        for fields, param, code in (
            ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_parameter"),
            ({"stop": "a"}, "stop", "unknown_parameter"),
            ({"seed": 1}, "seed", "unknown_parameter"),
            ({"n_predict": 16, "max_output_tokens": None, "rep_pen": 1.1}, "rep_pen",
             "unknown_parameter"),
            ({"foo": 1}, "foo", "unknown_parameter"),
            ({"input": [{"role": "user", "content": "a", "bogus": 1}]}, "input[0].bogus",
             "unknown_parameter"),
            ({"reasoning": {"effort": "low"}}, "reasoning.effort", "unsupported_parameter"),
        ):  # fmt: skip
            reply = await client.post(R, json={**body, **fields})
            assert reply.status_code == 400, (fields, reply.text)
            error = reply.json()["error"]
            assert (error["param"], error["code"]) == (param, code)
        reply = await client.post(R, json={**body, "client_metadata": {}, "temperature": 0})
        assert reply.status_code == 200, reply.text
    await backend.aclose()
