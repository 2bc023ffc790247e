"""Which tools a chat calls, and what the calls look like."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite import schema

_numbers = itertools.count(1)
PIECE = 5


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the model makes.

    Args:
        kind: `function`, `custom`, or `deprecated` for those of `functions`.
        text: its arguments, or its input.
    """

    kind: str
    name: str
    text: str


def plan(sent: Mapping[str, Any]) -> list[Call] | None:
    """The calls that answer a chat, None where text does."""
    if sent.get("functions"):
        return _deprecated(sent)
    offered = {tool[tool["type"]]["name"]: tool for tool in sent.get("tools") or ()}
    choice = sent.get("tool_choice") or "auto"
    if not offered or choice == "none":
        return None
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        allowed = [tool[tool["type"]]["name"] for tool in choice["allowed_tools"]["tools"]]
        offered = {name: offered[name] for name in allowed}
        choice = choice["allowed_tools"]["mode"]
    if isinstance(choice, dict):
        return [_call(offered[choice[choice["type"]]["name"]])]
    last = sent["messages"][-1]
    question = last["content"] if isinstance(last.get("content"), str) else ""
    if choice == "auto" and not ("weather" in question and last["role"] == "user"):
        return None
    count = 2 if " and " in question and sent.get("parallel_tool_calls") is not False else 1
    return [_call(next(iter(offered.values())))] * count


def _call(tool: Mapping[str, Any]) -> Call:
    if tool["type"] == "custom":
        return Call("custom", tool["custom"]["name"], "ls")
    return Call("function", tool["function"]["name"], _arguments(tool["function"]))


def _deprecated(sent: Mapping[str, Any]) -> list[Call] | None:
    choice = sent.get("function_call") or "auto"
    if not isinstance(choice, dict):
        return None
    function = next(one for one in sent["functions"] if one["name"] == choice["name"])
    return [Call("deprecated", function["name"], _arguments(function))]


def _arguments(function: Mapping[str, Any]) -> str:
    value = schema.instance(function.get("parameters") or {"type": "object"})
    return json.dumps(value, ensure_ascii=False)


def reason(sent: Mapping[str, Any], planned: Sequence[Call]) -> str:
    """Why a choice with calls ends: `stop` where the function was named."""
    if planned[0].kind == "deprecated":
        return "function_call"
    choice = sent.get("tool_choice")
    named = isinstance(choice, dict) and choice["type"] != "allowed_tools"
    return "stop" if named else "tool_calls"


def cut(planned: Sequence[Call], data: bytes) -> list[Call]:
    """The calls that were begun when so many bytes were written."""
    found: list[Call] = []
    at = 0
    for call in planned:
        size = len(call.text.encode())
        if found and at >= len(data):
            break
        text = data[at : at + size].decode("utf-8", "ignore")
        found.append(Call(call.kind, call.name, text))
        at += size
    return found


def message(made: Sequence[Call]) -> dict[str, Any]:
    """The message of a choice that calls."""
    head: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
    if made[0].kind == "deprecated":
        return {**head, "function_call": {"name": made[0].name, "arguments": made[0].text}}
    return {**head, "tool_calls": [_shape(call) for call in made]}


def _shape(call: Call) -> dict[str, Any]:
    key = "input" if call.kind == "custom" else "arguments"
    return {"id": f"call_{next(_numbers):024d}", "type": call.kind,
            call.kind: {"name": call.name, key: call.text}}  # fmt: skip


def deltas(made: Sequence[Call]) -> list[dict[str, Any]]:
    """The deltas of a choice that calls; a single call's header stands beside the role."""
    if made[0].kind == "deprecated":
        return [message(made)]
    found: list[dict[str, Any]] = [{"role": "assistant", "content": None, "refusal": None}]
    for index, call in enumerate(made):
        shape = _shape(Call(call.kind, call.name, ""))
        header = {"tool_calls": [{"index": index, **shape}]}
        if len(made) == 1:
            found[0] |= header
        else:
            found.append(header)
        key = "input" if call.kind == "custom" else "arguments"
        for at in range(0, len(call.text), PIECE):
            piece = {"index": index, call.kind: {key: call.text[at : at + PIECE]}}
            found.append({"tool_calls": [piece]})
    return found
