"""The stream of a message (contract of messages, 6.2)."""

from __future__ import annotations

import json
from typing import Any

from ..check import Fail, Skip, check, expect
from ..target import Api
from .messages import (
    ADAPTIVE,
    ASK,
    ask,
    blocks,
    expect_fields,
    expect_form,
    expect_same,
    said,
    send,
    size,
    text_of,
    total,
    user,
)
from .messages_tools import ANY, LIMIT, WEATHER, call, result
from .responses import events_in

STARTS, DELTAS = "content_block_start", "content_block_delta"


async def streamed(api: Api, **fields: Any) -> list[Any]:
    """Return the events of a stream, without pings."""
    reply = await send(api, stream=True, **fields)
    if reply.status != 200:
        reply.ok()
    kind = reply.kind
    expect(kind == "text/event-stream", f"expected an event stream, but got {kind!r}")
    expect("[DONE]" not in reply.text, "expected no [DONE], but the stream has one")
    found = []
    for name, data in events_in(reply.text):
        wanted = data.get("type")
        expect(name == wanted, f"expected an event of the name {wanted!r}, but got {name!r}")
        if name != "ping":
            found.append(data)
    expect(found, f"expected events, but got {reply.text[:200]!r}")
    return found


def accumulated(events: list[Any]) -> Any:
    """Return the message that events add up to, in the order that clients need."""
    start, *inner, delta, stop = events if len(events) > 2 else [{}, {}, {}]
    order = [one.get("type") for one in (start, delta, stop)]
    expect(
        order == ["message_start", "message_delta", "message_stop"],
        f"expected message_start, message_delta and message_stop, but got {order}",
    )
    message: Any = start["message"]
    expect(message["content"] == [], f"expected no content at first, but got {message}")
    expect(message["stop_reason"] is None, f"expected no stop_reason at first, but got {message}")
    open_ = None
    for event in inner:
        index, kind = event.get("index"), event["type"]
        if kind == STARTS:
            expect(open_ is None, "expected one open block at a time, but another one begins")
            wanted = len(message["content"])
            expect(index == wanted, f"expected the index {wanted}, but got {index}")
            open_ = index
            block = event["content_block"]
            told = [block[name] for name in ("text", "thinking", "signature") if block.get(name)]
            expect(not told, f"expected an empty block at its start, but got {block}")
            message["content"].append({**block, "pieces": []})
            continue
        expect(index == open_, f"expected events of the open block {open_}, but got {event}")
        if kind == "content_block_stop":
            open_ = None
            _close(message["content"][-1])
        else:
            expect(kind == DELTAS, f"expected a known event, but got {kind!r}")
            _grow(message["content"][-1], event["delta"])
    expect(open_ is None, "expected an end of each block, but one has none")
    ends = {"stop_reason", "stop_sequence"} - delta["delta"].keys()
    expect(not ends, f"expected {sorted(ends)} in the last delta, but got {delta}")
    usage = {**message["usage"], **delta["usage"]}
    return {**message, **delta["delta"], "usage": usage}


def _grow(block: Any, delta: Any) -> None:
    kinds = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    kind = delta["type"]
    if kind == "input_json_delta":
        block["pieces"].append(delta["partial_json"])
        return
    expect(kind in kinds, f"expected a known delta, but got {delta}")
    closed = block.get("signature")
    expect(not closed, f"expected the signature as the last delta of its block, but got {delta}")
    block[kinds[kind]] += delta[kinds[kind]]


def _close(block: Any) -> None:
    pieces = block.pop("pieces")
    if block["type"] != "tool_use":
        return
    expect(pieces[:1] == [""], f"expected an empty first piece of input, but got {pieces[:1]}")
    try:
        block["input"] = json.loads("".join(pieces) or "{}")
    except ValueError:
        raise Fail(f"expected JSON of the pieces, but got {''.join(pieces)!r}") from None


@check("messages.stream",
       "The events of a stream have the documented order, and add up to the message of the same "
       "request.",
       "must", "M6.2 M13.54 M13.55 M13.59")  # fmt: skip
async def stream(api: Api) -> None:
    found = accumulated(await streamed(api))
    wanted = await ask(api)
    expect(
        text_of(found) == text_of(wanted),
        f"expected {text_of(wanted)!r}, but got {text_of(found)!r}",
    )
    for name in ("stop_reason", "stop_sequence", "model", "role", "type"):
        valid = found.get(name) == wanted[name]
        expect(valid, f"expected {wanted[name]!r} in {name}, but got {found.get(name)!r}")


@check("messages.stream-form",
       "A stream begins with a message without its end, which has up to 8 output tokens, and adds "
       "up to a message with Anthropic's keys.",
       "must", "M6.1 M6.2 M13.54")  # fmt: skip
async def stream_form(api: Api) -> None:
    for thinking in ({"type": "disabled"}, ADAPTIVE):
        events = await streamed(api, max_tokens=64, thinking=thinking)
        begun = events[0]["message"]
        expect_form(api, begun)
        expect_fields(begun, stop_reason=None, stop_sequence=None)
        made = begun["usage"]["output_tokens"]
        expect(made <= 8, f"expected up to 8 output tokens at the start, but got {made}")
        expect_form(api, accumulated(events))


@check("messages.stream-usage",
       "A stream has its input tokens in message_start, and the same counts as the message at the "
       "end.",
       "must", "M6.2 M13.58")  # fmt: skip
async def stream_usage(api: Api) -> None:
    events = await streamed(api)
    wanted = await ask(api)
    begun, ended = total(events[0]["message"]), total(accumulated(events))
    expect(begun == ended == total(wanted),
           f"expected {total(wanted)} input tokens, but got {begun} and {ended}")  # fmt: skip
    made, right = events[-2]["usage"].get("output_tokens"), wanted["usage"]["output_tokens"]
    expect(made == right, f"expected {right} output tokens, but got {made}")


@check("messages.stream-call",
       "A call in a stream has its name at its start, and its input in pieces that join to JSON.",
       "must", "M6.2 M13.57")  # fmt: skip
async def stream_call(api: Api) -> None:
    events = await streamed(api, max_tokens=LIMIT, tools=[WEATHER], tool_choice=ANY)
    found = accumulated(events)
    if found["stop_reason"] == "max_tokens":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    calls = blocks(found, "tool_use")
    expect(calls, f"expected a call, but got {found['content']}")
    starts = [event["content_block"] for event in events if event["type"] == STARTS]
    for block in starts:
        valid = block["type"] != "tool_use" or (block["name"], block["input"]) == (
            "get_weather", {},
        )  # fmt: skip
        expect(valid, f"expected the name and an empty input at the start, but got {block}")
        if block["type"] == "tool_use":
            name = block.get("id")
            valid = isinstance(name, str) and name.startswith("toolu_")
            expect(valid, f"expected toolu_… as the id of a call, but got {name!r}")
    city = calls[0]["input"].get("city")
    expect(city in ("Paris", "Rome"), f"expected an input that matches, but got {calls[0]}")


@check("messages.stream-thinking",
       "Reasoning in a stream has one signature, as the last delta of its block.",
       "must", "M6.2 M13.56")  # fmt: skip
async def stream_thinking(api: Api) -> None:
    events = await streamed(api, max_tokens=400, thinking=ADAPTIVE)
    message = accumulated(events)
    found = blocks(message, "thinking")
    if not found:
        raise Skip("the model does not reason")
    signed = [e for e in events if e["type"] == DELTAS and e["delta"]["type"] == "signature_delta"]
    expect(len(signed) == len(found), f"expected one signature each, but got {len(signed)}")
    wanted = await ask(api, max_tokens=400, thinking=ADAPTIVE)
    texts = [[block["thinking"] for block in one] for one in (found, blocks(wanted, "thinking"))]
    expect(all(texts[0]), f"expected reasoning, but got {found}")
    expect(texts[0] == texts[1], f"expected the reasoning {texts[1]}, but got {texts[0]}")
    spent = [one["usage"].get("output_tokens_details") for one in (message, wanted)]
    expect(spent[0] == spent[1], f"expected {spent[1]} as in a message, but got {spent[0]}")


@check("messages.stream-signature",
       "The next request has streamed reasoning by its signature alone.",
       "must", "M5.3 M6.2 M13.50 M13.56")  # fmt: skip
async def stream_signature(api: Api) -> None:
    found = blocks(accumulated(await streamed(api, max_tokens=400, thinking=ADAPTIVE)), "thinking")
    if not found:
        raise Skip("the model does not reason")
    sizes = [await size(api, user(ASK), said(*before, call()), user(result(content="Yes.")))
             for before in (found, [{**block, "thinking": ""} for block in found], [])]  # fmt: skip
    if sizes[0] == sizes[2]:
        raise Skip("the template omits earlier reasoning")
    expect_same(sizes[1], sizes[0], "with the signature alone")


@check("messages.stream-error",
       "An invalid request with stream true is rejected with a status, not with an event.",
       "must", "M6.2 M13.61")  # fmt: skip
async def stream_error(api: Api) -> None:
    reply = await send(api, stream=True, messages=[])
    reply.error(400)
