"""Faults in streamed responses."""

from __future__ import annotations

from typing import Any

from suite.faults.base import broken
from suite.faults.responses import pop, valid_without
from suite.server import RESPONSES


def each(edit: Any) -> Any:
    """Return an events hook that replaces each event."""
    return lambda found: [edit(event) for event in found]


def lost(found: list[Any], kind: str) -> list[Any]:
    """Return events without the second delta of a kind."""
    at = [n for n, event in enumerate(found) if kind in event["type"] and "delta" in event]
    kept = [event for n, event in enumerate(found) if n not in at[1:2]]
    return [{**event, "sequence_number": n} for n, event in enumerate(kept)]


def of_kind(kind: str, edit: Any) -> Any:
    """Return an events hook that replaces the events of one type, given without `response.`."""
    return each(lambda event: edit(event) if event["type"] == f"response.{kind}" else event)


def less(*kinds: str) -> Any:
    """Return an events hook that drops the events of some types."""
    dropped = {f"response.{kind}" for kind in kinds}
    return lambda found: [event for event in found if event["type"] not in dropped]


def within(key: str, **values: Any) -> Any:
    """Return an edit of an event that replaces values of an object in it."""
    return lambda event: {**event, key: {**event[key], **values}}


broken("response-events-unnamed", event=lambda data: (
    data.partition(b"\n")[2] if data.startswith(b"event: ") else data))  # fmt: skip
broken("response-events-unnumbered", events=each(lambda event: {**event, "sequence_number": 0}))
broken("response-events-swapped", events=(lambda found: [found[1], found[0], *found[2:]]))
broken("response-no-part-event", events=(lambda found: [
    event for event in found if event["type"] != "response.content_part.added"]))  # fmt: skip
broken("response-no-end", events=(lambda found: found[:-1]))
broken("response-delta-lost", events=(lambda found: lost(found, "output_text")))
broken("response-done-empty", events=each(lambda event: (
    {**event, "text": ""} if event["type"] == "response.output_text.done" else event)))  # fmt: skip
broken("response-delta-no-item", events=each(lambda event: (
    pop(event, "item_id") if event["type"].endswith("text.delta") else event)))  # fmt: skip
broken("response-stream-no-usage", events=each(lambda event: (
    {**event, "response": {**event["response"], "usage": None}}
    if "response" in event else event)))  # fmt: skip
broken("response-stream-no-output", events=each(lambda event: (
    {**event, "response": {**event["response"], "output": []}}
    if "response" in event else event)))  # fmt: skip
broken("response-event-type", events=each(lambda event: (
    {**event, "logprobs": 0} if "logprobs" in event else event)))  # fmt: skip
broken("response-arguments-lost", events=(lambda found: lost(found, "function_call")))
broken("response-created-full", events=of_kind(
    "created", lambda event: within("response", output=[{"type": "message"}])(event)))  # fmt: skip
broken("response-goes-on", events=(lambda found: [
    *found, {**found[-1], "sequence_number": len(found)}]))  # fmt: skip
broken("response-early-usage", events=(lambda found: [
    within("response", usage=found[-1]["response"]["usage"])(event)
    if "response" in event else event for event in found]))  # fmt: skip
broken("response-other-item-id", events=of_kind("output_item.added", within("item", id="msg_0")))
broken("response-part-empty", events=of_kind("content_part.done", within("part", text="")))
broken("response-last-other", events=(lambda found: [
    *found[:-1], within("response", tool_choice="none")(found[-1])]))  # fmt: skip
broken("response-cut-early", events=(lambda found: (
    less("output_item.done")(found) if "incomplete" in found[-1]["type"] else found)))  # fmt: skip
broken(
    "response-part-no-lists",
    events=each(
        lambda event: (
            {**event, "part": pop(event["part"], "annotations")} if "part" in event else event
        )
    ),
)
broken("response-never-padded", valid=valid_without("stream_options"))
broken("response-always-padded", valid=lambda path, body: (
    {**body, "stream_options": {"include_obfuscation": True}} if path == RESPONSES
    else body))  # fmt: skip
broken("response-not-added", events=less("output_item.added"))
broken("response-stream-error-200", error=lambda status, error, sent: (
    200 if sent.get("stream") and "input" in sent else status, {"error": error}))  # fmt: skip
broken(
    "response-arguments-early",
    events=of_kind(
        "output_item.added",
        lambda event: (
            within("item", arguments="{}")(event) if "arguments" in event["item"] else event
        ),
    ),
)
broken("response-calls-mixed", events=lambda found: _mixed(found))
broken("response-input-lost", events=lambda found: lost(found, "custom_tool_call"))
broken("response-delta-no-logprobs", events=of_kind("output_text.delta", lambda event: {
    **event, "logprobs": []}))  # fmt: skip
broken("response-thought-lost", events=lambda found: lost(found, "reasoning_text"))
broken("response-summary-unsent", events=less("reasoning_summary_text.delta"))
broken("response-stored-late", late=0.2)
broken("response-aborted-stored", keeps_aborted=True)
broken("response-replay-cut", replay=lambda found: found[:-1])
broken("break-response-silent", on_failure=lambda found: [])
broken("break-response-completed", on_failure=lambda found: [
    {**found[-1], "type": "response.completed"}])  # fmt: skip
broken("break-response-text", on_failure=lambda found: [
    {**found[0], "error": "The engine is gone."}, found[1]])  # fmt: skip


def _mixed(found: list[Any]) -> list[Any]:
    """Add all calls before the first of them ends."""
    added = [event for event in found if event["type"] == "response.output_item.added"]
    if len(added) < 2:
        return found
    rest = [event for event in found if event not in added]
    return [{**event, "sequence_number": at}
            for at, event in enumerate([*rest[:2], *added, *rest[2:]])]  # fmt: skip
