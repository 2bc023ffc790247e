"""The events of a stored response: those of its stream, with one delta per text (no I/O)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from .open_items import Call, CustomCall, Event, MessageItem, OpenItem, ReasoningItem

# The values of a response at its beginning that differ from those at its end.
_BEGUN: Mapping[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}


def replayed(reply: Mapping[str, Any], after: int, tier: str = "auto") -> list[bytes]:
    """Return the events of a stored response as bytes.

    Args:
        after: the number of the event before the first one that is returned; -1 for all.
        tier: the `service_tier` of the request.
    """
    return [
        b"event: %b\ndata: %b\n\n"
        % (kind.encode(), orjson.dumps({"type": kind, "sequence_number": number, **fields}))
        for number, (kind, fields) in enumerate(_events(reply, tier))
        if number > after
    ]


def _events(reply: Mapping[str, Any], tier: str) -> Iterator[Event]:
    begun = {"response": {**reply, **_BEGUN, "service_tier": tier}}
    yield Event("response.created", begun)
    yield Event("response.in_progress", begun)
    for index, value in enumerate(reply["output"]):
        item, text = _item(value, index)
        yield from item.begin()
        yield from (
            OpenItem.add(item, text, ()) if isinstance(item, CustomCall) else item.add(text, ())
        )
        yield from item.end(value["status"])
    yield Event(f"response.{reply['status']}", {"response": reply})


def _item(value: Mapping[str, Any], index: int) -> tuple[OpenItem, str]:
    """Return an item without its text, and the text."""
    place = value["id"], index
    kind = value["type"]
    if kind in ("message", "reasoning"):
        (part,) = value["content"]
        if kind == "reasoning":
            sealed = value.get("encrypted_content")
            seal = None if sealed is None else (lambda _: sealed)
            return ReasoningItem(place, bool(value["summary"]), seal), part["text"]
        logprobs = part["logprobs"]
        return MessageItem(place, (lambda _: logprobs) if logprobs else None), part["text"]
    head = {name: value[name] for name in ("call_id", "name", "namespace") if name in value}
    if kind == "custom_tool_call":
        return CustomCall(place, head), value["input"]
    return Call(place, head), value["arguments"]
