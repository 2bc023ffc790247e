"""smolagents with its model of OpenAI-compatible servers."""

from __future__ import annotations

from common import ANSWER, ASK, PARIS
from smolagents import OpenAIServerModel, Tool


class Weather(Tool):  # type: ignore[misc]
    """A tool with a city as its argument."""

    name = "get_weather"
    description = "Get the weather in a city"
    inputs = {"city": {"type": "string", "description": "the city"}}  # noqa: RUF012
    output_type = "string"

    def forward(self, city: str) -> str:
        """Return the weather."""
        return f"21 degrees in {city}"


def model_of(url: str) -> OpenAIServerModel:
    """Return the model of a compatible server."""
    return OpenAIServerModel("demo", api_base=url, api_key="unused", temperature=0, max_tokens=100)


def message(text: str) -> list[dict[str, object]]:
    """Return a user's message with parts, as agents write them."""
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def test_chat(url: str) -> None:
    """A generation has the answer and usage."""
    reply = model_of(url).generate(message(ASK))
    assert reply.content == ANSWER
    assert reply.token_usage.output_tokens > 0


def test_stream(url: str) -> None:
    """A stream joins to the answer."""
    stream = model_of(url).generate_stream(message(ASK))
    assert "".join(one.content or "" for one in stream) == ANSWER


def test_tools(url: str) -> None:
    """A required call has arguments of the tool's schema."""
    reply = model_of(url).generate(message(PARIS), tools_to_call_from=[Weather()])
    assert [call.function.name for call in reply.tool_calls] == ["get_weather"]
