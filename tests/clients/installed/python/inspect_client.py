"""Inspect's provider `openai-api`."""

from __future__ import annotations

from typing import Any

from common import ANSWER, ASK, PARIS, TOM, Person
from inspect_ai.model import ChatMessageUser, GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import JSONSchema, json_schema


def model_of(url: str, **more: Any) -> Model:
    """Return the model of a compatible server."""
    return get_model(
        "openai-api/latimer/demo", base_url=url, api_key="unused", memoize=False,
        config=GenerateConfig(temperature=0, max_tokens=100, max_retries=0, **more),
    )  # fmt: skip


async def test_chat(url: str) -> None:
    """A generation has the answer and usage."""
    reply = await model_of(url).generate(ASK)
    assert reply.completion == ANSWER
    assert reply.usage.output_tokens > 0


async def test_logprobs(url: str) -> None:
    """Log-probabilities are kept."""
    reply = await model_of(url, logprobs=True, top_logprobs=2).generate("Hello!")
    assert reply.choices[0].logprobs.content


async def test_tools(url: str) -> None:
    """A call has the arguments of its schema."""
    city = {"city": JSONSchema(type="string", description="the city")}
    tool = ToolInfo(
        name="get_weather", description="Get the weather in a city",
        parameters=ToolParams(properties=city, required=["city"]),
    )  # fmt: skip
    talk = [ChatMessageUser(content=PARIS)]
    reply = await model_of(url).generate(talk, tools=[tool], tool_choice="any")
    assert [call.function for call in reply.message.tool_calls] == ["get_weather"]


async def test_structured(url: str) -> None:
    """A response schema is enforced."""
    schema = ResponseSchema(name="person", json_schema=json_schema(Person))
    reply = await model_of(url, response_schema=schema).generate(TOM)
    Person.model_validate_json(reply.completion)


async def test_reasoning_effort(url: str) -> None:
    """`reasoning_effort` is accepted by a model that does not reason."""
    reply = await model_of(url, reasoning_effort="low").generate("Hello!")
    assert reply.completion
