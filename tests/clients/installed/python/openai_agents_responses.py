"""OpenAI's Agents SDK with its default model, which uses the Responses API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIConversationsSession,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from common import ANSWER, ASK, DEGREES, FINAL, TOM, WEATHER, Person
from openai import AsyncOpenAI
from openai.types.shared import Reasoning

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0)


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return DEGREES[city]


def use(url: str) -> Iterator[AsyncOpenAI]:
    """Make a client the SDK's default, as its documentation shows."""
    client = AsyncOpenAI(base_url=url, api_key="unused", _strict_response_validation=True)
    set_default_openai_client(client, use_for_tracing=False)
    yield client


@pytest.fixture
def client(url: str) -> Iterator[AsyncOpenAI]:
    """Use the demo model."""
    yield from use(url)


@pytest.fixture
def thinker(steps_url: str) -> Iterator[AsyncOpenAI]:
    """Use the model that thinks and calls a tool twice."""
    yield from use(steps_url)


def agent_of(*tools: Any, **more: Any) -> Agent:
    """Return an agent by the name of its model only."""
    more = {"model_settings": SETTINGS, **more}
    return Agent(name="first", model="demo", tools=list(tools), **more)


@pytest.mark.usefixtures("client")
async def test_chat() -> None:
    """A run returns the answer."""
    assert (await Runner.run(agent_of(instructions="Be brief."), ASK)).final_output == ANSWER


@pytest.mark.usefixtures("client")
async def test_stream() -> None:
    """A streamed run has the answer in its deltas, and usage."""
    result = Runner.run_streamed(agent_of(), ASK)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output == ANSWER
    assert result.context_wrapper.usage.output_tokens > 0


@pytest.mark.usefixtures("thinker")
@pytest.mark.parametrize("more", [{}, {"auto_previous_response_id": True}], ids=["items", "chain"])
async def test_tools(more: Any) -> None:
    """Two calls run the tool, and the answer follows, plain and streamed."""
    agent = agent_of(get_weather)
    assert (await Runner.run(agent, WEATHER, **more)).final_output == FINAL
    result = Runner.run_streamed(agent, WEATHER, **more)
    names = [event.name async for event in result.stream_events() if "item" in event.type]
    assert result.final_output == FINAL
    assert names.count("tool_output") == 2


@pytest.mark.usefixtures("thinker")
async def test_reasoning() -> None:
    """Reasoning that nothing stores is encrypted, and leads on."""
    settings = ModelSettings(
        temperature=0, store=False, response_include=["reasoning.encrypted_content"],
        reasoning=Reasoning(effort="low", summary="auto"),
    )  # fmt: skip
    result = await Runner.run(agent_of(get_weather, model_settings=settings), WEATHER)
    assert result.final_output == FINAL
    thoughts = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    assert len(thoughts) == 3
    assert all(one.encrypted_content for one in thoughts)


@pytest.mark.usefixtures("thinker")
async def test_handoff() -> None:
    """An agent hands the conversation over to another one, plain and streamed."""
    second = Agent(name="second", model="demo", instructions="Answer.")
    agent = agent_of(get_weather, handoffs=[second])
    result = await Runner.run(agent, "Which city?")
    assert (result.last_agent.name, result.final_output) == ("second", "Paris is the capital.")
    streamed = Runner.run_streamed(agent, "Which city?")
    _ = [event async for event in streamed.stream_events()]
    assert streamed.final_output == result.final_output


@pytest.mark.usefixtures("client")
async def test_structured() -> None:
    """An output type is enforced and parsed."""
    agent = agent_of(output_type=Person)
    result = await Runner.run(agent, TOM)
    assert isinstance(result.final_output, Person)


async def test_conversations(thinker: AsyncOpenAI) -> None:
    """A session in a conversation of the server keeps all items; so does one of the client."""
    for session in (OpenAIConversationsSession(openai_client=thinker), SQLiteSession("one")):
        result = await Runner.run(agent_of(get_weather), WEATHER, session=session)
        assert result.final_output == FINAL
        result = await Runner.run(agent_of(get_weather), "Say it again.", session=session)
        assert result.final_output == FINAL
        kinds = [item.get("type", "message") for item in await session.get_items()]
        assert kinds.count("function_call_output") == 2
        await session.clear_session()


@pytest.mark.usefixtures("thinker")
async def test_stored() -> None:
    """A run continues the response of another run."""
    first = await Runner.run(agent_of(get_weather), WEATHER)
    result = await Runner.run(
        agent_of(get_weather), "And now?", previous_response_id=first.last_response_id
    )
    assert result.final_output == FINAL
