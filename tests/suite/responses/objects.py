"""Responses and their output items."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from suite.responses.rules import INCLUDE, OWN, new_id
from suite.responses.turns import BETWEEN, SEALED
from suite.rules import Refused
from suite.work import CHAT, Choice, work_of

_numbers = itertools.count(1)
# What the model thinks if a request asks for reasoning.
THOUGHT = "Let me think."


def answer(
    body: Mapping[str, Any], chat: Mapping[str, Any], now: float, turn: int
) -> dict[str, Any]:
    """Return the complete response.

    Args:
        turn: how often the request was sent; see `Work`.
    """
    thinks = (body.get("reasoning") or {}).get("effort") not in (None, "none")
    most = chat["max_tokens"]
    if thinks and most:
        chat = {**chat, "max_tokens": most - len(THOUGHT)}
    choice, usage = _made(chat, 1 if chat["temperature"] == 0 else turn)
    spent = len(THOUGHT) if thinks else 0
    cut = choice.reason == "length"
    status = "incomplete" if cut else "completed"
    output = _output(choice, status, body)
    if thinks:
        output.insert(0, _reasoning(body))
    counts = {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"] + spent,
        "output_tokens_details": {"reasoning_tokens": spent},
        "total_tokens": usage["total_tokens"] + spent,
    }
    return {
        **_head(body, int(now)), "status": status, "output": output, "usage": counts,
        "completed_at": None if cut else int(now), "service_tier": "default",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
    }  # fmt: skip


def _made(chat: Mapping[str, Any], turn: int) -> tuple[Choice, dict[str, int]]:
    """Return the choice of a chat request, and its usage.

    Raises:
        Refused: the input exceeds the context, in both of OpenAI's wordings.
    """
    work = work_of(CHAT, chat, turn)
    try:
        work.check_context()
    except Refused as refused:
        text = f"{refused.message} Your input exceeds the context window of this model."
        raise Refused(text, "input", refused.code) from None
    return work.choices[0], work.usage()


def begun(whole: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response as it is at its beginning."""
    return {**whole, "status": "in_progress", "output": [], "usage": None, "completed_at": None,
            "incomplete_details": None, "service_tier": "auto"}  # fmt: skip


def _head(body: Mapping[str, Any], now: int) -> dict[str, Any]:
    text, reasoning = body.get("text") or {}, body.get("reasoning") or {}
    found = {
        "id": f"resp_{next(_numbers):048x}", "object": "response", "created_at": now,
        "background": False, "error": None, "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"), "model": body["model"],
        "max_tool_calls": body.get("max_tool_calls"), "metadata": body.get("metadata") or {},
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"), "prompt_cache_retention": None,
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": body.get("safety_identifier"),
        "store": body.get("store") is not False,
        "text": {"format": text.get("format") or {"type": "text"},
                 "verbosity": text.get("verbosity") or "medium"},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": [_told(tool) for tool in body.get("tools") or () if tool["type"] in OWN],
        "top_logprobs": body.get("top_logprobs") or 0,
        "truncation": body.get("truncation") or "disabled",
        "user": body.get("user"),
    }  # fmt: skip
    for name, usual in (("temperature", 1), ("top_p", 1), ("frequency_penalty", 0),
                        ("presence_penalty", 0)):  # fmt: skip
        found[name] = float(usual if body.get(name) is None else body[name])
    if body.get("conversation"):
        found["conversation"] = {"id": conversation_of(body)}
    return found


def conversation_of(body: Mapping[str, Any]) -> Any:
    """Return the id of a request's conversation, or None."""
    named = body.get("conversation")
    return named["id"] if isinstance(named, dict) else named


def _told(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return {**tool}
    return {"description": None, "parameters": None, **tool, "strict": tool.get("strict") is not
            False}  # fmt: skip


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": THOUGHT}]
    item = {
        "id": new_id("reasoning"), "type": "reasoning", "status": "completed",
        "summary": summary if (body.get("reasoning") or {}).get("summary") else [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }  # fmt: skip
    if INCLUDE[1] in (body.get("include") or ()):
        item["encrypted_content"] = f"{SEALED}{THOUGHT}"
    return item


def _output(choice: Choice, status: str, body: Mapping[str, Any]) -> list[Any]:
    if not choice.calls:
        logprobs = choice.chat_logprobs(choice.tokens)
        part = {"type": "output_text", "text": choice.text, "annotations": [],
                "logprobs": logprobs["content"] if logprobs else []}  # fmt: skip
        return [{"type": "message", "id": new_id("message"), "role": "assistant",
                 "status": status, "content": [part]}]  # fmt: skip
    spaces = [tool["name"] for tool in body.get("tools") or () if tool["type"] == "namespace"]
    last = len(choice.calls) - 1
    return [
        _call(call, status if at == last else "completed", spaces)
        for at, call in enumerate(choice.calls)
    ]


def _call(call: Any, status: str, spaces: list[str]) -> dict[str, Any]:
    own = call.kind == "function"
    kind = "function_call" if own else "custom_tool_call"
    space, between, name = call.name.partition(BETWEEN)
    named = {"name": name, "namespace": space} if between and space in spaces else {
        "name": call.name}  # fmt: skip
    return {"type": kind, "id": new_id(kind), "call_id": f"call_{next(_numbers):024d}",
            **named, "arguments" if own else "input": call.text, "status": status}  # fmt: skip


PIECE = 6
CALL, CUSTOM = "response.function_call_arguments", "response.custom_tool_call_input"


def events(whole: Mapping[str, Any], padded: bool) -> list[dict[str, Any]]:
    """Return the events of a response.

    Args:
        padded: True if the deltas have an `obfuscation`.
    """
    start = begun(whole)
    found: list[dict[str, Any]] = [
        {"type": "response.created", "response": start},
        {"type": "response.in_progress", "response": start},
    ]
    for index, item in enumerate(whole["output"]):
        found += _item(index, item)
    found.append({"type": f"response.{whole['status']}", "response": whole})
    if padded:
        for event in found:
            if "delta" in event:
                event["obfuscation"] = "x"
    return [{**event, "sequence_number": at} for at, event in enumerate(found)]


def failure(whole: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """Return the events after the death of the engine.

    Args:
        number: the number of the first of them.
    """
    error = {"type": "server_error", "code": "server_error", "message": "The engine is gone.",
             "param": None}  # fmt: skip
    flat = {name: error[name] for name in ("code", "message", "param")}
    failed = {**begun(whole), "status": "failed",
              "error": {"code": error["code"], "message": error["message"]}}  # fmt: skip
    return [
        {"type": "error", "sequence_number": number, **flat, "error": error},
        {"type": "response.failed", "sequence_number": number + 1, "response": failed},
    ]


def _item(index: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = item["type"]
    blank = {"arguments": "", "input": "", "content": [], "summary": []}
    empty = {name: value for name, value in blank.items() if name in item}
    start = {name: value for name, value in item.items() if name != "encrypted_content"}
    begun = {**start, **empty, "status": "in_progress"}
    at = {"item_id": item["id"], "output_index": index}
    inner = {"message": _text, "reasoning": _thought}.get(kind, _call_events)
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *inner(at, item),
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _call_events(at: Mapping[str, Any], item: Mapping[str, Any]) -> list[dict[str, Any]]:
    own = item["type"] == "function_call"
    kind, name = (CALL, "arguments") if own else (CUSTOM, "input")
    done = {"name": item["name"], name: item[name]} if own else {name: item[name]}
    return [
        *({"type": f"{kind}.delta", **at, "delta": piece} for piece in _pieces(item[name])),
        {"type": f"{kind}.done", **at, **done},
    ]


def _text(at: Mapping[str, Any], item: Mapping[str, Any]) -> list[dict[str, Any]]:
    at = {**at, "content_index": 0}
    part = item["content"][0]
    kind, text, logprobs = "response.output_text", part["text"], part["logprobs"]
    deltas, start = [], 0
    for piece in _pieces(text):
        end = start + len(piece.encode())
        deltas.append({"type": f"{kind}.delta", **at, "delta": piece,
                       "logprobs": logprobs[start:end]})  # fmt: skip
        start = end
    return [
        {"type": "response.content_part.added", **at, "part": {**part, "text": "", "logprobs": []}},
        *deltas,
        {"type": f"{kind}.done", **at, "text": text, "logprobs": logprobs},
        {"type": "response.content_part.done", **at, "part": part},
    ]


def _thought(at: Mapping[str, Any], item: Mapping[str, Any]) -> list[dict[str, Any]]:
    whole = item["content"][0]
    kind, summary = "response.reasoning_text", "response.reasoning_summary"
    within, beside = {**at, "content_index": 0}, {**at, "summary_index": 0}
    told = [{"type": "summary_text", "text": text} for text in ("", whole["text"])]
    found = [{"type": "response.content_part.added", **within, "part": {**whole, "text": ""}}]
    if item["summary"]:
        found.append({"type": f"{summary}_part.added", **beside, "part": told[0]})
    for piece in _pieces(whole["text"]):
        found.append({"type": f"{kind}.delta", **within, "delta": piece})
        if item["summary"]:
            found.append({"type": f"{summary}_text.delta", **beside, "delta": piece})
    found.append({"type": f"{kind}.done", **within, "text": whole["text"]})
    found.append({"type": "response.content_part.done", **within, "part": whole})
    if item["summary"]:
        found.append({"type": f"{summary}_text.done", **beside, "text": whole["text"]})
        found.append({"type": f"{summary}_part.done", **beside, "part": told[1]})
    return found


def _pieces(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
