"""Pydantic AI with its model of Anthropic."""

from __future__ import annotations

from typing import Any

import pytest
from common import ANSWER, ASK, DEGREES, FINAL, TOM, WEATHER, Person
from pydantic_ai import Agent, ModelHTTPError, ThinkingPart, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.providers.anthropic import AnthropicProvider


def model_of(url: str, **more: Any) -> AnthropicModel:
    """Return the model of a compatible server; its base URL has no `/v1`."""
    provider = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="unused")
    settings = AnthropicModelSettings(max_tokens=400, **more)
    return AnthropicModel("demo", provider=provider, settings=settings)


async def test_chat(url: str) -> None:
    """A run returns the answer and usage."""
    result = await Agent(model_of(url, temperature=0)).run(ASK)
    assert result.output == ANSWER
    assert result.usage.output_tokens > 0


async def test_stream(url: str) -> None:
    """A streamed run's deltas join to the answer."""
    async with Agent(model_of(url, temperature=0)).run_stream(ASK) as result:
        assert "".join([delta async for delta in result.stream_text(delta=True)]) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_tools(steps_url: str, stream: bool) -> None:
    """The model thinks and calls a function twice, gets its thoughts and results, and answers."""
    agent = Agent(model_of(steps_url, anthropic_thinking={"type": "adaptive"}))

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        return DEGREES[city]

    result: Any
    if stream:
        async with agent.run_stream(WEATHER) as result:
            assert await result.get_output() == FINAL
    else:
        result = await agent.run(WEATHER)
        assert result.output == FINAL
    parts = [part for message in result.all_messages() for part in message.parts]
    thoughts = [part for part in parts if isinstance(part, ThinkingPart)]
    assert len(thoughts) == 3
    assert all(part.content and part.signature for part in thoughts)


async def test_structured(url: str) -> None:
    """An output type works by a tool; the client uses formats for models that it knows only."""
    result = await Agent(model_of(url, temperature=0), output_type=ToolOutput(Person)).run(TOM)
    assert isinstance(result.output, Person)


async def test_errors(url: str) -> None:
    """Errors are Pydantic AI's own, with the status and Anthropic's type."""
    with pytest.raises(ModelHTTPError) as overflow:
        await Agent(model_of(url)).run("word " * 5000)
    assert overflow.value.status_code == 400
    assert overflow.value.body["error"]["type"] == "invalid_request_error"
