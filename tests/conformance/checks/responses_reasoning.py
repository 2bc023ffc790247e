"""Reasoning in responses (contract of responses 4, 5.3 and 9.4).

The checks ask for reasoning by `effort`, and skip if the model gives none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..check import Skip, check, expect
from ..target import Api
from .responses import WEATHER, items_in, of_type, respond, size, stream, text_of
from .responses_stream import accumulated

ASK = "What is the capital of France?"
EFFORT = {"effort": "low"}
SUMMARY = {**EFFORT, "summary": "auto"}
LIMIT = 1500
TAGS = ("<think", "</think", "<|channel", "[THINK]")
SEALED = ["reasoning.encrypted_content"]
# Reasoning for a prompt, which must be longer by about as many tokens.
LONG = "I need the weather of a large city in the north, so I look at the map and then I ask."


async def _reasoned(api: Api, **body: Any) -> tuple[Any, Any]:
    """Return a response with reasoning, and its first reasoning item."""
    full = {"reasoning": EFFORT, "max_output_tokens": LIMIT, **body}
    made = await respond(api, ASK, **full)
    found = items_in(made, "reasoning")
    if not found or not found[0].get("content"):
        raise Skip("the model gives no reasoning text")
    return made, found[0]


async def _events(api: Api, **body: Any) -> list[Any]:
    """Return the events of a stream with reasoning."""
    full = {"reasoning": EFFORT, "max_output_tokens": LIMIT, **body}
    events = await stream(api, ASK, **full)
    if not of_type(events, "reasoning_text.delta"):
        raise Skip("the model gives no reasoning text")
    return events


def _expect_stated(made: Any, asked: Mapping[str, str]) -> None:
    """Raise `Fail` unless a Response states the effort and the summary of its request."""
    found = made["reasoning"]
    same = {"effort", "summary"} <= found.keys() and found["effort"] == asked["effort"]
    told = bool(found.get("summary")) == ("summary" in asked)
    expect(same and told, f"expected {asked} in reasoning, but got {found}")


def _text(item: Any) -> str:
    return "".join(part["text"] for part in item["content"])


@check("responses.reasoning",
       "Reasoning is an item before the message, with reasoning_text and an empty summary; the "
       "text of the message has none of its tags.",
       "must", "R4 R10.39")  # fmt: skip
async def reasoning(api: Api) -> None:
    made, item = await _reasoned(api)
    _expect_stated(made, EFFORT)
    kinds = [one["type"] for one in made["output"]]
    expect(kinds[0] == "reasoning", f"expected the reasoning first, but got {kinds}")
    expect(item["summary"] == [], f"expected an empty summary, but got {item['summary']}")
    parts = {part["type"] for part in item["content"]}
    valid = parts == {"reasoning_text"} and item["id"].startswith("rs_")
    expect(valid, f"expected rs_… and reasoning_text, but got {item}")
    if made["status"] != "incomplete":
        found = [tag for tag in TAGS if tag in text_of(made) + _text(item)]
        expect(not found, f"expected no tags, but got {found} in {str(made['output'])[:300]}")
        count = made["usage"]["output_tokens_details"]["reasoning_tokens"]
        expect(count > 0, f"expected reasoning tokens, but got {made['usage']}")


def _order(events: Sequence[Any], item: str) -> list[str]:
    """Return the types of an item's events, each run of equal ones once."""
    found = [event["type"].removeprefix("response.") for event in events
             if item in (event.get("item_id"), event.get("item", {}).get("id"))]  # fmt: skip
    return [name for at, name in enumerate(found) if at == 0 or name != found[at - 1]]


@check("responses.reasoning-stream",
       "Streamed reasoning is a part with deltas, which join to its end and its item, before the "
       "next item.",
       "must", "R5.3 R10.39")  # fmt: skip
async def reasoning_stream(api: Api) -> None:
    events = await _events(api)
    for event in events:
        if "response" in event:
            _expect_stated(event["response"], EFFORT)
    item = of_type(events, "output_item.done")[0]["item"]
    order = ["output_item.added", "content_part.added", "reasoning_text.delta",
             "reasoning_text.done", "content_part.done", "output_item.done"]  # fmt: skip
    found = _order(events, item["id"])
    expect(found == order, f"expected {order}, but got {found}")
    joined = "".join(event["delta"] for event in of_type(events, "reasoning_text.delta"))
    texts = [joined, of_type(events, "reasoning_text.done")[0]["text"], _text(item)]
    expect(len(set(texts)) == 1, f"expected the same text three times, but got {texts}")
    own = [e for e in events if e.get("item_id") == item["id"]]
    places = {(e["output_index"], e.get("content_index", 0)) for e in own}
    expect(places == {(0, 0)}, f"expected the first part of the first item, but got {places}")
    added = [event["output_index"] for event in of_type(events, "output_item.added")]
    expect(added == [*range(len(added))], f"expected one item after another, but got {added}")


@check("responses.accumulator-reasoning", "The openai SDK makes the reasoning of a stream.",
       "must", "R5.5 R10.9 [SDK]")  # fmt: skip
async def accumulator_reasoning(api: Api) -> None:
    events = await _events(api)
    response = accumulated(events)
    text = "".join(event["delta"] for event in of_type(events, "reasoning_text.delta"))
    found = [
        "".join(part.text for part in item.content or ())
        for item in response.output
        if item.type == "reasoning"
    ]
    expect("".join(found) == text, f"expected the reasoning {text!r}, but got {found}")


@check("responses.reasoning-summary",
       "With reasoning.summary, the reasoning has a summary with events of its own; else it has "
       "none.",
       "must", "R9.4 R10.40 [AISDK]")  # fmt: skip
async def reasoning_summary(api: Api) -> None:
    events = await _events(api, reasoning=SUMMARY)
    for event in events:
        if "response" in event:
            _expect_stated(event["response"], SUMMARY)
    item = of_type(events, "output_item.done")[0]["item"]
    told = [part["text"] for part in item["summary"]]
    expect(told, f"expected a summary, but got {str(item)[:300]}")
    joined = "".join(event["delta"] for event in of_type(events, "reasoning_summary_text.delta"))
    done = [event["text"] for event in of_type(events, "reasoning_summary_text.done")]
    parts = [e["part"]["text"] for e in of_type(events, "reasoning_summary_part.done")]
    begun = [e["summary_index"] for e in of_type(events, "reasoning_summary_part.added")]
    order = [*range(len(told))]
    expect(begun == order, f"expected a summary_index for each part, but got {begun}")
    for name in ("text.delta", "text.done", "part.done"):
        own = [event["summary_index"] for event in of_type(events, f"reasoning_summary_{name}")]
        expect({*own} == {*order}, f"expected the summary_index {order} in {name}, but got {own}")
    agree = done == parts == told and joined == "".join(told)
    expect(agree, f"expected {told} in the events, but got {joined!r}, {done} and {parts}")
    plain = [event["type"] for event in await _events(api) if "summary" in event["type"]]
    expect(not plain, f"expected no summary that is not asked for, but got {plain[:2]}")


@check("responses.reasoning-encrypted",
       "encrypted_content is present only if it is included; sent back, it is the reasoning.",
       "should", "R2.5 R9.4 R10.41")  # fmt: skip
async def reasoning_encrypted(api: Api) -> None:
    _made, plain = await _reasoned(api)
    found = plain.get("encrypted_content")
    expect(found is None, f"expected no encrypted_content, but got {found!r}")
    _made, item = await _reasoned(api, include=SEALED)
    sealed = item.get("encrypted_content")
    expect(isinstance(sealed, str) and sealed, f"expected encrypted_content, but got {item}")
    bare = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    counts = [await _before_call(api, one) for one in (item, bare)]
    expect(counts[0] == counts[1], f"expected equal numbers of input tokens, but got {counts}")


async def _before_call(api: Api, thought: Any) -> int:
    """Return the input tokens of a conversation with reasoning before a call."""
    given = [
        {"role": "user", "content": "What is the weather in Paris?"},
        *([thought] if thought else []),
        {"type": "function_call", "call_id": "call_1", "name": "get_weather",
         "arguments": '{"city":"Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"},
    ]  # fmt: skip
    return await size(api, given, tools=[WEATHER])


async def _chat_grows(api: Api) -> int:
    """Return the tokens by which reasoning before a call lengthens the prompt of chat."""
    function = {"name": "get_weather", "arguments": '{"city":"Paris"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    inner = {name: WEATHER[name] for name in ("name", "parameters")}
    tools = [{"type": "function", "function": inner}]
    counts = []
    for more in ({}, {"reasoning_content": LONG}):
        messages = [
            {"role": "user", "content": "What is the weather in Paris?"},
            {"role": "assistant", "content": None, "tool_calls": [call], **more},
            {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
        ]
        body = await api.chat(messages, tools=tools, max_tokens=1)
        counts.append(body["usage"]["prompt_tokens"])
    return int(counts[1] - counts[0])


@check("responses.reasoning-replayed",
       "Reasoning that is sent back before a call is part of the prompt, as in chat.",
       "must", "R2.5 R10.42 [rikkahub#1690]")  # fmt: skip
async def reasoning_replayed(api: Api) -> None:
    content = [{"type": "reasoning_text", "text": LONG}]
    thought = {"type": "reasoning", "summary": [], "content": content}
    counts = [await _before_call(api, one) for one in (None, thought)]
    if counts[0] == counts[1] and not await _chat_grows(api):
        raise Skip("the chat template does not keep reasoning")
    expect(counts[1] > counts[0], f"expected more than {counts[0]} input tokens, but got {counts}")
