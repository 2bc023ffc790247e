"""Tests of the responses about stored chat completions, without a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from latimer.adapter.endpoints.stored import (
    completion,
    completion_of,
    joined,
    listed_completion,
    message_number,
    message_of,
    messages,
)
from latimer.adapter.store.records import Stored
from latimer.conformance.published import first_wrong
from openai.types.chat import ChatCompletion, ChatCompletionStoreMessage

ID = "chatcmpl-0660e9ffc1636faff6bf09c7"
LOGPROBS = {
    "content": [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}],
    "refusal": None,
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHOICES: list[dict[str, Any]] = [
    {"index": 0, "finish_reason": "stop", "logprobs": LOGPROBS,
     "message": {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [],
                 "reasoning_content": "Greet."}},
    {"index": 1, "finish_reason": "tool_calls", "logprobs": None,
     "message": {"role": "assistant", "content": None, "refusal": None, "annotations": [],
                 "tool_calls": [CALL]}},
]  # fmt: skip
REPLY = {
    "id": ID, "object": "chat.completion", "created": 1_795_407_994, "model": "demo",
    "system_fingerprint": "fp_0", "choices": CHOICES, "metadata": {"old": "pair"},
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}  # fmt: skip
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
SENT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "name": "Ann", "content": [
        {"type": "text", "text": "What is "}, URL, {"type": "text", "text": "this?"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    {"role": "user", "content": [URL]},
]  # fmt: skip


def stored(reply: dict[str, Any] = REPLY, **request: Any) -> Stored:
    """Return a stored chat completion with these fields in its request."""
    sent = {"model": "demo", "messages": SENT, "store": True, **request}
    return Stored(ID, "chat.completion", "", 1, "demo", "req_7", {"new": "pair"}, sent, reply)


def json(parts: Sequence[bytes]) -> Any:
    """Return the value of JSON in parts."""
    return orjson.loads(b"".join(parts))


def test_a_completion_is_as_it_was_sent() -> None:
    """All choices are returned with log-probabilities, reasoning and calls, and null if absent."""
    found = json(completion(stored()))
    for name in ("id", "object", "created", "model", "system_fingerprint", "usage"):
        assert found[name] == REPLY[name]
    assert found["choices"] == [
        {**CHOICES[0], "message": {**CHOICES[0]["message"], "tool_calls": None,
                                   "function_call": None}},
        {**CHOICES[1], "message": {**CHOICES[1]["message"], "function_call": None}},
    ]  # fmt: skip
    assert first_wrong(ChatCompletion, found) is None


def test_a_completion_has_defaults() -> None:
    """Parameters that the request lacks, or that are null, have OpenAI's defaults."""
    requests: list[dict[str, Any]] = [
        {}, {"temperature": None, "seed": None, "tools": None, "user": None},
    ]  # fmt: skip
    for request in requests:
        found = json(completion(stored(**request)))
        assert {name: found[name] for name in found.keys() - REPLY.keys()} == {
            "request_id": "req_7", "tool_choice": None, "seed": None, "top_p": 1.0,
            "temperature": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "input_user": None, "service_tier": "default", "tools": None, "response_format": None,
        }  # fmt: skip
        assert found["metadata"] == {"new": "pair"}


def test_a_completion_has_the_parameters_of_its_request() -> None:
    """Parameters are those of the request, also if it has them as another server's fields."""
    own = {
        "temperature": 0, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -1, "seed": 7,
        "tools": [TOOL], "tool_choice": "auto", "response_format": {"type": "text"},
    }  # fmt: skip
    found = completion_of(stored({**REPLY, "service_tier": "flex"}, **own, user="ann"))
    assert {name: found[name] for name in own} == own  # type: ignore[literal-required]
    assert (found["input_user"], found["service_tier"]) == ("ann", "flex")
    found = completion_of(stored(options={"temperature": 0.25, "seed": 3}, unknown_field=1))
    assert (found["temperature"], found["seed"]) == (0.25, 3)


def test_a_request_that_is_refused_today_is_shown() -> None:
    """A stored request is shown as it is if its fields contradict each other by today's rules."""
    found = completion_of(stored(temperature=0.5, options={"temperature": 0.25}))
    assert found["temperature"] == 0.5


@pytest.mark.parametrize(("count", "has_more"), [(0, False), (1, False), (3, True)])
def test_a_list_has_its_ends(count: int, has_more: bool) -> None:
    """A list has the ids of its first and last item, null if it is empty, and `has_more`."""
    found = json(joined([listed_completion(one) for one in [stored()] * count], has_more))
    assert list(found) == ["object", "data", "first_id", "last_id", "has_more"]
    assert [one["id"] for one in found["data"]] == [ID] * count
    ends = [ID if count else None] * 2
    assert [found["first_id"], found["last_id"], found["has_more"]] == [*ends, has_more]


def test_messages_have_ids_and_parts() -> None:
    """A message has its number in its id, the text of its parts as content, and its calls."""
    found = json(messages(stored(), None, 20, descending=False))
    shown = [(one["content"], one["name"], one["content_parts"]) for one in found["data"]]
    assert shown == [
        ("Be brief.", None, None),
        ("What is this?", "Ann", SENT[1]["content"]),
        (None, None, None),
        ("1", None, None),
        (None, None, [URL]),
    ]
    assert [one["id"] for one in found["data"]] == [f"{ID}-{number}" for number in range(5)]
    assert [one["role"] for one in found["data"]] == [one["role"] for one in SENT]
    assert found["data"][2]["tool_calls"] == [CALL]
    assert found["data"][3]["tool_call_id"] == "call_1"
    for one in found["data"]:
        assert first_wrong(ChatCompletionStoreMessage, {**one, "role": "assistant"}) is None


@pytest.mark.parametrize(
    ("after", "limit", "descending", "numbers", "has_more"),
    [
        (None, 20, False, [0, 1, 2, 3, 4], False),
        (None, 5, False, [0, 1, 2, 3, 4], False),
        (None, 2, False, [0, 1], True),
        (1, 2, False, [2, 3], True),
        (3, 2, False, [4], False),
        (4, 2, False, [], False),
        (None, 2, True, [4, 3], True),
        (3, 3, True, [2, 1, 0], False),
        (0, 1, True, [], False),
    ],
)
def test_messages_have_pages(
    after: int | None, limit: int, descending: bool, numbers: list[int], has_more: bool
) -> None:
    """Pages of messages have `limit` items, continue after an item, and run in both directions."""
    found = json(messages(stored(), after, limit, descending))
    assert [one["id"] for one in found["data"]] == [f"{ID}-{number}" for number in numbers]
    assert found["has_more"] is has_more


def test_ids_of_messages_are_exact() -> None:
    """Only the id of an existing message of the same completion has a number."""
    assert [message_number(stored(), f"{ID}-{number}") for number in range(5)] == [0, 1, 2, 3, 4]
    for wrong in ("", "-", "0", ID, f"{ID}-", f"{ID}-5", f"{ID}-01", f"{ID}--1", f"{ID}-²",
                  f"{ID}-٣", f"{ID}-{'9' * 5000}", f"{ID} -0", "chatcmpl-0-0"):  # fmt: skip
        assert message_number(stored(), wrong) is None, wrong


def test_a_message_keeps_its_refusal() -> None:
    """A refusal of an earlier answer stays in its message."""
    shown = message_of(ID, 0, {"role": "assistant", "content": None, "refusal": "No."})
    assert shown["refusal"] == "No."
