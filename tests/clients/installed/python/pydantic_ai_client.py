"""Pydantic AI with its chat model of OpenAI."""

from __future__ import annotations

import json

import pytest
from common import ANSWER, ASK, PARIS, TOM, Person
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


def model_of(url: str, name: str = "demo") -> OpenAIChatModel:
    """Return the model of a compatible server."""
    return OpenAIChatModel(
        name, provider=OpenAIProvider(base_url=url, api_key="unused"),
        settings=ModelSettings(temperature=0, max_tokens=100),
    )  # fmt: skip


async def test_chat(url: str) -> None:
    """A run returns the answer and usage."""
    result = await Agent(model_of(url)).run(ASK)
    assert result.output == ANSWER
    assert result.usage.output_tokens > 0


async def test_stream(url: str) -> None:
    """A streamed run's deltas join to the answer."""
    async with Agent(model_of(url)).run_stream(ASK) as result:
        assert "".join([delta async for delta in result.stream_text(delta=True)]) == ANSWER


async def test_tools(url: str) -> None:
    """The model calls a function, gets its result and answers."""
    agent = Agent(model_of(url))
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        asked.append(city)
        return json.dumps({"temp_c": 21})

    result = await agent.run(PARIS)
    assert asked == ["Paris"]
    assert "21" in result.output


@pytest.mark.parametrize("way", [NativeOutput, ToolOutput])
async def test_structured(url: str, way: type[NativeOutput[Person]]) -> None:
    """An output type works by a format and by a tool."""
    result = await Agent(model_of(url), output_type=way(Person)).run(TOM)
    assert isinstance(result.output, Person)


async def test_errors(url: str) -> None:
    """Errors are Pydantic AI's own, with the status and OpenAI's code."""
    with pytest.raises(ModelHTTPError) as overflow:
        await Agent(model_of(url)).run("word " * 5000)
    assert overflow.value.status_code == 400
    assert overflow.value.body["code"] == "context_length_exceeded"
    with pytest.raises(ModelHTTPError):
        await Agent(model_of(url, "another")).run(ASK)
