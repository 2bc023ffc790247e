"""Tests of responses over a WebSocket with the official `openai` client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI
from openai.lib.responses_websocket import (
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)
from openai.types.responses import FunctionToolParam

# The client does not use the newest way to connect.
pytestmark = pytest.mark.filterwarnings("ignore:connect.. must be used:DeprecationWarning")
MODEL = "demo"
LIMITS = ResponsesWebSocketLimits(
    max_lanes=8, max_events_per_lane=512, max_events=2048, max_bytes_per_lane=1 << 24,
    max_bytes=1 << 25,
)  # fmt: skip
WEATHER: FunctionToolParam = {
    "type": "function", "name": "get_weather", "description": "Get the weather in a city",
    "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}  # fmt: skip


def test_two_turns(responses_sdk: OpenAI) -> None:
    """`connect` gives typed events, and its next response continues one that is not stored."""
    with responses_sdk.responses.connect() as connection:
        connection.response.create(model=MODEL, input="Count to 5.", temperature=0, store=False)
        text, made = "", None
        for event in connection:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.completed":
                made = event.response
                break
        assert made is not None
        assert text == made.output_text == "1, 2, 3, 4, 5."
        connection.response.create(
            model=MODEL, input="And now to 6.", temperature=0, store=False,
            previous_response_id=made.id,
        )  # fmt: skip
        last = next(event for event in connection if event.type == "response.completed")
        assert last.response.output_text == "1, 2, 3, 4, 5, 6."


def test_lanes_of_a_session(responses_sdk: OpenAI) -> None:
    """A session routes lanes: a tool loop, another answer, and an error that ends neither."""
    with (
        responses_sdk.responses.connect() as connection,
        ResponsesWebSocketSession(connection, limits=LIMITS) as session,
    ):
        tools: Any = session.lane("tools")
        text: Any = session.lane("text")
        body: Any = {"type": "response.create", "model": MODEL, "temperature": 0, "store": False}
        asked = "What is the weather in Paris?"
        tools.send({**body, "input": asked, "tools": [WEATHER], "tool_choice": "required"})
        text.send({**body, "input": "Count to 7."})
        made = tools.get_final_response(timeout=30)
        (call,) = made.output
        assert call.type == "function_call"
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
        tools.send({**body, "input": [output], "tools": [WEATHER], "previous_response_id": made.id})
        assert tools.get_final_response(timeout=30).status == "completed"
        assert text.get_final_response(timeout=30).output_text == "1, 2, 3, 4, 5, 6, 7."
        text.send({**body, "input": "Hi", "temperature": 5})
        with pytest.raises(ResponsesWebSocketError) as refused:
            text.get_final_response(timeout=30)
        assert getattr(refused.value.event, "status", None) == 400
        text.send({**body, "input": "Count to 3."})
        assert text.get_final_response(timeout=30).output_text == "1, 2, 3."
