"""LlamaIndex's `OpenAILike`."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from common import ANSWER, ASK, JAPAN, PARIS, TOM, Person
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model_of(url: str, **more: Any) -> OpenAILike:
    """Return the model as the documentation of OpenAILike sets it up."""
    return OpenAILike(
        model="demo", api_base=url, api_key="unused", is_chat_model=True, temperature=0,
        is_function_calling_model=True, context_window=2048, max_tokens=100, **more,
    )  # fmt: skip


def test_chat(url: str) -> None:
    """A chat has the answer."""
    assert model_of(url).chat([ChatMessage(role="user", content=ASK)]).message.content == ANSWER


async def test_stream(url: str) -> None:
    """A stream's deltas join to the answer."""
    stream = await model_of(url).astream_chat([ChatMessage(role="user", content=ASK)])
    assert "".join([one.delta or "" async for one in stream]) == ANSWER


def test_completions(url: str) -> None:
    """The legacy route answers if the model is not a chat model."""
    model = OpenAILike(
        model="demo", api_base=url, api_key="unused", temperature=0, max_tokens=9,
        context_window=2048,
    )  # fmt: skip
    assert "Tokyo" in model.complete(JAPAN).text


def test_tools(url: str) -> None:
    """The model calls a function, gets its result and answers."""
    asked = []

    def get_weather(city: str) -> str:
        """Get the weather in a city"""
        asked.append(city)
        return json.dumps({"temp_c": 21})

    tool = FunctionTool.from_defaults(get_weather)
    result = model_of(url).predict_and_call([tool], PARIS)
    assert asked == ["Paris"]
    assert "21" in str(result)


def test_structured(url: str) -> None:
    """`as_structured_llm` returns an object."""
    model = model_of(url, should_use_structured_outputs=True).as_structured_llm(Person)
    assert isinstance(model.complete(TOM).raw, Person)


def test_errors(url: str) -> None:
    """An error of the request is not tried again."""
    with pytest.raises(openai.BadRequestError) as overflow:
        model_of(url).chat([ChatMessage(role="user", content="word " * 5000)])
    assert overflow.value.code == "context_length_exceeded"
