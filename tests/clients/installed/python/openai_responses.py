"""The `openai` package over the Responses API, with strict validation."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from common import ANSWER, ASK, DEGREES, DOT, FINAL, PARIS, TOM, WEATHER, Person
from openai import AsyncOpenAI, OpenAI, pydantic_function_tool
from openai.types.responses import FunctionToolParam
from pydantic import BaseModel

TOOL: FunctionToolParam = {
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


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


def client_of(url: str) -> OpenAI:
    """Return the client with a base URL and a key, which validates responses."""
    return OpenAI(base_url=url, api_key="unused", _strict_response_validation=True, max_retries=0)


@pytest.fixture
def client(url: str) -> OpenAI:
    """Return a client of the demo model."""
    return client_of(url)


@pytest.fixture
def thinker(steps_url: str) -> OpenAI:
    """Return a client of the model that thinks and calls a tool twice."""
    return client_of(steps_url)


def test_chat(client: OpenAI) -> None:
    """A response has the answer and usage, and is retrieved as it was created."""
    made = client.responses.create(model="demo", input=ASK, temperature=0)
    assert made.output_text == ANSWER
    assert made.usage is not None
    assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    counted = client.responses.input_tokens.count(model="demo", input=ASK)
    assert counted.input_tokens == made.usage.input_tokens


def test_stream(client: OpenAI) -> None:
    """The stream helper accumulates the deltas and returns the last event's response."""
    with client.responses.stream(model="demo", input=ASK, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == ANSWER
    again = client.responses.retrieve(final.id, stream=True, starting_after=2)
    assert [event.sequence_number for event in again][:2] == [3, 4]


async def test_asynchronous(url: str) -> None:
    """The asynchronous client gets the same answer."""
    async with AsyncOpenAI(base_url=url, api_key="unused") as client:
        made = await client.responses.create(model="demo", input=ASK, temperature=0)
    assert made.output_text == ANSWER


def step(client: OpenAI, stream: bool, **body: Any) -> Any:
    """Return a response to a request, plain or by the stream helper."""
    body = {"model": "demo", "tools": [TOOL], **body}
    if not stream:
        return client.responses.create(**body)
    with client.responses.stream(**body) as events:
        return events.get_final_response()


def outputs(response: Any) -> list[Any]:
    """Return the results of a response's calls."""
    return [
        {
            "type": "function_call_output", "call_id": item.call_id,
            "output": DEGREES[json.loads(item.arguments)["city"]],
        }
        for item in response.output if item.type == "function_call"
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_tools(thinker: OpenAI, stream: bool) -> None:
    """Two calls and their results lead to the answer, with all items sent back."""
    talk: list[Any] = [{"role": "user", "content": WEATHER}]
    for _ in range(3):
        made = step(thinker, stream, input=talk)
        talk += [item.to_dict() for item in made.output]
        talk += outputs(made)
    assert made.output_text == FINAL


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning(thinker: OpenAI, stream: bool) -> None:
    """Reasoning that the client keeps is encrypted, and leads on without the server's store."""
    talk: list[Any] = [{"role": "user", "content": WEATHER}]
    for _ in range(3):
        made = step(
            thinker, stream, input=talk, store=False, include=["reasoning.encrypted_content"],
            reasoning={"effort": "low", "summary": "auto"},
        )  # fmt: skip
        thought = made.output[0]
        assert thought.type == "reasoning"
        assert thought.summary[0].text == thought.content[0].text
        talk.append({**thought.to_dict(), "summary": [], "content": None})
        talk += [item.to_dict() for item in made.output[1:]]
        talk += outputs(made)
    assert made.output_text == FINAL
    with pytest.raises(openai.NotFoundError):
        thinker.responses.retrieve(made.id)


@pytest.mark.parametrize("stream", [False, True])
def test_previous_response_id(thinker: OpenAI, stream: bool) -> None:
    """Two calls and their results lead to the answer, with only the new items sent."""
    made = step(thinker, stream, input=WEATHER)
    first = made.id
    for _ in range(2):
        made = step(thinker, stream, input=outputs(made), previous_response_id=made.id)
    assert made.output_text == FINAL
    listed = [*thinker.responses.input_items.list(made.id)]
    assert [item.type for item in listed] == ["function_call_output"]
    thinker.responses.delete(first)
    with pytest.raises(openai.BadRequestError) as gone:
        step(thinker, stream, input="And?", previous_response_id=made.id)
    assert gone.value.code == "previous_response_not_found"


def test_conversations(thinker: OpenAI) -> None:
    """A conversation keeps the items of its responses, and they lead to the answer."""
    conversation = thinker.conversations.create(metadata={"topic": "weather"}).id
    made = step(thinker, False, input=WEATHER, conversation=conversation)
    for stream in (True, False):
        made = step(thinker, stream, input=outputs(made), conversation=conversation)
    assert made.output_text == FINAL
    assert made.conversation.id == conversation
    kinds = [item.type for item in thinker.conversations.items.list(conversation, order="asc")]
    call = ["reasoning", "function_call", "function_call_output"]
    assert kinds == ["message", *call, *call, "reasoning", "message"]
    assert thinker.conversations.delete(conversation).deleted


def test_structured(client: OpenAI) -> None:
    """`parse`, and the stream helper with a class, return an object of it."""
    made = client.responses.parse(model="demo", input=TOM, temperature=0, text_format=Person)
    assert isinstance(made.output_parsed, Person)
    with client.responses.stream(model="demo", input=TOM, text_format=Person) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Person)


def test_arguments(client: OpenAI) -> None:
    """The arguments of a strict function are parsed."""
    made = client.responses.parse(
        model="demo", input=PARIS, temperature=0,
        tool_choice="required", tools=[pydantic_function_tool(GetWeather)],
    )  # fmt: skip
    (call,) = made.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, GetWeather)


def test_logprobs(client: OpenAI) -> None:
    """Log-probabilities come with their alternatives."""
    made = client.responses.create(
        model="demo", input=ASK, temperature=0, top_logprobs=3,
        include=["message.output_text.logprobs"],
    )  # fmt: skip
    (item,) = made.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(one.token for one in part.logprobs) == ANSWER
    assert all(len(one.top_logprobs) == 3 for one in part.logprobs)


def test_images(thinker: OpenAI) -> None:
    """An image is a part of the prompt."""
    parts: list[Any] = [{"type": "input_text", "text": "What is it?"}]
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{DOT}", "detail": "auto"}
    counts = []
    for content in (parts, [*parts, image]):
        made = thinker.responses.create(
            model="demo", input=[{"role": "user", "content": content}], temperature=0
        )
        assert made.usage is not None
        counts.append(made.usage.input_tokens)
    assert counts[1] >= counts[0] + 4


def test_errors(client: OpenAI) -> None:
    """Errors are the client's own exceptions, with OpenAI's codes."""
    with pytest.raises(openai.BadRequestError) as overflow:
        client.responses.create(model="demo", input="word " * 5000)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as missing:
        client.responses.create(model="another", input=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.responses.create(model="demo", input=ASK, temperature=-1)
    assert wrong.value.param == "temperature"
    made = client.responses.create(model="demo", input="Count to 12.", max_output_tokens=16)
    assert made.status == "incomplete"


def test_abort(client: OpenAI) -> None:
    """A stream that is closed early does not disturb the next request."""
    with client.responses.create(model="demo", input="Tell me a story.", stream=True) as stream:
        next(iter(stream))
    test_chat(client)
