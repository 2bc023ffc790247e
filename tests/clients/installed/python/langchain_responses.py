"""LangChain's `ChatOpenAI` with `use_responses_api`."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from common import ANSWER, ASK, DEGREES, DOT, FINAL, TOM, WEATHER, Person
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return DEGREES[city]


def model_of(url: str, **more: Any) -> ChatOpenAI:
    """Return the chat model, which stores responses unless `store` is False."""
    return ChatOpenAI(
        model="demo", base_url=url, api_key="unused", use_responses_api=True, temperature=0, **more
    )


def said_by(model: Any, talk: list[Any], stream: bool) -> AIMessage:
    """Return the message of a model, plain or joined from a stream's chunks."""
    if not stream:
        message: AIMessage = model.invoke(talk)
        return message
    whole: Any = None
    for chunk in model.stream(talk):
        whole = chunk if whole is None else whole + chunk
    assert isinstance(whole, AIMessage)
    return whole


def test_chat(url: str) -> None:
    """A message has the answer and usage."""
    reply = model_of(url, max_tokens=100).invoke(ASK)
    assert reply.text == ANSWER
    assert reply.usage_metadata["output_tokens"] > 0
    assert reply.response_metadata["id"].startswith("resp_")


def test_stream(url: str) -> None:
    """A stream joins to the answer and has usage."""
    chunks = list(model_of(url).stream(ASK))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0


async def test_batch(url: str) -> None:
    """Requests run at the same time."""
    replies = await model_of(url).abatch([ASK] * 4)
    assert [reply.text for reply in replies] == [ANSWER] * 4


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "chain": {"use_previous_response_id": True},
    "encrypted": {
        "store": False, "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
    },
    "blocks": {"output_version": "v1"},
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", SETTINGS.values(), ids=SETTINGS)
def test_tools(steps_url: str, more: Any, stream: bool) -> None:
    """Two calls run the tool, their results and the reasoning lead to the answer."""
    model = model_of(steps_url, **more).bind_tools([get_weather])
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
    model = model_of(url).with_structured_output(Person, method=method)
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


def test_errors(url: str) -> None:
    """A prompt that is too long is LangChain's own exception, and the client's."""
    with pytest.raises(ContextOverflowError, match="exceeds the context window") as caught:
        model_of(url).invoke("word " * 5000)
    assert isinstance(caught.value, openai.BadRequestError)
