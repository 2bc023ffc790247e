"""Requests of the Responses API, read as the endpoint reads them."""

from __future__ import annotations

from typing import Any

from latimer.adapter.responses.input import Conversation, conversation_of
from latimer.adapter.responses.tools import Tools, tools_of
from latimer.adapter.validation import parse
from latimer.schemas.openai.response_items import Item
from latimer.schemas.openai.responses import ResponseRequest
from pydantic import TypeAdapter

_REQUEST: TypeAdapter[ResponseRequest] = TypeAdapter(ResponseRequest)
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def request_of(**fields: Any) -> ResponseRequest:
    """Return a request with the given fields."""
    return parse(_REQUEST, (), {"model": "m", "input": "Hi", **fields})


def read(**fields: Any) -> tuple[Conversation, Tools]:
    """Return the conversation and the tools of a request."""
    request = request_of(**fields)
    tools = tools_of(request)
    return conversation_of(request), tools


def shown(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the messages of a request with the given items, without members that are null."""
    conversation = conversation_of(request_of(input=list(items), **fields))
    return [message.model_dump(exclude_none=True) for message in conversation.messages]


def user(content: Any = "Hi", **members: Any) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": content, **members}


def said(text: str, **members: Any) -> dict[str, Any]:
    """Return a message of the assistant, as a response has it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    own = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    return {**own, "content": [part], **members}


def thought(text: str, **members: Any) -> dict[str, Any]:
    """Return a reasoning item, as a response has it."""
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **members}


def call(call_id: str, name: str = "f", arguments: str = "{}", **members: Any) -> dict[str, Any]:
    """Return a function call."""
    own = {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
    return {**own, **members}


def output(call_id: str | None, text: Any = "out", **members: Any) -> dict[str, Any]:
    """Return the output of a function call."""
    own = {"type": "function_call_output", "output": text, **members}
    return own if call_id is None else {**own, "call_id": call_id}
