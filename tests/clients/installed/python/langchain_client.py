"""LangChain's `ChatOpenAI`, and its standard tests of chat models."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from common import ANSWER, ASK, PARIS, TOM, Person
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return json.dumps({"temp_c": 21})


def model_of(url: str, **more: Any) -> ChatOpenAI:
    """Return the chat model as its documentation sets it up for other servers."""
    return ChatOpenAI(
        model="demo", base_url=url, api_key="unused", temperature=0, max_tokens=100, **more
    )


def test_chat(url: str) -> None:
    """A message has the answer and usage."""
    reply = model_of(url).invoke(ASK)
    assert reply.content == ANSWER
    assert reply.usage_metadata["output_tokens"] > 0


def test_stream(url: str) -> None:
    """A stream joins to the answer and has usage."""
    chunks = list(model_of(url, stream_usage=True).stream(ASK))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0


def test_stored(url: str) -> None:
    """A request with `store` and metadata is stored."""
    metadata = {"run": "langchain"}
    # `metadata` of the model itself is for traces only.
    body = {"metadata": metadata}
    reply = model_of(url, store=True, extra_body=body).invoke(ASK)
    client = openai.OpenAI(base_url=url, api_key="unused")
    found = [*client.chat.completions.list(metadata=metadata)]
    assert [one.choices[0].message.content for one in found] == [reply.content]
    client.chat.completions.delete(found[0].id)


async def test_batch(url: str) -> None:
    """Requests run at the same time."""
    replies = await model_of(url).abatch([ASK] * 4)
    assert [reply.content for reply in replies] == [ANSWER] * 4


def test_tools(url: str) -> None:
    """A call runs the tool, and its result leads to the answer."""
    model = model_of(url).bind_tools([get_weather])
    talk: list[Any] = [HumanMessage(PARIS)]
    talk.append(model.invoke(talk))
    assert [call["args"] for call in talk[-1].tool_calls] == [{"city": "Paris"}]
    talk.append(get_weather.invoke(talk[-1].tool_calls[0]))
    assert isinstance(talk[-1], ToolMessage)
    assert "21" in model.invoke(talk).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured(url: str, method: Any) -> None:
    """`with_structured_output` returns an object by either method."""
    model = model_of(url).with_structured_output(Person, method=method)
    assert isinstance(model.invoke(TOM), Person)


def test_logprobs(url: str) -> None:
    """Log-probabilities are in the metadata."""
    reply = model_of(url).bind(logprobs=True, top_logprobs=2).invoke(ASK)
    content = reply.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == ANSWER


def test_completions(url: str) -> None:
    """The legacy completion model answers."""
    model = OpenAI(model="demo", base_url=url, api_key="unused", temperature=0, max_tokens=5)
    assert isinstance(model.invoke("Q: What is 5 plus 3?\nA:"), str)


def test_errors(url: str) -> None:
    """A prompt that is too long is LangChain's own exception."""
    with pytest.raises(ContextOverflowError):
        model_of(url).invoke("word " * 5000)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(model="another", base_url=url, api_key="unused").invoke(ASK)
