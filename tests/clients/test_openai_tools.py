"""Tests of tools with the official `openai` client on every engine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionMessageParam,
    ChatCompletionToolUnionParam,
)
from pydantic import BaseModel

ASK: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris?"}
]
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hello!"}]
RESULT = '{"temp_c": 21}'
ANSWER = "It is 21 degrees in Paris."


def tool(name: str, description: str) -> ChatCompletionToolUnionParam:
    """Return a function tool with a city as its argument."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}  # type: ignore[typeddict-item]


WEATHER = tool("get_weather", "Get the weather in a city")
TIME = tool("get_time", "Get the time in a city")


def calls_of(message: ChatCompletionMessage) -> list[tuple[str, Any]]:
    """Return the names and arguments of a message's tool calls."""
    found = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        assert re.fullmatch(r"call_[A-Za-z0-9]{24}", call.id)
        found.append((call.function.name, json.loads(call.function.arguments)))
    return found


def ask(
    sdk: OpenAI, messages: Sequence[ChatCompletionMessageParam], stream: bool, **more: Any
) -> tuple[ChatCompletionMessage, str]:
    """Return a message and its finish reason, with the stream helper or a plain request."""
    body: dict[str, Any] = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 100}
    body |= {"tools": [WEATHER], **more}
    if stream:
        with sdk.chat.completions.stream(**body) as events:
            choice = events.get_final_completion().choices[0]
            return ChatCompletionMessage.model_validate(choice.message.to_dict()), (
                choice.finish_reason
            )
    reply = sdk.chat.completions.create(**body).choices[0]
    return reply.message, reply.finish_reason


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_call_and_its_result(sdk: OpenAI, stream: bool) -> None:
    """The model calls a tool, gets its result, and answers with it."""
    message, reason = ask(sdk, ASK, stream)
    assert calls_of(message) == [("get_weather", {"city": "Paris"})]
    assert (message.content, reason) == (None, "tool_calls")
    assert message.tool_calls is not None
    talk: list[Any] = [
        *ASK,
        message.to_dict(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT},
    ]
    answer, reason = ask(sdk, talk, stream)
    assert (answer.content, answer.tool_calls, reason) == (ANSWER, None, "stop")


class GetWeather(BaseModel):
    """Get the weather in a city."""

    city: str


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("served_url", ["llama_cpp", "llama_server"], indirect=True)
def test_a_parsed_call_can_be_sent_back(sdk: OpenAI, stream: bool) -> None:
    """A message with what the client has parsed can be sent back, and no field of it is listed."""
    tools = [pydantic_function_tool(GetWeather, name="get_weather")]
    body: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 100, "tools": tools}
    if stream:
        with sdk.chat.completions.stream(messages=ASK, **body) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = sdk.chat.completions.parse(messages=ASK, **body).choices[0].message
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    talk: list[Any] = [
        *ASK,
        message,
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    reply = sdk.chat.completions.with_raw_response.create(messages=talk, **body)
    assert "x-latimer-ignored" not in reply.headers
    assert reply.parse().choices[0].message.content == ANSWER


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_model_may_answer_by_itself(sdk: OpenAI, stream: bool) -> None:
    """With `tool_choice: auto` the model can answer without a tool."""
    message, reason = ask(sdk, HELLO, stream)
    assert message.content == "Hello! How can I help you today?"
    assert (message.tool_calls, reason) == (None, "stop")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_required_calls(sdk: OpenAI, stream: bool) -> None:
    """`tool_choice: required` forces a call where the model would answer with text."""
    message, reason = ask(sdk, HELLO, stream, tool_choice="required", tools=[WEATHER, TIME])
    names = [name for name, _ in calls_of(message)]
    assert names
    assert set(names) <= {"get_weather", "get_time"}
    assert (message.content, reason) == (None, "tool_calls")


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_named_function_is_the_one_called(sdk: OpenAI, stream: bool) -> None:
    """A named function is called even if the model prefers another, and the reason is `stop`."""
    choice = {"type": "function", "function": {"name": "get_time"}}
    message, reason = ask(sdk, ASK, stream, tool_choice=choice, tools=[WEATHER, TIME])
    assert calls_of(message) == [("get_time", {"city": "Paris"})]
    assert reason == "stop"


def test_none_makes_no_call(sdk: OpenAI) -> None:
    """`tool_choice: none` gives a text answer without calls."""
    told, _ = ask(sdk, HELLO, False)
    message, reason = ask(sdk, HELLO, False, tool_choice="none")
    assert (message.content, message.tool_calls, reason) == (told.content, None, "stop")


def test_one_call_at_most(sdk: OpenAI) -> None:
    """`parallel_tool_calls: false` limits an answer to one call."""
    ask_both: list[Any] = [{"role": "user", "content": "What is the weather in Paris and Rome?"}]
    message, _ = ask(sdk, ask_both, False, tool_choice="required", parallel_tool_calls=False)
    assert len(calls_of(message)) == 1


def test_the_deprecated_functions(sdk: OpenAI) -> None:
    """The deprecated `functions` give a `function_call`, and their results are accepted."""
    body: dict[str, Any] = {"model": "m", "temperature": 0, "max_tokens": 100,
                            "functions": [WEATHER["function"]]}  # type: ignore[typeddict-item]  # fmt: skip
    choice = sdk.chat.completions.create(messages=ASK, **body).choices[0]
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "get_weather"
    assert choice.finish_reason == "function_call"
    result = {"role": "function", "name": "get_weather", "content": RESULT}
    talk: list[Any] = [*ASK, choice.message.to_dict(), result]
    answer = sdk.chat.completions.create(messages=talk, **body).choices[0]
    assert answer.message.content == ANSWER
