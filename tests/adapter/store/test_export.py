"""Tests of the lines for fine-tuning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from latimer.adapter.store.export import KIND, lines
from latimer.adapter.store.records import Stored
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from pydantic import TypeAdapter
from support.stored import PIXEL

MESSAGE = TypeAdapter[Any](ChatCompletionMessageParam)
TOOL = TypeAdapter[Any](ChatCompletionFunctionToolParam)
BY_ROLE = {
    "assistant": ChatCompletionAssistantMessageParam,
    "system": ChatCompletionSystemMessageParam,
    "tool": ChatCompletionToolMessageParam,
    "user": ChatCompletionUserMessageParam,
}
USER = {"role": "user", "content": "What is the weather in Paris?"}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


def answer(content: str | None = "Fine.", **other: Any) -> dict[str, Any]:
    """Return a message as Latimer replies it."""
    return {"role": "assistant", "content": content, "refusal": None, "annotations": [], **other}


def exported(request: dict[str, Any], *answers: Any, reasoning: bool = False) -> list[Any]:
    """Return the examples of a stored object, each checked with the types of OpenAI's package."""
    choices = [
        {"index": index, "message": message, "finish_reason": "stop", "logprobs": None}
        for index, message in enumerate(answers)
    ]
    stored = Stored("chatcmpl-1", KIND, "", 0, "m", "req_1", {}, request, {"choices": choices})
    found = [json.loads(line) for line in lines(stored, reasoning)]
    for one in found:
        assert one.keys() <= {"messages", "tools", "parallel_tool_calls", "functions"}
        for message in one["messages"]:
            MESSAGE.validate_python(message)
            known = BY_ROLE[message["role"]].__annotations__.keys()
            assert message.keys() <= known | {"reasoning_content"}, message
        for tool in one.get("tools", ()):
            TOOL.validate_python(tool)
        assert one["messages"][-1]["role"] == "assistant"
    return found


def test_an_answer_becomes_a_line() -> None:
    """A line has the messages of the request and the answer, and no other field of them."""
    request = {"model": "m", "temperature": 0, "store": True, "messages": [USER]}
    assert exported(request, answer()) == [
        {"messages": [USER, {"role": "assistant", "content": "Fine."}]}
    ]


def test_every_choice_has_a_line() -> None:
    """Each of several choices is an example of its own."""
    found = exported({"messages": [USER]}, answer("One"), answer("Two"))
    assert [one["messages"][-1]["content"] for one in found] == ["One", "Two"]


def test_a_spoken_answer_is_its_transcript() -> None:
    """The content of spoken answers, of this response and of earlier ones, is their text."""
    audio = {"id": "audio_0", "data": "", "transcript": "Hi there."}
    message = {**answer(None), "audio": audio}
    (found,) = exported({"messages": [USER, message, USER]}, message)
    spoken = {"role": "assistant", "content": "Hi there."}
    assert found["messages"] == [USER, spoken, USER, spoken]


def test_tools_and_calls_are_kept() -> None:
    """A line has the tools, and the calls with their arguments as text."""
    request = {
        "messages": [
            USER,
            {**answer(None), "tool_calls": [CALL], "audio": None},
            {"role": "tool", "tool_call_id": "call_1", "content": "20 °C"},
        ],
        "tools": [WEATHER],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
    }
    (found,) = exported(request, answer(None, tool_calls=[CALL]))
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert found == {
        "messages": [USER, called, request["messages"][2], called],  # type: ignore[index]
        "tools": [WEATHER],
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_on_request(field: str) -> None:
    """Reasoning of this answer and earlier ones is dropped, or kept under one name."""
    message = answer("Fine.", **{field: "Hm."})
    request = {"messages": [USER, message, USER]}
    (without,) = exported(request, message)
    assert [one.keys() for one in without["messages"][1::2]] == [{"role", "content"}] * 2
    (kept,) = exported(request, message, reasoning=True)
    assert [one["reasoning_content"] for one in kept["messages"][1::2]] == ["Hm."] * 2


def test_an_answer_without_content_has_no_line() -> None:
    """A choice that was cut off while the model was reasoning has no line; a refusal has one."""
    empty = [answer(None), answer("", reasoning_content="Hm"), answer("", tool_calls=[])]
    assert exported({"messages": [USER]}, *empty) == []
    (found,) = exported({"messages": [USER]}, answer(None, refusal="No."))
    assert found["messages"][-1] == {"role": "assistant", "content": None, "refusal": "No."}


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 2),
        ({"continue_final_message": True, "add_generation_prompt": False}, 2),
        ({"add_generation_prompt": True}, 3),
        ({"continue_final_message": False}, 3),
    ],
)
@pytest.mark.parametrize("content", ["The sky", [{"type": "text", "text": "The sky"}]])
def test_a_continued_message_is_one_message(
    fields: dict[str, Any], number: int, content: Any
) -> None:
    """An answer that continues the assistant's last message is joined with it."""
    request = {"messages": [USER, {"role": "assistant", "content": content}], **fields}
    (found,) = exported(request, answer(" is blue."))
    assert len(found["messages"]) == number
    if number == 2:
        assert found["messages"][-1] == {"role": "assistant", "content": "The sky is blue."}


def test_parts_with_images_are_kept() -> None:
    """Images stay in the messages as data URLs."""
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    (found,) = exported({"messages": [{"role": "user", "content": [image]}]}, answer())
    assert found["messages"][0]["content"] == [image]
