"""Requests of the Messages API, read as the endpoint reads them."""

from __future__ import annotations

from typing import Any

from latimer.adapter.messages.input import Conversation, conversation_of, plain_conversation
from latimer.schemas.anthropic.messages import MessagesRequest

PATH = "/v1/messages"
ASK = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "name": "f",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


def body_of(**fields: Any) -> dict[str, Any]:
    """Return the body of a request with the given fields."""
    return {"model": "m", "max_tokens": 40, "temperature": 0, "messages": ASK, **fields}


def request_of(**fields: Any) -> MessagesRequest:
    """Return a request with the given fields."""
    return MessagesRequest.model_validate(body_of(**fields))


def read(*messages: Any, sees: bool = True, **fields: Any) -> Conversation:
    """Return the conversation of a request with the given messages."""
    return conversation_of(request_of(messages=[*messages], **fields), sees=sees)


def shown(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the messages of a request, without members that are null."""
    request = request_of(messages=[*messages], **fields)
    found = conversation_of(request).messages
    plain = plain_conversation(request)
    if plain is not None:
        assert plain == found
    return [message.model_dump(exclude_none=True) for message in found]


def user(*content: Any) -> dict[str, Any]:
    """Return a message of the user; its content is a text or blocks."""
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def said(*content: Any) -> dict[str, Any]:
    """Return a message of the assistant; its content is a text or blocks."""
    return {**user(*content), "role": "assistant"}


def system(text: str) -> dict[str, Any]:
    """Return a message with instructions."""
    return {"role": "system", "content": text}


def text(value: str, **members: Any) -> dict[str, Any]:
    """Return a block of text."""
    return {"type": "text", "text": value, **members}


def call(call_id: str = "toolu_1", **arguments: Any) -> dict[str, Any]:
    """Return a call of the tool `f`."""
    return {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}


def result(call_id: str = "toolu_1", **members: Any) -> dict[str, Any]:
    """Return the result of a call."""
    return {"type": "tool_result", "tool_use_id": call_id, **members}


def image(data: str = "aGk=", **members: Any) -> dict[str, Any]:
    """Return an image in base64."""
    source = {"type": "base64", "media_type": "image/png", "data": data}
    return {"type": "image", "source": source, **members}


def document(**source: Any) -> dict[str, Any]:
    """Return a document."""
    return {"type": "document", "source": source}
