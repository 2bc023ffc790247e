"""OpenAI's Agents SDK with responses over a WebSocket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    ResponsesWebSocketSession,
    function_tool,
    responses_websocket_session,
    set_tracing_disabled,
)
from common import ANSWER, ASK, DEGREES, FINAL, TOM, WEATHER, Person
from openai.types.shared import Reasoning

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return DEGREES[city]


@pytest.fixture
async def session(url: str) -> AsyncIterator[ResponsesWebSocketSession]:
    """Return a session with the demo model."""
    async with responses_websocket_session(api_key="unused", base_url=url) as made:
        yield made


@pytest.fixture
async def thinker(steps_url: str) -> AsyncIterator[ResponsesWebSocketSession]:
    """Return a session with the model that thinks and calls a tool twice."""
    async with responses_websocket_session(api_key="unused", base_url=steps_url) as made:
        yield made


def agent_of(*tools: Any, **more: Any) -> Agent:
    """Return an agent by the name of its model only."""
    more = {"model_settings": SETTINGS, **more}
    return Agent(name="first", model="demo", tools=list(tools), **more)


async def test_chat(session: ResponsesWebSocketSession) -> None:
    """Two runs return the answer on one connection."""
    for _ in range(2):
        result = await session.run(agent_of(instructions="Be brief."), ASK)
        assert result.final_output == ANSWER


async def test_stream(session: ResponsesWebSocketSession) -> None:
    """A streamed run has the answer in its deltas, and usage."""
    result = session.run_streamed(agent_of(), ASK)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output == ANSWER
    assert result.context_wrapper.usage.output_tokens > 0


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("more", [{}, {"auto_previous_response_id": True}], ids=["items", "chain"])
async def test_tools(thinker: ResponsesWebSocketSession, more: Any, store: bool) -> None:
    """Two calls run the tool, and the answer follows, plain and streamed, stored or not."""
    settings = ModelSettings(
        temperature=0, store=store, response_include=["reasoning.encrypted_content"],
        reasoning=Reasoning(effort="low", summary="auto"),
    )  # fmt: skip
    agent = agent_of(get_weather, model_settings=settings)
    assert (await thinker.run(agent, WEATHER, **more)).final_output == FINAL
    result = thinker.run_streamed(agent, WEATHER, **more)
    names = [event.name async for event in result.stream_events() if "item" in event.type]
    assert result.final_output == FINAL
    assert names.count("tool_output") == 2


async def test_structured(session: ResponsesWebSocketSession) -> None:
    """An output type is enforced and parsed."""
    result = await session.run(agent_of(output_type=Person), TOM)
    assert isinstance(result.final_output, Person)


async def test_errors(session: ResponsesWebSocketSession) -> None:
    """A prompt that is too long is an error, and the connection stays usable."""
    with pytest.raises(Exception, match="exceeds the context window"):
        await session.run(agent_of(), "word " * 5000)
    assert (await session.run(agent_of(), ASK)).final_output == ANSWER
