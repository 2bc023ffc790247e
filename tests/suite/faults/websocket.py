"""Faults in responses over a WebSocket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from suite.faults.edits import Edit, all_edits, put, turn
from suite.server import Fault

Frame = dict[str, Any]


def _frames(change: Callable[[list[Any], Mapping[str, Any]], list[Any]]) -> Fault:
    return Fault(frames=change)


def _numbered(frames: list[Any], _sent: Mapping[str, Any]) -> list[Any]:
    return [{**frame, "sequence_number": at + 1} for at, frame in enumerate(frames)]


def _edited(*edits: Edit) -> Fault:
    """Return a fault that edits the list of frames."""
    return _frames(lambda frames, _: all_edits(edits, frames))


def _without(kind: str) -> Fault:
    return _frames(lambda frames, _: [one for one in frames if one["type"] != kind])


def _instructed(frames: list[Any], sent: Mapping[str, Any]) -> list[Any]:
    """Let a response that continues another one have instructions."""
    if not sent.get("previous_response_id"):
        return frames
    last = {**frames[-1], "response": {**frames[-1]["response"], "instructions": "Be brief."}}
    return [*frames[:-1], last]


def _untold(frames: list[Any], _sent: Mapping[str, Any]) -> list[Any]:
    response = {**frames[-1]["response"], "previous_response_id": None}
    return [*frames[:-1], {**frames[-1], "response": response}]


def _refused(name: str, value: Any) -> Fault:
    """Refuse frames with a value by making them invalid."""

    def change(frame: Frame) -> Frame:
        wrong = name in frame and frame[name] == value
        return {**frame, "temperature": 9} if wrong else frame

    return Fault(frame=change)


def _error(**changed: Any) -> Fault:
    """Change the objects of errors."""
    return Fault(refusal=lambda frame: {**frame, "error": {**frame["error"], **changed}})


def _only(code: str | None, **changed: Any) -> Fault:
    """Change the error frames with a code."""
    return Fault(refusal=lambda frame: (
        {**frame, **changed} if frame["error"]["code"] == code else frame))  # fmt: skip


def _no_lane(frames: list[Any]) -> list[Any]:
    return [{name: value for name, value in one.items() if name != "stream_id"} for one in frames]


def _drops(*names: str) -> Fault:
    return Fault(frame=lambda frame: {
        name: value for name, value in frame.items() if name not in names})  # fmt: skip


def _parent_empty(frame: Frame) -> Frame:
    """Take an empty input with a response before it for no input at all."""
    if frame.get("input") == [] and frame.get("previous_response_id"):
        return {**frame, "input": "", "previous_response_id": None}
    return frame


FAULTS = {
    f"websocket-{name}": fault
    for name, fault in {
        "500": Fault(socket=500),
        "wrong-key-403": Fault(socket_key=403),
        "numbers-from-1": _frames(_numbered),
        "no-created": _without("response.created"),
        "no-deltas": _without("response.output_text.delta"),
        "done": _frames(lambda frames, _: [*frames, {"type": "done"}]),
        "other-metadata": _edited(put("*.response.metadata", {"a": "b"})),
        "text-longer": _edited(turn("*.delta", lambda text: f"{text} ")),
        "details-unsaid": _edited(put("*.response.incomplete_details", None)),
        "arguments-lost": _edited(put("*.item[type=function_call].arguments", "")),
        "binary": Fault(binary=True),
        "stream-false": _refused("stream", False),
        "background-taken": _drops("background"),
        "warm-up-generates": Fault(warms_up=False),
        "empty-input": Fault(frame=_parent_empty),
        "parent-ignored": _drops("previous_response_id"),
        "keeps-nothing": Fault(keeps=False),
        "keeps-older": Fault(keeps_older=True),
        "shares": Fault(shares=True),
        "never-stores": Fault(frame=lambda frame: {**frame, "store": False}),
        "inherits": _frames(_instructed),
        "parent-untold": _frames(_untold),
        "output-refused": Fault(frame=lambda frame: (
            {**frame, "temperature": 9} if "call_output" in str(frame.get("input")) else frame)),
        "keeps-failed": Fault(evicts=False),
        "forgets-fork": Fault(evicts_forks=True),
        "lane-untold": Fault(lane=_no_lane),
        "lane-of-errors-untold": Fault(refusal=lambda frame: _no_lane([frame])[0]),
        "any-lane": Fault(frame=lambda frame: (
            {**frame, "stream_id": "x"} if frame.get("stream_id") in ("", "a b") else frame)),
        "64-lanes": Fault(lanes=64),
        "8-lanes": Fault(lanes=8),
        "no-order": Fault(in_order=False),
        "closes": Fault(closes=True),
        "no-status": _only(None, status=None),
        "error-code": _error(code="error"),
        "overflow-500": _only("context_length_exceeded", status=500),
        "unknown-type-taken": Fault(refusal=lambda frame: (
            {} if frame["error"]["param"] == "type" else frame)),
        "tells-processed": Fault(tells_processed=True),
        "steers": Fault(steered="error"),
    }.items()
}  # fmt: skip
