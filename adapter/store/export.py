"""Stored chat completions as lines of a file for fine-tuning (no I/O).

A line is an example in OpenAI's chat format, which TRL, axolotl and LLaMA-Factory read as well:
the messages of the request, then the assistant's message of one choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from .record import Stored

# OpenAI's `object` of chat completions.
KIND = "chat.completion"
# The keys of an assistant's message that fine-tuning accepts, and those that must not be null.
_KEYS = ("role", "content", "name", "refusal", "tool_calls", "function_call")
_OPTIONAL = _KEYS[2:]
# The names of the field for reasoning.
_REASONING = ("reasoning_content", "reasoning")
# The fields of a request that belong to an example.
_FIELDS = ("tools", "parallel_tool_calls", "functions")


def lines(stored: Stored, reasoning: bool = False) -> list[bytes]:
    """Return the lines of a chat completion, without line ends: one for each choice.

    A choice without content, refusal and calls, such as one that was cut off while the model was
    reasoning, has no line.

    Args:
        reasoning: keep the reasoning of assistants, as `reasoning_content`.
    """
    request = stored.request
    messages = [_message(one, reasoning) for one in request["messages"]]
    fields = {name: request[name] for name in _FIELDS if request.get(name) is not None}
    continued = messages.pop() if messages and _is_continued(request, messages[-1]) else None
    found = []
    for choice in stored.reply["choices"]:
        answer = _message(choice["message"], reasoning)
        if any(answer.get(name) for name in ("content", "refusal", "tool_calls", "function_call")):
            if continued is not None:
                answer = _joined(continued, answer)
            found.append(orjson.dumps({"messages": [*messages, answer], **fields}))
    return found


def _message(message: Mapping[str, Any], reasoning: bool) -> dict[str, Any]:
    if message.get("role") != "assistant":
        return dict(message)
    kept = {
        name: message.get(name)
        for name in _KEYS
        if name not in _OPTIONAL or message.get(name) not in (None, [])
    }
    text = next((message[name] for name in _REASONING if message.get(name)), None)
    if reasoning and text is not None:
        kept["reasoning_content"] = text
    return kept


def _is_continued(request: Mapping[str, Any], last: Mapping[str, Any]) -> bool:
    """Return True if the answer continues the last message of a request."""
    if last["role"] != "assistant" or last.get("tool_calls"):
        return False
    begins, continues = (
        request.get(name) for name in ("add_generation_prompt", "continue_final_message")
    )
    return bool(continues) or (begins is None and continues is None)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of an assistant and its continuation as one message."""
    content = _text(first["content"]) + (second["content"] or "")
    return {**first, **second, "content": content}


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    return content or ""
