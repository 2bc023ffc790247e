"""Tests of other servers' constraints: response formats of completions, and schemas with tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from adapter.dialects.outcomes import BASES, PATHS, SCHEMA
from conftest import Client

BODY = {"model": "demo", "temperature": 0, "max_tokens": 40}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BOOLEAN = {"type": "boolean"}


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ({"type": "json_object"}, dict),
        ({"type": "json_object", "schema": BOOLEAN}, bool),
        ({"type": "json_schema", "schema": BOOLEAN}, bool),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": BOOLEAN}}, bool),
    ],
)
async def test_a_completion_follows_a_response_format(
    demo: httpx2.AsyncClient, form: dict[str, Any], kind: type
) -> None:
    """A completion follows each form of `response_format`."""
    body = {**BODY, **BASES["completions"], "response_format": form}
    reply = await demo.post(PATHS["completions"], json=body)
    assert reply.status_code == 200, reply.text
    assert isinstance(json.loads(reply.json()["choices"][0]["text"]), kind)


@pytest.mark.parametrize("where", PATHS)
async def test_an_unknown_field_of_a_schemas_object_is_listed(
    demo: httpx2.AsyncClient, where: Any
) -> None:
    """A field of `json_schema` that has no meaning is listed, in completions as in chat."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": BOOLEAN, "mood": 1}}
    reply = await demo.post(PATHS[where], json={**BODY, **BASES[where], "response_format": form})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-latimer-ignored"] == "response_format.json_schema.mood"


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_schema_beside_tools(
    engine: str, choice: str, apps: Callable[[str], Any], client_of: Client
) -> None:
    """A schema in any spelling with tools is the same as a `response_format`."""
    named = {"name": "a", "schema": SCHEMA}
    messages = []
    async with client_of(apps(engine)) as client:
        for fields in (
            {"response_format": {"type": "json_schema", "json_schema": named}},
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            {"format": SCHEMA},
            {"json_schema": json.dumps(SCHEMA)},
        ):
            body = {**BODY, **BASES["chat"], "tools": [TOOL], "tool_choice": choice, **fields}
            reply = await client.post(PATHS["chat"], json=body)
            assert reply.status_code == 200, reply.text
            message = reply.json()["choices"][0]["message"]
            for call in message.get("tool_calls", ()):
                del call["id"]
            messages.append(message)
    assert all(one == messages[0] for one in messages)
    if choice == "required":
        assert [call["function"]["name"] for call in messages[0]["tool_calls"]] == ["f"]
    elif messages[0]["content"]:
        assert isinstance(json.loads(messages[0]["content"])["a"], bool)
