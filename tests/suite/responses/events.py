"""The events of a streamed response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from suite.responses.objects import begun

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
    inner = {"message": _text, "reasoning": _thought}.get(kind, _call)
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *inner(at, item),
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _call(at: Mapping[str, Any], item: Mapping[str, Any]) -> list[dict[str, Any]]:
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
