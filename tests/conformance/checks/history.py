"""Conversations as agents send them: roles in any order, broken calls, reasoning (contract 3.2)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..check import Body, check, expect
from ..target import Api
from .tools import WEATHER

H = "/chat/completions"
SHORT = "Be brief."
LONG = "Be brief, name each city that you know in the south of the country, and count them twice."
USER = {"role": "user", "content": "Hello!"}
ASSISTANT = {"role": "assistant", "content": "Hello! How can I help you today?"}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
# The share of a text's tokens by which the prompt must grow: templates and tokenizers differ.
SHARE = 0.6


async def _tokens(api: Api, messages: Any, **more: Any) -> int:
    """Return the prompt tokens of a conversation, which the server must accept.

    A rejection is a failure even if it names `messages`: a client cannot send them differently.
    """
    body = {"model": api.model, "messages": messages, "max_tokens": 1, **more}
    reply = await api.post(H, body)
    expect(reply.status == 200, f"expected status 200, but got {reply.status}: {reply.text[:300]}")
    count = reply.json()["usage"]["prompt_tokens"]
    assert isinstance(count, int)
    return count


async def _read(api: Api, make: Callable[[str], Any], **more: Any) -> None:
    """Raise `Fail` unless a conversation is accepted and the text in it is part of the prompt.

    Args:
        make: returns the conversation with a text in it.
    """
    plain = [await _tokens(api, [{"role": "user", "content": text}]) for text in (SHORT, LONG)]
    found = [await _tokens(api, make(text), **more) for text in (SHORT, LONG)]
    grown, expected = found[1] - found[0], plain[1] - plain[0]
    expect(
        grown >= SHARE * expected,
        f"expected about {expected} more prompt tokens for a longer text, but got {grown}",
    )


# Each row: the id, the promise, the messages; TEXT is replaced by texts of different lengths.
TEXT = "TEXT"
ORDERS: Sequence[tuple[str, str, Sequence[Mapping[str, str]]]] = (
    ("system-middle", "A system message between later messages",
     (USER, ASSISTANT, {"role": "system", "content": TEXT}, QUESTION)),
    ("developer-middle", "A developer message between later messages",
     (USER, ASSISTANT, {"role": "developer", "content": TEXT}, QUESTION)),
    ("system-after-system", "A second system message at the start",
     ({"role": "system", "content": "You are a guide."}, {"role": "system", "content": TEXT},
      QUESTION)),
    ("system-both", "A system message between later messages, after one at the start,",
     ({"role": "system", "content": "You are a guide."}, USER, ASSISTANT,
      {"role": "system", "content": TEXT}, QUESTION)),
    ("system-last", "A system message at the end",
     (USER, ASSISTANT, QUESTION, {"role": "system", "content": TEXT})),
    ("user-after-user", "The first of two consecutive user messages",
     (USER, ASSISTANT, {"role": "user", "content": TEXT}, QUESTION)),
    ("assistant-after-assistant", "The first of two consecutive assistant messages",
     (USER, {"role": "assistant", "content": TEXT}, ASSISTANT, QUESTION)),
    ("assistant-first", "An assistant message at the start",
     ({"role": "assistant", "content": TEXT}, QUESTION)),
)  # fmt: skip


def _ordered(messages: Sequence[Mapping[str, str]]) -> Body:
    async def run(api: Api) -> None:
        await _read(api, lambda text: [
            {**one, "content": text} if one["content"] == TEXT else one for one in messages
        ])  # fmt: skip

    return run


for _name, _what, _messages in ORDERS:
    check(f"history.{_name}", f"{_what} is accepted and is part of the prompt.", "must",
          "3.2")(_ordered(_messages))  # fmt: skip


@check("history.answer",
       "A system message between later messages does not replace the user's question.",
       "must", "3.2")  # fmt: skip
async def answer(api: Api) -> None:
    api.demo()
    middle = {"role": "system", "content": SHORT}
    body = await api.chat([USER, ASSISTANT, middle, QUESTION], temperature=0, max_tokens=60)
    found = body["choices"][0]["message"]["content"]
    expected = "The capital of France is Paris."
    expect(found == expected, f"expected {expected!r}, but got {found!r}")


def _called(arguments: str) -> list[Any]:
    """Return a conversation with a call whose arguments are the given string."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "The arguments are not valid."},
    ]


async def _calls_are_taken(api: Api) -> None:
    """Raise `Unsupported` if the server rejects tool calls altogether."""
    valid = _called('{"city":"Paris","unit":"C"}')
    await api.chat(valid, tools=[WEATHER], max_tokens=1)


# Each row: the id, the arguments of an earlier call in words, and as a function of a text.
MALFORMED: Sequence[tuple[str, str, Callable[[str], str]]] = (
    ("not-json", "that are not JSON", lambda text: f"city is {text}"),
    ("truncated", "that are cut off", lambda text: '{"unit": "C", "city": "' + text),
    ("list", "that are a JSON array", lambda text: json.dumps([text])),
    ("two-objects", "that are two JSON objects",
     lambda text: '{"unit": "C"}' + json.dumps({"city": text})),
)  # fmt: skip


def _malformed(arguments: Callable[[str], str]) -> Body:
    async def run(api: Api) -> None:
        await _calls_are_taken(api)
        await _read(api, lambda text: _called(arguments(text)), tools=[WEATHER])

    return run


for _name, _what, _arguments in MALFORMED:
    check(f"history.arguments-{_name}",
          f"An earlier tool call with arguments {_what} is accepted and is part of the prompt.",
          "must", "3.2")(_malformed(_arguments))  # fmt: skip


@check("history.arguments-empty",
       "An earlier tool call whose arguments are an empty string is accepted.",
       "must", "3.2")  # fmt: skip
async def arguments_empty(api: Api) -> None:
    await _calls_are_taken(api)
    count = await _tokens(api, _called(""), tools=[WEATHER])
    expect(count > 0, f"expected prompt tokens, but got {count}")


def _reasoned(name: str, value: Any) -> list[Any]:
    return [USER, {**ASSISTANT, name: value}, QUESTION]


def _replayed(name: str) -> Body:
    async def run(api: Api) -> None:
        for value in ("The user greets me.", "", None):
            await api.chat(_reasoned(name, value), max_tokens=1)

    return run


for _name in ("reasoning_content", "reasoning"):
    check(f"history.{_name.replace('_', '-')}",
          f"An earlier assistant message with {_name}, as text or null, is accepted.",
          "should", "3.8")(_replayed(_name))  # fmt: skip


@check("history.reasoning-call",
       "An assistant message with reasoning_content and tool calls is accepted with its results.",
       "should", "3.8")  # fmt: skip
async def reasoning_call(api: Api) -> None:
    await _calls_are_taken(api)
    for name in ("reasoning_content", "reasoning"):
        messages = _called('{"city":"Paris","unit":"C"}')
        messages[1][name] = "I need the weather."
        await api.chat(messages, tools=[WEATHER], max_tokens=1)


@check("history.reasoning-same",
       "reasoning and reasoning_content in earlier messages have the same effect.",
       "should", "3.8")  # fmt: skip
async def reasoning_same(api: Api) -> None:
    counts = []
    for name in ("reasoning_content", "reasoning"):
        body = await api.chat(_reasoned(name, LONG), max_tokens=1)
        counts.append(body["usage"]["prompt_tokens"])
    expect(counts[0] == counts[1], f"expected equal numbers of prompt tokens, but got {counts}")
