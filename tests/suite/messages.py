"""Anthropic's Messages API of the toy server, over its chat."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from suite import model
from suite.rules import Refused
from suite.work import CHAT, Choice, Work, work_of

M, COUNT = "/messages", "/messages/count_tokens"
SEALED, THOUGHT = "sealed:", "Let me think."
BILLING = "x-anthropic-billing-header:"
SERVERS = ("web_search_", "web_fetch_", "code_execution_")
BASH = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
BLOCKS = {
    "text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use",
    "tool_result",
}  # fmt: skip
PIECE = 4
_numbers = itertools.count(1)


def check(sent: Mapping[str, Any], counts: bool) -> None:
    """Raise `Refused`, in Anthropic's words, for the first error in a request."""
    for name in ("model", "messages", *(() if counts else ("max_tokens",))):
        if name not in sent:
            raise Refused(f"{name}: Field required")
    if sent["model"] != "org/toy":
        raise Refused(f"model: {sent['model']}", status=404)
    if not sent["messages"]:
        raise Refused("messages: at least one message is required")
    if not 0 <= (sent.get("temperature") or 0) <= 1:
        raise Refused("temperature: Input should be less than or equal to 1")
    if (sent.get("max_tokens") or 0) < 0:
        raise Refused("max_tokens: Input should be greater than or equal to 0")
    if "" in (sent.get("stop_sequences") or ()):
        raise Refused("stop_sequences: each stop sequence must be non-empty")
    if sent.get("mcp_servers"):
        raise Refused("mcp_servers: not supported")
    if (sent.get("thinking") or {}).get("budget_tokens", 1024) < 1024:
        raise Refused("thinking.enabled.budget_tokens: Input should be at least 1024")
    _check_tools(sent)
    _check_messages(sent["messages"])


def _check_tools(sent: Mapping[str, Any]) -> None:
    tools = sent.get("tools") or []
    for index, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        known = kind == "custom" or kind.startswith(("bash_", *SERVERS))
        if not known or (kind.startswith(SERVERS) and len(tools) == 1):
            raise Refused(f"tools.{index}: Input tag '{kind}' found using 'type' does not match")
    choice = sent.get("tool_choice") or {}
    if choice.get("type") == "tool" and choice["name"] not in [one["name"] for one in tools]:
        raise Refused(f"tool_choice: Tool '{choice['name']}' not found in provided tools")


def _check_messages(messages: Sequence[Any]) -> None:
    open_: dict[str, str] = {}
    for index, message in enumerate(messages):
        here = f"messages.{index}"
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise Refused(f"{here}.role: Input should be 'user', 'assistant' or 'system'")
        for at, block in enumerate(blocks_of(message)):
            _check_block(block, f"{here}.content.{at}", role, open_)
        if role == "user" and open_:
            raise Refused(
                f"{here_of(open_)}: `tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {', '.join(open_)}."
            )
        open_.update({b["id"]: here for b in blocks_of(message) if b["type"] == "tool_use"})
    text = text_of(messages[-1])
    if messages[-1]["role"] == "assistant" and text != text.rstrip():
        raise Refused("messages: final assistant content cannot end with trailing whitespace")


def here_of(open_: Mapping[str, str]) -> str:
    """Return the place of the first open call."""
    return next(iter(open_.values()))


def _check_block(block: Mapping[str, Any], here: str, role: str, open_: dict[str, str]) -> None:
    kind = block.get("type")
    if kind not in BLOCKS:
        raise Refused(f"{here}: Input tag '{kind}' found using 'type' does not match any")
    if kind == "text" and not block["text"] and role == "user":
        raise Refused("messages: text content blocks must be non-empty")
    if kind in ("image", "document") and block["source"]["type"] in ("file", "url"):
        raise Refused(f"{here}.source: not supported")
    if kind == "tool_result" and open_.pop(block["tool_use_id"], None) is None:
        raise Refused(
            f"{here}: unexpected `tool_use_id` found in `tool_result` blocks: "
            f"{block['tool_use_id']}."
        )


def blocks_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the blocks of a message."""
    content = message.get("content")
    if isinstance(content, str):
        is_empty = not content and message["role"] == "assistant"
        return [] if is_empty else [{"type": "text", "text": content}]
    return content or []


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    return "".join(block["text"] for block in blocks_of(message) if block["type"] == "text")


def as_chat(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as a chat request, without a final assistant message."""
    form = (sent.get("output_config") or {}).get("format") or sent.get("output_format")
    choice = sent.get("tool_choice") or {"type": "auto"}
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return {
        "model": "org/toy",
        "messages": [*_messages(sent)],
        "max_tokens": sent.get("max_tokens") or 1,
        "temperature": sent.get("temperature"),
        "response_format": {"type": "json_schema", "json_schema": form} if form else None,
        "stop": sent.get("stop_sequences"),
        "tools": [_tool(tool) for tool in sent.get("tools") or ()
                  if not (tool.get("type") or "").startswith(SERVERS)],
        "tool_choice": {"any": "required", "tool": named}.get(choice["type"], choice["type"]),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
    }  # fmt: skip


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema") or BASH
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": schema}
    return {"type": "function", "function": function}


def _messages(sent: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    system = sent.get("system") or ""
    if isinstance(system, list):
        texts = [block["text"] for block in system]
        system = "\n".join(texts[1:] if texts[0].startswith(BILLING) else texts)
    if system:
        yield {"role": "system", "content": system}
    given = sent["messages"]
    if given[-1]["role"] == "assistant" and len(given) > 1:
        given = given[:-1]
    waiting: list[dict[str, Any]] = []
    for message in given:
        blocks = blocks_of(message)
        if message["role"] == "system":
            waiting.append({"role": "system", "content": text_of(message)})
            continue
        yield from (_result(block) for block in blocks if block["type"] == "tool_result")
        yield from waiting
        waiting.clear()
        if message["role"] == "assistant":
            if blocks:
                yield _said(blocks)
        elif rest := [block for block in blocks if block["type"] != "tool_result"]:
            yield {"role": "user", "content": "".join(map(_shown, rest))}
    yield from waiting


def _said(blocks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    calls, thought, text = [], "", ""
    for block in blocks:
        if block["type"] == "tool_use":
            arguments = json.dumps(block["input"])
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "thinking":
            sealed = str(block.get("signature"))
            own = sealed.removeprefix(SEALED) if sealed.startswith(SEALED) else ""
            thought += block["thinking"] or own
        elif block["type"] == "text":
            text += block["text"]
    said: dict[str, Any] = {"role": "assistant", "content": text, "reasoning_content": thought}
    return {**said, "tool_calls": calls} if calls else said


def _result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content") or ""
    if isinstance(content, list):
        content = "".join(map(_shown, content))
    prefix = "Error: " if block.get("is_error") else ""
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": prefix + content}


def _shown(block: Mapping[str, Any]) -> str:
    kind = block["type"]
    if kind == "text":
        return str(block["text"])
    if kind == "search_result":
        inner = "".join(map(_shown, block["content"]))
        return f"{block['title']}\n{block['source']}\n{inner}\n"
    if kind == "document":
        source = block["source"]
        return str(source.get("data") or "".join(map(_shown, source["content"])))
    return "(image)"


def answer(sent: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """Return the message that answers a request."""
    chat = as_chat(sent)
    work = work_of(CHAT, chat, 1 if chat["temperature"] == 0 else turn)
    ((ids, _),) = work.prompts
    if len(ids) >= model.CONTEXT:
        raise Refused(f"prompt is too long: {len(ids)} tokens > {model.CONTEXT - 1} maximum")
    if chat["max_tokens"] > model.CONTEXT - len(ids):
        chat["max_tokens"] = model.CONTEXT - len(ids)
        work = work_of(CHAT, chat, 1)
    choice = work.choices[0]
    content, spent = _content(sent, choice), 0
    if (sent.get("thinking") or {}).get("type") in ("adaptive", "enabled"):
        shown = "" if sent["thinking"].get("display") == "omitted" else THOUGHT
        block = {"type": "thinking", "thinking": shown, "signature": SEALED + THOUGHT}
        content, spent = [block, *content], len(THOUGHT)
    made = spent + choice.count
    if not sent["max_tokens"]:
        content, made, spent = [], 0, 0
    return {
        "model": sent["model"], "id": f"msg_{next(_numbers):024d}", "type": "message",
        "role": "assistant", "content": content, **_ending(sent, chat, work, choice, content),
        "usage": {
            "input_tokens": len(ids), "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": made,
            "output_tokens_details": {"thinking_tokens": spent}, "service_tier": "standard",
        },
    }  # fmt: skip


def _content(sent: Mapping[str, Any], choice: Choice) -> list[dict[str, Any]]:
    if choice.calls:
        return [
            {"type": "tool_use", "id": f"toolu_{next(_numbers):024d}", "name": call.name,
             "input": _object(call.text)}
            for call in choice.calls
        ]  # fmt: skip
    text, last = choice.text, sent["messages"][-1]
    if last["role"] == "assistant":
        text = text.removeprefix(text_of(last))
    return [{"type": "text", "text": text}] if text else []


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; none of one that a limit has cut."""
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}


def _ending(
    sent: Mapping[str, Any], chat: dict[str, Any], work: Work, choice: Choice, content: Any
) -> dict[str, Any]:
    reason, stop = "end_turn", None
    if choice.cut is not None:
        reason = "stop_sequence"
        alone = {one: work_of(CHAT, {**chat, "stop": [one]}, work.turn) for one in chat["stop"]}
        stop = next(one for one, own in alone.items() if own.choices[0].cut == choice.cut)
    elif choice.reason == "length":
        reason = "max_tokens"
        if chat["max_tokens"] < sent["max_tokens"]:
            reason = "model_context_window_exceeded"
    elif any(block["type"] == "tool_use" for block in content):
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop, "stop_details": None}


def events(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    usage = {
        **message["usage"],
        "output_tokens": 0,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    begun = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    found: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        deltas = [*_deltas(block)]
        empty = {name: type(value)() if name in ("text", "thinking", "signature", "input")
                 else value for name, value in block.items()}  # fmt: skip
        found.append({"type": "content_block_start", "index": index, "content_block": empty})
        if not index:
            found.append({"type": "ping"})
        found += [{"type": "content_block_delta", "index": index, "delta": one} for one in deltas]
        found.append({"type": "content_block_stop", "index": index})
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence", "stop_details")}
    found.append({"type": "message_delta", "delta": ending, "usage": message["usage"]})
    return [*found, {"type": "message_stop"}]


def _deltas(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "tool_use":
        yield {"type": "input_json_delta", "partial_json": ""}
        for piece in _pieces(json.dumps(block["input"])):
            yield {"type": "input_json_delta", "partial_json": piece}
        return
    for piece in _pieces(block[kind]):
        yield {"type": f"{kind}_delta", kind: piece}
    if kind == "thinking":
        yield {"type": "signature_delta", "signature": block["signature"]}


def _pieces(text: str) -> Iterator[str]:
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    told = {"type": TYPES.get(status, "api_error"), "message": message}
    return {"type": "error", "error": told, "request_id": request_id}


def models(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the list of models in Anthropic's form."""
    listed = {"type": "model", "id": one["id"], "display_name": one["id"],
              "created_at": "2023-11-14T22:13:20Z"}  # fmt: skip
    return {"data": [listed], "has_more": False, "first_id": one["id"], "last_id": one["id"]}
