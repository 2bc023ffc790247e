"""Tests that calls of strict functions match their schemas where the model chooses to call."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ENGINES
from jsonschema import Draft202012Validator
from support.samples import sample

pytestmark = pytest.mark.slow

ASK = "What is the weather in Paris?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "strict": True, "parameters": SCHEMA}
# The call of the first conversation breaks the schema, which models repeat.
CALL = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
MESSAGES = [
    {"role": "user", "content": ASK},
    {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18"},
    {"role": "user", "content": "And what is the weather in Rome?"},
]
ITEMS = [
    {"role": "user", "content": ASK},
    {"type": "function_call", "call_id": "call_1", **CALL},
    {"type": "function_call_output", "call_id": "call_1", "output": "18"},
    {"role": "user", "content": "And what is the weather in Rome?"},
]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def request(number: int) -> tuple[str, dict[str, Any]]:
    """Return a path and a body, of chat or Responses, after a question or the broken call."""
    body = {"model": "m", "temperature": 1, "tool_choice": "auto"}
    if number % 4 < 2:
        tools = [{"type": "function", "function": FUNCTION}]
        messages = MESSAGES if number % 2 else MESSAGES[:1]
        return CHAT, {**body, "tools": tools, "messages": messages, "max_tokens": 256,
                      "seed": number}  # fmt: skip
    return RESPONSES, {**body, "tools": [{"type": "function", **FUNCTION}], "store": False,
                       "input": ITEMS if number % 2 else ASK, "max_output_tokens": 256}  # fmt: skip


def arguments_of(path: str, body: Any) -> list[str]:
    """Return the arguments of all calls in a response that did not reach its token limit."""
    if path == CHAT:
        choice = body["choices"][0]
        calls = choice["message"].get("tool_calls") or ()
        is_whole = choice["finish_reason"] != "length"
        return [call["function"]["arguments"] for call in calls] if is_whole else []
    calls = [item for item in body["output"] if item["type"] == "function_call"]
    return [call["arguments"] for call in calls] if body["status"] == "completed" else []


@pytest.mark.parametrize("engine", ENGINES)
async def test_calls_of_strict_functions_are_valid(
    apps: Callable[[str], Any], client_of: Any, engine: str
) -> None:
    """With `tool_choice: auto` at temperature 1, every call of a strict function matches its
    schema, in chat and in Responses."""
    if engine == "koboldcpp" and not os.environ.get("LATIMER_KOBOLDCPP_URL"):
        pytest.skip("sampled answers need a running koboldcpp")
    asked = [request(number) for number in range(sample(40, 200))]
    places = asyncio.Semaphore(8)

    async def send(path: str, body: dict[str, Any]) -> Any:
        async with places:
            reply = await client.post(path, json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async with client_of(apps(engine)) as client:
        replies = await asyncio.gather(*(send(*one) for one in asked))
    arguments = [
        text
        for (path, _), reply in zip(asked, replies, strict=True)
        for text in arguments_of(path, reply)
    ]
    valid = Draft202012Validator(SCHEMA)
    assert [text for text in arguments if not valid.is_valid(json.loads(text))] == []
    # The model calls in most of its answers.
    assert len(arguments) > len(asked) / 2
