"""Loops of tools, interrupted streams and full contexts, as coding agents have them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..check import Body, Diverges, Fail, Skip, check, expect
from ..raw import connected
from ..target import Api, only
from .agents import H, expect_calls, expect_growth, expect_object, joined, session
from .messages import ask, blocks, send, total, user
from .messages import said as said_by
from .messages_tools import ANY
from .messages_tools import WEATHER as SKY
from .models import too_long
from .responses import WEATHER as FORECAST
from .responses import R, items_in, respond, whole
from .tools import ASK, WEATHER

# The turns of a loop, and the tokens that a call may take.
TURNS, LIMIT = 8, 256
AGAIN = "Look again."


def _result(turn: int) -> str:
    """Return the result of a call, which is another one in each turn."""
    return f"Look {turn}: {15 + turn} degrees, and a light wind from the west."


def _looped(stream: bool) -> Body:
    async def run(api: Api) -> None:
        messages: list[Any] = [{"role": "user", "content": ASK}]
        ids: list[str] = []
        counts = []
        for turn in range(TURNS):
            body = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0,
                    "max_tokens": LIMIT}  # fmt: skip
            message, count = await _turn(api, messages, body, stream)
            calls = expect_calls(message, [WEATHER])
            expect(calls, f"turn {turn}: expected a call, but got {message}")
            ids += [call["id"] for call in calls]
            counts.append(count)
            results = [{"role": "tool", "tool_call_id": call["id"], "content": _result(turn)}
                       for call in calls]  # fmt: skip
            messages += [message, *results]
        expect(len({*ids}) == len(ids), f"expected different ids in all turns, but got {ids}")
        expect_growth(counts)
        last = {"tools": [WEATHER], "tool_choice": "none", "max_tokens": 24}
        message, _ = await _turn(api, messages, last, stream)
        expect(not message.get("tool_calls"), f"expected text at the end, but got {message}")

    return run


async def _turn(
    api: Api, messages: list[Any], body: Mapping[str, Any], stream: bool
) -> tuple[Any, int]:
    """Return the message of a turn as it is sent back, and the tokens of its prompt."""
    if stream:
        options = {"stream_options": {"include_usage": True}}
        chunks = await api.chat_stream(messages, **body, **options)
        message, usage = joined(chunks), chunks[-1]["usage"]
        reason = message.pop("reason")
    else:
        found = await api.chat(messages, **body)
        choice = only(found["choices"], "choice")
        message, usage, reason = choice["message"], found["usage"], choice["finish_reason"]
    if reason == "length" and body["tool_choice"] == "required":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    return message, usage["prompt_tokens"]


check("agents.loop",
      "A loop of eight calls and their results is answered, with each message sent back as it "
      "came.",
      "must", "3.2 3.6 10.70", seconds=90)(_looped(stream=False))  # fmt: skip
check("agents.loop-stream",
      "A loop of eight streamed calls and their results is answered, with a call in each stream.",
      "must", "3.2 3.6 10.65 10.70", seconds=90)(_looped(stream=True))  # fmt: skip


@check("agents.loop-responses",
       "A loop of eight calls of the Responses API is answered, with each item sent back as it "
       "came.",
       "must", "R2.3 R2.5 R10.15", seconds=90)  # fmt: skip
async def loop_responses(api: Api) -> None:
    given: list[Any] = [{"role": "user", "content": ASK}]
    ids: list[str] = []
    counts = []
    for turn in range(TURNS):
        full = {"tools": [FORECAST], "tool_choice": "required", "max_output_tokens": LIMIT}
        made = whole(await respond(api, given, **full), LIMIT)
        calls = items_in(made, "function_call")
        expect(calls, f"turn {turn}: expected a call, but got {made['output']}")
        for call in calls:
            expect(call["name"] == "get_weather", f"expected get_weather, but got {call}")
            expect_object(call["arguments"])
        ids += [call["call_id"] for call in calls]
        counts.append(made["usage"]["input_tokens"])
        given += made["output"]
        given += [{"type": "function_call_output", "call_id": call["call_id"],
                   "output": _result(turn)} for call in calls]  # fmt: skip
    expect(len({*ids}) == len(ids), f"expected different call_ids in all turns, but got {ids}")
    expect_growth(counts)
    made = await respond(api, given, tools=[FORECAST], tool_choice="none", max_output_tokens=24)
    expect(not items_in(made, "function_call"), f"expected text, but got {made['output']}")


@check("agents.loop-messages",
       "A loop of eight calls of the Messages API is answered, with each block sent back as it "
       "came.",
       "must", "M3.2 M4 M13.27 M13.34", seconds=90)  # fmt: skip
async def loop_messages(api: Api) -> None:
    messages: list[Any] = [user(ASK)]
    ids: list[str] = []
    counts = []
    for turn in range(TURNS):
        found = await ask(api, messages=messages, tools=[SKY], tool_choice=ANY, max_tokens=LIMIT)
        if found["stop_reason"] == "max_tokens":
            raise Skip(f"the model needs more than {LIMIT} tokens for the call")
        calls = blocks(found, "tool_use")
        expect(calls, f"turn {turn}: expected a call, but got {found['content']}")
        ids += [call["id"] for call in calls]
        counts.append(total(found))
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": _result(turn)}
                   for call in calls]  # fmt: skip
        messages += [said_by(*found["content"]), user(*results)]
    expect(len({*ids}) == len(ids), f"expected different ids in all turns, but got {ids}")
    found = await ask(api, messages=messages, tools=[SKY], tool_choice={"type": "none"})
    expect(not blocks(found, "tool_use"), f"expected text, but got {found['content']}")
    expect_growth([*counts, total(found)])


@check("agents.parallel",
       "The results of parallel calls belong to their calls by id: in any order, the prompt has as "
       "many tokens, and a reminder of the user may follow.",
       "must", "3.2 10.70")  # fmt: skip
async def parallel(api: Api) -> None:
    cities = ("Paris", "Rome", "Lima")
    calls = [{"id": f"call_{city}", "type": "function",
              "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
             for city in cities]  # fmt: skip
    results = [{"role": "tool", "tool_call_id": f"call_{city}", "content": f"{city}: 21 degrees."}
               for city in cities]  # fmt: skip
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    counts = []
    for given in (results, results[::-1]):
        messages = [{"role": "user", "content": ASK}, said, *given,
                    {"role": "user", "content": AGAIN}]  # fmt: skip
        body = await api.chat(messages, tools=[WEATHER], max_tokens=1)
        counts.append(body["usage"]["prompt_tokens"])
    expect(counts[0] == counts[1], f"expected as many tokens in both orders, but got {counts}")


async def _leave(api: Api, body: Mapping[str, Any], seconds: float) -> None:
    """Close a stream after some seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), connected(api, "POST", H, body) as (reader, _):
            await reader.read()


@check("agents.cancelled",
       "After five streams that the user interrupted, a request with what was said until then is "
       "served.",
       "must", "3.2 10.85 10.87", alone=True, seconds=60)  # fmt: skip
async def cancelled(api: Api) -> None:
    request = session("opencode")["requests"][1]
    tools = request["tools"]
    begun = {**request, "model": api.model, "max_tokens": 400}
    for seconds in (0.03, 0.06, 0.1, 0.15, 0.25):
        await _leave(api, begun, seconds)
    messages = [
        *request["messages"], {"role": "assistant", "content": "I will"},
        {"role": "user", "content": "[Request interrupted by user]"},
        {"role": "user", "content": "Hello"},
    ]  # fmt: skip
    found = await api.chat(messages, tools=tools, max_tokens=24)
    reason = only(found["choices"], "choice")["finish_reason"]
    valid = reason in ("stop", "length", "tool_calls")
    expect(valid, f"expected an answer, but got the reason {reason!r}")


# By what each agent knows that the context is full, in the code and the message of the error. Then
# it shortens the conversation; else it gives up, or sends the same again.
LITELLM = r"(?i)this model's maximum context length is|context_length_exceeded"
PI = r"(?i)exceeds the context window|maximum context length is \d+ tokens|context.length.exceeded"
FULL: Mapping[str, Mapping[str, str]] = {
    "chat": {
        "cline": r"(?i)context_length_exceeded|context\s*(length|window)", "opencode": PI, "pi": PI,
        "goose": r"(?i)context[_ ]length", "aider": LITELLM, "openhands": LITELLM,
    },
    "responses": {"codex": r"context_length_exceeded", "opencode": PI, "pi": PI},
    "messages": {
        "claude-code": r"prompt is too long: \d+ tokens > \d+ maximum",
        "goose": r"too long", "opencode": r"(?i)prompt is too long",
    },
}  # fmt: skip


def _overflowing(api: str) -> Body:
    async def run(target: Api) -> None:
        text = await too_long(target)
        for stream in (False, True):
            if api == "messages":
                reply = await send(target, messages=[user(text)], stream=stream)
            else:
                path, field = (H, "messages") if api == "chat" else (R, "input")
                given = [{"role": "user", "content": text}]
                body = {"model": target.model, field: given, "stream": stream}
                reply = await target.send("POST", path, json.dumps(body).encode(), sent=body)
            if reply.status == 413:
                raise Diverges("the server rejects the body before it counts the tokens")
            if reply.status in (404, 405):
                reply.ok()
            error = reply.error(400)
            said = f"{error['code']} {error['message']}"
            deaf = [name for name, text in FULL[api].items() if not re.search(text, said)]
            if deaf:
                raise Fail(f"expected words that tell {', '.join(deaf)} to shorten the "
                           f"conversation, but got {said!r}")  # fmt: skip

    return run


for _api, _agents in FULL.items():
    _which = "" if _api == "chat" else f"-{_api}"
    check(f"agents.overflow{_which}",
          f"A full context is rejected by {_api} in words by which {', '.join(_agents)} know it, "
          "with a status, also if a stream was asked for.",
          "should" if _api == "responses" else "must",
          {"chat": "1.4 3.2", "responses": "R2.2 R10.58", "messages": "M2.3 M13.43"}[_api],
          )(_overflowing(_api))  # fmt: skip
