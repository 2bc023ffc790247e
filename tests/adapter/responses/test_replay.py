"""Tests of the events of stored responses."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from latimer.adapter.generation.choice import Delta
from latimer.adapter.responses.items import new_response_id
from latimer.adapter.responses.output import Shape, replayed
from latimer.adapter.responses.response import Draft, ResponseEncoder
from latimer.adapter.responses.tools import CalledTool
from latimer.schemas.openai.common import Usage

DELTAS = [
    Delta("I think.", kind="reasoning"),
    Delta("Hello!"),
    Delta("get", kind="call", call_id="call_1"),
    Delta('{"a": 1}', kind="arguments"),
    Delta("run", kind="call", call_id="call_2"),
    Delta('{"input": "ls -la"}', kind="arguments"),
]
USAGE: Usage = {
    "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}  # fmt: skip


def parsed(data: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [orjson.loads(one.partition(b"data: ")[2]) for one in data.split(b"\n\n") if one]


@pytest.mark.parametrize("thoughts", ["shown", "summarised"])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_replay_equals_the_stream(thoughts: Any, reason: Any) -> None:
    """A replay has the events of a stream whose texts came in one delta each, with its numbers."""
    tools = {"get": CalledTool("get"), "run": CalledTool("run", "shell", is_custom=True)}
    begun: dict[str, Any] = {
        "id": new_response_id()[0], "object": "response", "status": "in_progress",
             "completed_at": None, "error": None, "incomplete_details": None,
             "service_tier": "auto", "output": [], "usage": None,
    }  # fmt: skip
    draft = Draft(begun, Shape(tools, thoughts), "default")
    frames = ResponseEncoder(draft)
    stream = [frames.start(0), *(frames.delta(0, one) for one in DELTAS), frames.end(0, reason)]
    reply = draft.ended(frames._output.items, reason, USAGE)
    live = parsed(b"".join([*stream, frames.close(USAGE, reply)]))
    assert parsed(b"".join(replayed(reply, -1))) == live
    assert parsed(b"".join(replayed(reply, 4))) == live[5:]
