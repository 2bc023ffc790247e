"""OpenAI's Agents SDK over chat completions."""

from __future__ import annotations

import json

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import ANSWER, ASK, PARIS, TOM, Person
from openai import AsyncOpenAI

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=100)


def model_of(url: str) -> OpenAIChatCompletionsModel:
    """Return the SDK's model for servers without Responses."""
    return OpenAIChatCompletionsModel("demo", AsyncOpenAI(base_url=url, api_key="unused"))


async def test_chat(url: str) -> None:
    """A run returns the answer."""
    agent = Agent(name="one", model=model_of(url), model_settings=SETTINGS)
    result = await Runner.run(agent, ASK)
    assert result.final_output == ANSWER


async def test_stream(url: str) -> None:
    """A streamed run has the answer in its deltas, and usage."""
    agent = Agent(
        name="one", model=model_of(url),
        model_settings=ModelSettings(temperature=0, include_usage=True),
    )  # fmt: skip
    result = Runner.run_streamed(agent, ASK)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == ANSWER
    assert result.context_wrapper.usage.output_tokens > 0


async def test_tools(url: str) -> None:
    """The model calls a function, gets its result and answers."""
    asked = []

    @function_tool
    def get_weather(city: str) -> str:
        """Get the weather in a city."""
        asked.append(city)
        return json.dumps({"temp_c": 21})

    agent = Agent(name="one", model=model_of(url), model_settings=SETTINGS, tools=[get_weather])
    result = await Runner.run(agent, PARIS)
    assert asked == ["Paris"]
    assert "21" in result.final_output


async def test_stored(url: str) -> None:
    """A run with `store` and metadata is stored, and its completion has them."""
    settings = ModelSettings(temperature=0, store=True, metadata={"run": "agents-sdk"})
    agent = Agent(name="one", model=model_of(url), model_settings=settings)
    result = await Runner.run(agent, ASK)
    client = AsyncOpenAI(base_url=url, api_key="unused")
    found = [one async for one in client.chat.completions.list(metadata={"run": "agents-sdk"})]
    assert [one.choices[0].message.content for one in found] == [result.final_output]
    await client.chat.completions.delete(found[0].id)


async def test_structured(url: str) -> None:
    """An output type is enforced and parsed."""
    agent = Agent(name="one", model=model_of(url), model_settings=SETTINGS, output_type=Person)
    result = await Runner.run(agent, TOM)
    assert isinstance(result.final_output, Person)
