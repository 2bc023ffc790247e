"""Tests of responses with the official `openai` client on the real engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.errors import EngineError
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import FunctionToolParam, ToolParam
from pydantic import BaseModel
from support.engines.echo import Slow
from support.servers import serving

MODEL = "demo"
RESULT = '{"temp_c": 21}'
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOLS: list[ToolParam] = [WEATHER]


@pytest.fixture
async def leaving(address: str) -> AsyncIterator[AsyncOpenAI]:
    """Return the asynchronous client."""
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as one:
        yield one


def test_create(responses_sdk: OpenAI) -> None:
    """`create` returns the text in `output_text`, plain and streamed."""
    plain = responses_sdk.responses.create(model=MODEL, input="Count to 5.", temperature=0)
    assert plain.output_text == "1, 2, 3, 4, 5."
    assert plain.status == "completed"
    events = responses_sdk.responses.create(
        model=MODEL, input="Count to 5.", temperature=0, stream=True
    )
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text
    assert len(deltas) > 3


def test_stream(responses_sdk: OpenAI) -> None:
    """`stream` accumulates every event, and its final response is the last event's."""
    with responses_sdk.responses.stream(
        model=MODEL, input="Count to 5.", temperature=0, include=["message.output_text.logprobs"]
    ) as stream:
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "1, 2, 3, 4, 5."
    assert final.usage is not None
    assert final.usage.output_tokens >= len(snapshots)


def test_a_call_and_its_result(responses_sdk: OpenAI) -> None:
    """A call that is streamed is accumulated; its item and its result are taken back."""
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    with responses_sdk.responses.stream(
        model=MODEL, input=[question], tools=TOOLS, tool_choice="required", temperature=0
    ) as stream:
        done = [e for e in stream if e.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    assert done[0].arguments == call.arguments
    assert list(json.loads(call.arguments)) == ["city"]
    assert done[0].item_id == call.id != call.call_id
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    history: Any = [question, call.model_dump(exclude={"parsed_arguments"}), result]
    answer = responses_sdk.responses.create(model=MODEL, input=history, tools=TOOLS, temperature=0)
    assert "21" in answer.output_text


class Colour(BaseModel):
    """A colour."""

    colour: Literal["red", "blue"]


def test_parse(responses_sdk: OpenAI) -> None:
    """`parse` and `stream` with a type return an object of it."""
    parsed = responses_sdk.responses.parse(model=MODEL, input="Which colour?", text_format=Colour)
    assert parsed.output_parsed is not None
    with responses_sdk.responses.stream(model=MODEL, input="Which?", text_format=Colour) as stream:
        assert stream.get_final_response().output_parsed is not None


def test_a_limit(responses_sdk: OpenAI) -> None:
    """A response that the limit cuts off is incomplete for the client, too."""
    made = responses_sdk.responses.create(
        model=MODEL, input="Count to 12.", max_output_tokens=16, temperature=0
    )
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    with responses_sdk.responses.stream(
        model=MODEL, input="Count to 12.", max_output_tokens=16, temperature=0
    ) as stream:
        last = [event.type for event in stream][-1]
    assert last == "response.incomplete"


async def test_asynchronous(leaving: AsyncOpenAI) -> None:
    """The asynchronous client streams, and may leave in the middle of it."""
    async with leaving.responses.stream(model=MODEL, input="Count to 12.", temperature=0) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
    made = await leaving.responses.create(model=MODEL, input="Count to 5.", temperature=0)
    assert made.output_text == "1, 2, 3, 4, 5."


def test_errors(responses_sdk: OpenAI) -> None:
    """Errors before a stream are those of HTTP, with the field that is wrong."""
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as found:
            responses_sdk.responses.create(model=MODEL, input="x" * 20_000, stream=stream)
        assert (found.value.param, found.value.code) == ("input", "context_length_exceeded")


def test_an_error_in_mid_stream() -> None:
    """The client raises the engine's error while it reads the stream."""
    backend = Slow(error=EngineError("lost power"))
    with (
        serving(lambda: OpenAIAdapter(backend, any_model=True)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="lost power"),
    ):
        list(client.responses.create(model=MODEL, input="x", stream=True))
