"""Faults in tool calls."""

from __future__ import annotations

import json
from typing import Any

from suite.faults.base import broken, calls, deltas, messages, only, parts, refuse, take, without
from suite.work import CHAT

TOOL = {"type": "function", "function": {"name": "get_weather"}}
AND = {"role": "user", "content": "And?"}
broken("tools-ignored", valid=without("tools", "tool_choice"))
broken(
    "tools-finish-stop",
    reply=only(CHAT, lambda body: _each(body, lambda c: c.update(finish_reason="stop"))),
)
broken(
    "tools-finish-word",
    reply=only(CHAT, lambda body: _each(body, lambda c: _word(c, "tool_calls", "function_calls"))),
)
broken("tools-content-empty", reply=messages(lambda m: m.update(content=m["content"] or "")))
broken("tools-arguments-object", reply=calls(lambda call: _replace(call, _loaded)))
broken("tools-arguments-cut", reply=calls(lambda call: _replace(call, lambda text: text[:-1])))
broken(
    "tools-arguments-free",
    reply=calls(lambda call: _replace(call, lambda text: text.replace("Paris", "Lima"))),
)
broken("tools-same-id", reply=calls(lambda call: call.update(id="call_1")))
broken("tools-id-empty", reply=calls(lambda call: call.update(id="")))
broken("tools-id-bare", reply=calls(lambda call: call.update(id=call["id"][5:])))
broken("tools-no-type", reply=calls(lambda call: call.pop("type")))
broken(
    "tools-other-name",
    reply=calls(lambda call: call.get("function", {}).update(name="no_tool")),
)
broken(
    "tools-none-calls",
    valid=lambda path, body: (
        {**body, "tool_choice": "required"} if body.get("tool_choice") == "none" else body
    ),
)
broken(
    "tools-named-ignored",
    valid=lambda path, body: (
        {**body, "tool_choice": "required"} if isinstance(body.get("tool_choice"), dict) else body
    ),
)
broken(
    "tools-required-ignored",
    valid=lambda path, body: (
        {**body, "tool_choice": "none"} if body.get("tool_choice") == "required" else body
    ),
)
broken(
    "tools-empty-calls-with-text",
    reply=messages(lambda m: m.update(tool_calls=[]) if m["content"] else None),
)
broken(
    "tools-never-length",
    reply=only(CHAT, lambda body: _each(body, lambda c: _ended(c))),
)
broken("tools-parallel-always", valid=without("parallel_tool_calls"))
broken(
    "tools-several-merged",
    reply=messages(
        lambda m: (
            m["tool_calls"][0]["function"].update(
                arguments="".join(call["function"]["arguments"] for call in m["tool_calls"])
            )
            if len(m.get("tool_calls") or ()) > 1
            else None
        )
    ),
)
broken(
    "tools-needs-parameters",
    request=refuse(
        lambda body: any("parameters" not in t.get("function", {"parameters": 0})
                         for t in _tools(body)), CHAT,
    ),
)  # fmt: skip
broken(
    "tools-no-arguments-empty",
    reply=calls(lambda call: _replace(call, lambda text: "" if text == "{}" else text)),
)
broken(
    "tools-unicode-lost",
    reply=calls(lambda call: _replace(call, lambda text: text.encode("ascii", "replace").decode())),
)
broken(
    "tools-nested-flat",
    reply=calls(lambda call: _replace(call, lambda text: text.replace("[", '"').replace("]", '"'))),
)
broken(
    "tools-one-choice",
    valid=lambda path, body: (
        {**body, "tools": None, "tool_choice": None}
        if body.get("tools") and (body.get("n") or 1) > 1
        else body
    ),
)
broken(
    "tools-not-told", reply=lambda path, body, sent: _untold(body, sent) if path == CHAT else body
)
broken(
    "tools-results-unread",
    valid=lambda path, body: (
        {**body, "messages": [
            {**m, "content": ""} if m["role"] == "tool" else m for m in body["messages"]
        ]}
        if path == CHAT else body
    ),
)  # fmt: skip
broken(
    "tools-needs-content",
    request=refuse(lambda body: any("content" not in m and m.get("tool_calls")
                                    for m in _messages(body)), CHAT),
)  # fmt: skip
broken(
    "tools-null-content-refused",
    request=refuse(lambda body: any(m.get("tool_calls") and m.get("content", "") is None
                                    for m in _messages(body)), CHAT),
)  # fmt: skip
broken(
    "tools-result-parts-refused",
    request=refuse(lambda body: any(m.get("role") == "tool" and isinstance(m["content"], list)
                                    for m in _messages(body)), CHAT),
)  # fmt: skip
broken(
    "tools-orphans-taken",
    request=take(lambda body: AND in _messages(body), CHAT, messages=[AND]),
)
broken(
    "tools-empty-list-taken",
    request=take(lambda body: any(m.get("tool_calls") == [] for m in _messages(body)), CHAT,
                 messages=[{"role": "user", "content": "Hello"}]),
)  # fmt: skip
broken(
    "tools-choice-word-taken",
    request=take(lambda body: body.get("tool_choice") == "sometimes", CHAT, tool_choice="auto"),
)
broken(
    "tools-choice-unknown-taken",
    request=take(lambda body: "no_tool" in str(body.get("tool_choice")), CHAT, tool_choice="auto"),
)
broken(
    "tools-no-name-taken",
    request=take(lambda body: any(t.get("function") == {} for t in _tools(body)), CHAT,
                 tools=[TOOL]),
)  # fmt: skip
broken(
    "tools-any-name-taken",
    request=take(lambda body: "no name!" in str(_tools(body)), CHAT, tools=[TOOL]),
)
broken(
    "tools-many-taken",
    request=take(lambda body: len(_tools(body)) > 128, CHAT, tools=[TOOL]),
)
broken(
    "tools-any-type-taken",
    request=take(lambda body: "no_type" in str(_tools(body)), CHAT, tools=[TOOL]),
)
broken(
    "tools-any-parameters-taken",
    request=take(lambda body: any((t.get("function") or {}).get("parameters") == []
                                  for t in _tools(body)), CHAT, tools=[TOOL]),
)  # fmt: skip
broken(
    "tools-choice-alone-taken",
    request=take(lambda body: body.get("tool_choice") and not body.get("tools"), CHAT,
                 tool_choice=None),
)  # fmt: skip
broken(
    "tools-allowed-ignored",
    valid=lambda path, body: (
        {**body, "tool_choice": "required"} if "allowed_tools" in str(body.get("tool_choice"))
        else body
    ),
)  # fmt: skip
broken(
    "tools-custom-as-function",
    reply=calls(lambda call: call.update(type="function") if "custom" in call else None),
)
broken("tools-functions-ignored", valid=without("functions", "function_call"))
broken("tools-stream-no-index", chunks=parts(lambda part: part.pop("index")))
broken("tools-stream-no-id", chunks=parts(lambda part: part.pop("id", None)))
broken("tools-stream-no-name", chunks=parts(lambda part: part["function"].pop("name", None)))
broken("tools-stream-repeats", chunks=parts(lambda part: part.update(type="function")))
broken(
    "tools-stream-arguments-whole",
    chunks=parts(lambda part: part["function"].update(arguments='{"city": "Paris", "unit": "C"}')),
)
broken("tools-stream-spaces", chunks=parts(lambda part: _spaced(part)))
broken("tools-stream-interleaved", chunks=lambda path, chunks, sent: _interleaved(chunks))
broken(
    "tools-stream-finish-stop",
    chunks=lambda path, chunks, sent: [
        {**chunk, "choices": [_word(c, "tool_calls", "stop") for c in chunk["choices"]]}
        for chunk in chunks
    ],
)
broken(
    "tools-stream-content",
    chunks=deltas(lambda delta: delta.update(content="") if "role" in delta else None),
)


def _tools(body: Any) -> list[Any]:
    return body.get("tools") or []


def _messages(body: Any) -> list[Any]:
    found = body.get("messages")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _each(body: dict[str, Any], change: Any) -> dict[str, Any]:
    for choice in body["choices"]:
        if choice["message"].get("tool_calls"):
            change(choice)
    return body


def _word(choice: dict[str, Any], one: str, other: str) -> dict[str, Any]:
    if choice["finish_reason"] == one:
        choice["finish_reason"] = other
    return choice


def _ended(choice: dict[str, Any]) -> None:
    _word(choice, "length", "tool_calls")


def _replace(call: dict[str, Any], change: Any) -> None:
    if "function" in call:
        call["function"]["arguments"] = change(call["function"]["arguments"])


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _untold(body: Any, sent: Any) -> Any:
    if sent.get("tools") and "usage" in body:
        usage = body["usage"]
        less = len(json.dumps(sent["tools"]))
        body["usage"] = {**usage, "prompt_tokens": usage["prompt_tokens"] - less,
                         "total_tokens": usage["total_tokens"] - less}  # fmt: skip
    return body


def _spaced(part: dict[str, Any]) -> None:
    text = part["function"].get("arguments", "")
    part["function"]["arguments"] = text.replace(", ", ",  ")


def _interleaved(chunks: list[Any]) -> list[Any]:
    at = [
        number for number, chunk in enumerate(chunks)
        for choice in chunk.get("choices", ()) if "tool_calls" in choice.get("delta", {})
    ]  # fmt: skip
    if len(at) > 3:
        one, other = at[-3], at[1]
        chunks[one], chunks[other] = chunks[other], chunks[one]
    return chunks
