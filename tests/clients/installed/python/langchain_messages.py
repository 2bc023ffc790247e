"""LangChain's `ChatAnthropic`."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from common import ANSWER, ASK, DEGREES, DOT, FINAL, TOM, WEATHER, Person
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_responses import said_by


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return DEGREES[city]


def model_of(url: str, **more: Any) -> ChatAnthropic:
    """Return the chat model; its base URL has no `/v1`."""
    more = {"max_tokens": 400, "max_retries": 0, **more}
    return ChatAnthropic(
        model="demo", base_url=url.removesuffix("/v1"), api_key="unused", **more
    )  # fmt: skip


def test_chat(url: str) -> None:
    """A message has the answer and usage."""
    reply = model_of(url, temperature=0).invoke(ASK)
    assert reply.text == ANSWER
    assert reply.usage_metadata["output_tokens"] > 0


def test_stream(url: str) -> None:
    """A stream joins to the answer and has usage."""
    reply = said_by(model_of(url, temperature=0), [HumanMessage(ASK)], True)
    assert reply.text == ANSWER
    assert reply.usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_tools(steps_url: str, stream: bool) -> None:
    """Two calls run the tool, their results and the reasoning lead to the answer."""
    model = model_of(steps_url, thinking={"type": "adaptive"}).bind_tools([get_weather])
    talk: list[Any] = [HumanMessage(WEATHER)]
    for _ in range(2):
        talk.append(said_by(model, talk, stream))
        talk += [get_weather.invoke(call) for call in talk[-1].tool_calls]
    assert [one.content for one in talk if one.type == "tool"] == ["21", "18"]
    talk += [said_by(model, talk, stream), HumanMessage("Say it again.")]
    assert talk[-2].text == FINAL
    assert said_by(model, talk, stream).text == FINAL


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured(url: str, method: Any) -> None:
    """`with_structured_output` returns an object by either method."""
    model = model_of(url, temperature=0).with_structured_output(Person, method=method)
    assert isinstance(model.invoke(TOM), Person)


def test_images(steps_url: str) -> None:
    """An image is a part of the prompt."""
    text = {"type": "text", "text": "What is it?"}
    image = {"type": "image", "base64": DOT, "mime_type": "image/png"}
    counts = [
        model_of(steps_url).invoke([HumanMessage(content)]).usage_metadata["input_tokens"]
        for content in ([text], [text, image])
    ]
    assert counts[1] >= counts[0] + 4


def test_count(url: str) -> None:
    """The tokens of messages are counted by the server."""
    model = model_of(url, temperature=0)
    counted = model.get_num_tokens_from_messages([HumanMessage(ASK)])
    assert counted == model.invoke(ASK).usage_metadata["input_tokens"]


def test_errors(url: str) -> None:
    """A prompt that is too long is the client's exception, with Anthropic's words."""
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        model_of(url).invoke("word " * 5000)
