"""Items as messages of the toy server's chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from suite.responses.rules import CALLS, INCLUDE, OWN, kind_of, parts_of

SEALED = "sealed:"
# The text between the name of a namespace and that of its function.
BETWEEN = "__"


def as_chat(body: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a request as a chat request.

    Args:
        items: all items of the conversation, the input among them.
    """
    told = body.get("instructions")
    form = (body.get("text") or {}).get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"type": "json_schema", "json_schema": form}
    tools = [tool for one in body.get("tools") or () for tool in _tools(one)]
    wants = INCLUDE[0] in (body.get("include") or ()) or body.get("top_logprobs")
    return {
        "model": "org/toy",
        "messages": [*([{"role": "system", "content": told}] if told else []), *_messages(items)],
        "max_tokens": body.get("max_output_tokens"), "temperature": body.get("temperature"),
        "top_p": body.get("top_p"), "response_format": form, "tools": tools,
        "tool_choice": _choice(body.get("tool_choice")), "stop": body.get("stop"),
        "parallel_tool_calls": body.get("parallel_tool_calls"), "seed": body.get("seed"),
        "logprobs": bool(wants), "top_logprobs": body.get("top_logprobs") if wants else None,
    }  # fmt: skip


def without_first(items: Sequence[Any]) -> list[Any]:
    """Return items without the first one after the instructions, and without its output."""
    gone = next(item for item in items if item.get("role") not in ("system", "developer"))
    call = gone.get("call_id")
    return [one for one in items if one is not gone and (not call or one.get("call_id") != call)]


def _tools(tool: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a tool as tools of chat; one that OpenAI runs itself has no equal there."""
    kind = tool["type"]
    if kind == "namespace":
        return [
            one
            for inner in tool["tools"]
            for one in _tools({**inner, "name": f"{tool['name']}{BETWEEN}{inner['name']}"})
        ]
    if kind not in OWN:
        return []
    inner = {name: value for name, value in tool.items() if name != "type"}
    form = inner.get("format") or {}
    if form.get("type") == "grammar":
        inner["format"] = {"type": "grammar", "grammar": form}
    return [{"type": kind, kind: inner}]


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice["type"] == "allowed_tools":
        tools = [{"type": one["type"], one["type"]: {"name": one["name"]}}
                 for one in choice["tools"]]  # fmt: skip
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": tools}}
    return {"type": choice["type"], choice["type"]: {"name": choice["name"]}}


def _messages(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages; contiguous items of the assistant make one, and outputs follow it."""
    listed = [*items]
    outputs = {item["call_id"]: item for item in listed if kind_of(item).endswith("_output")}
    found: list[dict[str, Any]] = []
    said: dict[str, Any] | None = None
    for item in [*listed, {"type": "end"}]:
        kind = kind_of(item)
        own = kind in ("reasoning", *CALLS) or item.get("role") == "assistant"
        if own and said is None:
            said = {"role": "assistant", "content": None}
        if own and said is not None:
            _join(said, item)
            continue
        if said is not None:
            found.append(said)
            for call in said.get("tool_calls", ()):
                content = _content(outputs[call["id"]]["output"])
                found.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            said = None
        if kind == "message":
            found.append({"role": item["role"], "content": _content(item["content"])})
    return found


def _join(said: dict[str, Any], item: Mapping[str, Any]) -> None:
    """Add an item to the message of the assistant."""
    kind = kind_of(item)
    if kind == "message":
        said["content"] = (said["content"] or "") + _content(parts_of(item))
    elif kind == "reasoning":
        said["reasoning_content"] = thought_of(item)
    else:
        own = kind == "function_call"
        name = item["name"]
        if item.get("namespace"):
            name = f"{item['namespace']}{BETWEEN}{name}"
        inner = {"name": name, **({"arguments": item["arguments"]} if own
                                  else {"input": item["input"]})}  # fmt: skip
        key = "function" if own else "custom"
        call = {"id": item["call_id"], "type": key, key: inner}
        said["tool_calls"] = [*said.get("tool_calls", ()), call]


def thought_of(item: Mapping[str, Any]) -> str:
    """Return the reasoning in an item, which may be sealed."""
    if item.get("content"):
        return "".join(part["text"] for part in item["content"])
    return str(item.get("encrypted_content") or SEALED).removeprefix(SEALED)


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    if all("image" not in part["type"] for part in content):
        return "".join(part.get("text", part.get("refusal", "")) for part in content)
    return [
        {"type": "text", "text": part["text"]} if "text" in part else {"type": "image_url"}
        for part in content
    ]
