"""Read the streams of `/v1/responses`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from latimer.adapter.generation.frames import COMMENT
from latimer.conformance.published import event_problem

ADDED, DONE = "output_item.added", "output_item.done"
PART, PART_DONE = "content_part.added", "content_part.done"
HEAD = ["created", "in_progress"]
TEXT = [ADDED, PART, "output_text.delta", "output_text.done", PART_DONE, DONE]
NO_TEXT = [ADDED, PART, "output_text.done", PART_DONE, DONE]
THOUGHT = [ADDED, PART, "reasoning_text.delta", "reasoning_text.done", PART_DONE, DONE]
CALL = [ADDED, "function_call_arguments.delta", "function_call_arguments.done", DONE]
CUSTOM = [ADDED, "custom_tool_call_input.delta", "custom_tool_call_input.done", DONE]


def events_in(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream, after a check of their form, their numbers and their types."""
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    found: list[dict[str, Any]] = []
    for block in blocks:
        if block == COMMENT.decode().strip():
            continue
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert list(event)[:2] == ["type", "sequence_number"]
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        assert event["type"] == "error" or event_problem(event) is None, event_problem(event)
        found.append(event)
    return found


def order_of(events: Sequence[dict[str, Any]]) -> list[str]:
    """Return the types of events without `response.`, each run of them once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for name, _ in groupby(names)]


def steady(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response without what differs between two runs: ids, times, cached tokens."""
    items = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    usage = response["usage"] and {**response["usage"], "input_tokens_details": None}
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": items,
            "usage": usage}  # fmt: skip
