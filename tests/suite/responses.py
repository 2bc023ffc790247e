"""The Responses API of the toy server, on top of its chat completions."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from suite.rules import NUMBERS, Refused
from suite.work import CHAT, Work

_numbers = itertools.count(1)


def check(body: Mapping[str, Any]) -> None:
    """Raise `Refused` for the first error in a request."""
    if not isinstance(body.get("input"), str | list):
        raise Refused("Invalid type for 'input'.", "input", "invalid_type")
    limit = body.get("max_output_tokens")
    if limit is not None and type(limit) is not int:
        raise Refused("Invalid type.", "max_output_tokens", "invalid_type")
    if limit is not None and limit < 16:
        raise Refused("Below minimum value.", "max_output_tokens", "integer_below_min_value")
    for name in ("temperature", "top_p"):
        low, high = NUMBERS[name]
        if body.get(name) is not None and not low <= body[name] <= high:
            raise Refused(f"Invalid '{name}'.", name, "out_of_range")


def as_chat(body: Mapping[str, Any], before: list[Any]) -> dict[str, Any]:
    """Return a request as a chat request.

    Args:
        before: the messages up to and including the previous response.
    """
    told = {"role": "system", "content": body.get("instructions")}
    messages = [told] if body.get("instructions") else []
    given = body["input"]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice["name"]}}
    form = (body.get("text") or {}).get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    return {
        "model": body["model"], "messages": [*messages, *before, *map(_message, items)],
        "max_tokens": body.get("max_output_tokens"), "temperature": body.get("temperature"),
        "top_p": body.get("top_p"), "tool_choice": choice, "response_format": form,
        "tools": [{"type": "function", "function": tool} for tool in body.get("tools") or ()],
    }  # fmt: skip


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type") == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if item.get("type") == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}
    content = item["content"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return {"role": item["role"], "content": content}


def answer(body: Mapping[str, Any], chat: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the complete response."""
    work = Work(CHAT, chat)
    work.check_context()
    choice = work.choices()[0]
    cut = choice.reason == "length"
    status = "incomplete" if cut else "completed"
    usage = work.usage()
    return {
        "id": f"resp_{next(_numbers)}", "object": "response", "created_at": now // 1,
        "status": status, "error": None, "model": body["model"],
        "text": {"format": {"type": "text"}},
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"), "tools": body.get("tools") or [],
        "output": _output(choice, status), "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto", "store": body.get("store") is not False,
        "temperature": float(1 if body.get("temperature") is None else body["temperature"]),
        "top_p": float(1 if body.get("top_p") is None else body["top_p"]),
        "previous_response_id": body.get("previous_response_id"),
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": usage["total_tokens"],
        },
    }  # fmt: skip


def _output(choice: Any, status: str) -> list[Any]:
    number = next(_numbers)
    if choice.calls:
        return [
            {"type": "function_call", "id": f"fc_{number}_{at}", "call_id": f"call_{number}_{at}",
             "name": call.name, "arguments": call.text, "status": status}
            for at, call in enumerate(choice.calls)
        ]  # fmt: skip
    part = {"type": "output_text", "text": choice.text, "annotations": [], "logprobs": []}
    return [{"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status,
             "content": [part]}]  # fmt: skip


def events(whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed response."""
    begun = {**whole, "status": "in_progress", "output": [], "usage": None,
             "incomplete_details": None}  # fmt: skip
    found: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        found += _item_events(index, item)
    found.append({"type": f"response.{whole['status']}", "response": whole})
    return [{**event, "sequence_number": at} for at, event in enumerate(found)]


def _item_events(index: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    at = {"item_id": item["id"], "output_index": index}
    calling = item["type"] == "function_call"
    empty: dict[str, Any] = {"arguments": ""} if calling else {"content": []}
    begun = {**item, **empty, "status": "in_progress"}
    found = [{"type": "response.output_item.added", "output_index": index, "item": begun}]
    if calling:
        kind, text = "response.function_call_arguments", item["arguments"]
        found += [{"type": f"{kind}.delta", **at, "delta": piece} for piece in _pieces(text)]
        found.append({"type": f"{kind}.done", **at, "name": item["name"], "arguments": text})
    else:
        at = {**at, "content_index": 0}
        part = item["content"][0]
        kind, text = "response.output_text", part["text"]
        found.append({"type": "response.content_part.added", **at, "part": {**part, "text": ""}})
        found += [
            {"type": f"{kind}.delta", **at, "delta": piece, "logprobs": []}
            for piece in _pieces(text)
        ]
        found.append({"type": f"{kind}.done", **at, "text": text, "logprobs": []})
        found.append({"type": "response.content_part.done", **at, "part": part})
    found.append({"type": "response.output_item.done", "output_index": index, "item": item})
    return found


def _pieces(text: str) -> list[str]:
    return [text[at : at + 6] for at in range(0, len(text), 6)]


def turn_of(body: Mapping[str, Any]) -> list[Any]:
    """Return a response as messages of the conversation."""
    return [
        {"role": "assistant", "content": "".join(part["text"] for part in item["content"])}
        for item in body["output"]
        if item["type"] == "message"
    ]
