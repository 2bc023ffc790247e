"""Faults in the tools and in the reasoning of responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suite.faults.base import broken, refuse, take
from suite.faults.responses import items, valid_without
from suite.server import RESPONSES


def replaced(kind: str, edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a reply hook that replaces the output items of one type."""

    def hook(path: str, body: Any, sent: Any) -> Any:
        if path != RESPONSES:
            return body
        output = [edit(item) if item["type"] == kind else item for item in body["output"]]
        return {**body, "output": output}

    return hook


def input_without(*kinds: str) -> Any:
    """Return a request hook that drops the items of some types from the input."""
    return lambda path, body: _kept(body, lambda item: item.get("type") not in kinds)


def _kept(body: dict[str, Any], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    given = body.get("input")
    if not isinstance(given, list):
        return body
    return {**body, "input": [one for one in given if not isinstance(one, dict) or wanted(one)]}


def _given(body: Any, *kinds: str) -> list[Any]:
    """Return the items of some types in an input."""
    given = body.get("input")
    listed = given if isinstance(given, list) else []
    return [one for one in listed if isinstance(one, dict) and one.get("type") in kinds]


def _any_tool(body: Any, kind: str) -> bool:
    return any(tool.get("type") == kind for tool in body.get("tools") or ())


def _swapped(body: Any) -> bool:
    calls, outputs = _given(body, "function_call"), _given(body, "function_call_output")
    return [one["call_id"] for one in calls] != [one["call_id"] for one in outputs]


def _no_choice(word: Any) -> Any:
    """Return a valid hook that drops a tool_choice."""

    def hook(path: str, body: dict[str, Any]) -> dict[str, Any]:
        choice = body.get("tool_choice")
        own = choice.get("type") if isinstance(choice, dict) else choice
        changed = path == RESPONSES and own == word
        return {**body, "tool_choice": "auto"} if changed else body

    return hook


broken("response-call-same-id", reply=replaced(
    "function_call", lambda item: {**item, "call_id": item["id"]}))  # fmt: skip
broken("response-call-status-null", reply=items("function_call", status=None))
broken("response-always-parallel", valid=valid_without("parallel_tool_calls"))
broken(
    "response-dump-refused",
    request=refuse(
        lambda body: any(one.get("id") for one in _given(body, "function_call")), RESPONSES
    ),
)
broken("response-outputs-by-place", request=refuse(_swapped, RESPONSES))
broken("response-none-ignored", valid=_no_choice("none"))
broken("response-required-ignored", valid=_no_choice("required"))
broken("response-allowed-ignored", valid=lambda path, body: (
    {**body, "tool_choice": "required"}
    if path == RESPONSES and "allowed_tools" in str(body.get("tool_choice"))
    else body))  # fmt: skip
broken("response-hosted-refused", request=refuse(
    lambda body: _any_tool(body, "web_search"), RESPONSES))  # fmt: skip
broken("response-hosted-ignored", request=take(
    lambda body: body.get("tool_choice") == {"type": "file_search"}, RESPONSES,
    tool_choice="auto"))  # fmt: skip
broken("response-agent-refused", request=refuse(
    lambda body: body.get("client_metadata"), RESPONSES, 400))  # fmt: skip
broken("response-namespace-untold", reply=items("function_call", namespace=None))
broken("response-custom-as-function", reply=replaced("custom_tool_call", lambda item: {
    **item, "type": "function_call", "arguments": item["input"]}))  # fmt: skip
broken("response-custom-free", valid=lambda path, body: {
    **body, "tools": [{**tool, "format": None} if tool["type"] == "custom" else tool
                      for tool in body.get("tools") or ()]})  # fmt: skip
broken("response-custom-dropped", request=input_without(
    "custom_tool_call", "custom_tool_call_output"))  # fmt: skip
broken("response-reasoning-last", reply=lambda path, body, sent: (
    {**body, "output": body["output"][::-1]} if path == RESPONSES else body))  # fmt: skip
broken(
    "response-reasoning-tagged",
    reply=replaced(
        "reasoning",
        lambda item: {
            **item,
            "content": [{"type": "reasoning_text", "text": "<think>Yes.</think>"}],
        },
    ),
)
broken("response-reasoning-dropped", request=input_without("reasoning"))
broken("response-summary-ignored", valid=lambda path, body: (
    {**body, "reasoning": {**body["reasoning"], "summary": None}} if body.get("reasoning")
    else body))  # fmt: skip
broken("response-always-sealed", reply=items("reasoning", encrypted_content="sealed:Yes."))
broken(
    "response-sealed-ignored",
    request=lambda path, body: _kept(
        body, lambda item: item.get("type") != "reasoning" or bool(item.get("content"))
    ),
)
