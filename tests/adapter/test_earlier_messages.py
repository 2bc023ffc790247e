"""Tests of the fields that earlier messages of a conversation may have."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from latimer.backends.llama_cpp import LlamaCpp
from latimer.schemas.openai.chat import ChatDelta, ChatMessage
from latimer.schemas.openai.messages import REASONING_FIELDS, AssistantMessage
from support import scripted
from support.clients import adapting

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}


def test_each_field_for_thoughts_is_read() -> None:
    """Earlier reasoning is read from each of its fields, and an empty one does not hide it."""
    for field in REASONING_FIELDS:
        message = {"role": "assistant", **dict.fromkeys(REASONING_FIELDS, ""), field: "Hm."}
        assert AssistantMessage.model_validate(message).earlier_reasoning == "Hm."


async def test_images_of_ollama_are_refused_by_name(echo: httpx2.AsyncClient) -> None:
    """A message with `images` is a 400 that names the field, unless the list is empty."""
    for images, status in ((["aGk="], 400), ([], 200)):
        messages = [{"role": "user", "content": "?", "images": images}]
        body = {"model": "m", "messages": messages, "max_tokens": 1}
        reply = await echo.post("/v1/chat/completions", json=body)
        assert reply.status_code == status
        if status == 400:
            error = reply.json()["error"]
            assert error["param"] == "messages[0].images"
            assert error["code"] == "unsupported_parameter"


def test_every_field_of_a_response_is_a_field_of_a_request() -> None:
    """A request's messages have every field of a response's message and deltas."""
    fields = ChatMessage.__annotations__.keys() | ChatDelta.__annotations__.keys()
    assert fields <= AssistantMessage.model_fields.keys()


@pytest.mark.parametrize("strict", [False, True])
async def test_a_response_can_be_sent_back(tmp_path: Path, strict: bool) -> None:
    """The message of a response is accepted in the next request, and no field of it is listed."""
    call = '<tool_call>{"name": "f", "arguments": {"a": 5}}</tool_call>'
    path = scripted.scripted(tmp_path / "model.gguf", [call], scripted.HERMES, ())
    asked = {"role": "user", "content": "?"}
    async with adapting(LlamaCpp(path), strict=strict) as client:
        body = {"model": "m", "messages": [asked]}
        for tools in ({}, {"tools": [TOOL]}):
            first = await client.post("/v1/chat/completions", json={**body, **tools})
            message = first.json()["choices"][0]["message"]
            message |= {"audio": None, "function_call": None, "parsed": {"a": 5}}
            results = []
            for index, made in enumerate(message.setdefault("tool_calls", [])):
                made["index"] = index
                made["function"]["parsed_arguments"] = {"a": 5}
                results.append({"role": "tool", "tool_call_id": made["id"], "content": "6"})
            assert len(results) == len(tools)
            message["tool_calls"] = message["tool_calls"] or None
            again = {**body, **tools, "messages": [asked, message, *results, asked]}
            reply = await client.post("/v1/chat/completions", json=again)
            assert reply.status_code == 200, reply.text
            assert "x-latimer-ignored" not in reply.headers


async def test_a_refusal_is_part_of_the_prompt(echo: httpx2.AsyncClient) -> None:
    """An earlier refusal, as a field or a part, has the same prompt as that text as content."""
    counts = []
    text = "I cannot help."
    part = {"type": "refusal", "refusal": text}
    for said in ({"content": text}, {"content": None, "refusal": text}, {"content": [part]}):
        asked = {"role": "user", "content": "?"}
        messages = [asked, {"role": "assistant", **said}, asked]
        body = {"model": "m", "messages": messages, "max_tokens": 1}
        reply = await echo.post("/v1/chat/completions", json=body)
        counts.append(reply.json()["usage"]["prompt_tokens"])
    assert len(set(counts)) == 1
