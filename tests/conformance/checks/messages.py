"""Anthropic's `POST /messages`: its message, its ends and its counts (contract of messages).

The checks of input, tools, streams and errors are in the modules `messages_*`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..check import Skip, check, expect
from ..target import Api, Reply, expect_model, only

M = "/messages"
COUNT = f"{M}/count_tokens"
ASK = "Count to 12."
VERSION = {"anthropic-version": "2023-06-01"}
COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TIERS = ("standard", "priority", "batch")
ADAPTIVE = {"type": "adaptive"}


def user(*content: Any) -> dict[str, Any]:
    """Return a message of the user; its content is a text or blocks."""
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else [*content]}


def said(*content: Any) -> dict[str, Any]:
    """Return a message of the assistant."""
    return {**user(*content), "role": "assistant"}


def text(value: str, **members: Any) -> dict[str, Any]:
    """Return a block of text."""
    return {"type": "text", "text": value, **members}


def body_of(api: Api, **fields: Any) -> dict[str, Any]:
    """Return the body of a request."""
    return {"model": api.model, "max_tokens": 24, "temperature": 0, "messages": [user(ASK)],
            **fields}  # fmt: skip


async def send(
    api: Api, path: str = M, headers: Mapping[str, str] = VERSION, **fields: Any
) -> Reply:
    """Send a request."""
    body = body_of(api, **fields)
    return await api.send("POST", path, json.dumps(body).encode(), headers, body)


async def ask(api: Api, **fields: Any) -> Any:
    """Return a message that the server must support."""
    return (await send(api, **fields)).ok()


async def size(api: Api, *messages: Any, **fields: Any) -> int:
    """Return the number of input tokens of a short answer."""
    found = await ask(api, **{"messages": [*messages] or [user(ASK)], "max_tokens": 1, **fields})
    return total(found)


def total(message: Any) -> int:
    """Return the number of input tokens of a message, cached ones included.

    A missing or null count of cached tokens is 0 here: `expect_form` asks for all counts.
    """
    usage = message["usage"]
    read, *cached = (usage.get(name) for name in COUNTS)
    counts = [read, *(count for count in cached if count is not None)]
    valid = all(type(count) is int and count >= 0 for count in counts)
    expect(valid, f"expected integers in {', '.join(COUNTS)}, but got {usage}")
    return sum(counts)


def text_of(message: Any) -> str:
    """Return the text of a message."""
    return "".join(block["text"] for block in blocks(message, "text"))


def blocks(message: Any, kind: str) -> list[Any]:
    """Return the blocks of one type."""
    return [block for block in message["content"] if block["type"] == kind]


def expect_end(message: Any, reason: str, sequence: str | None = None) -> None:
    """Raise `Fail` unless a message has ended for a reason."""
    found = message["stop_reason"], message["stop_sequence"]
    expect(found == (reason, sequence), f"expected {reason}, {sequence!r}, but got {found}")


def expect_error(reply: Reply, status: int, kind: str) -> str:
    """Return the message of an error in Anthropic's form."""
    reply.error(status)
    body = reply.json()
    expect(body.get("type") == "error", f"expected the type error, but got {body}")
    found = body["error"].get("type")
    expect(found == kind, f"expected the type {kind}, but got {found!r}")
    message: str = body["error"]["message"]
    return message


def expect_same(found: int, wanted: int, what: str) -> None:
    """Raise `Fail` unless two prompts have equally many tokens."""
    expect(found == wanted, f"expected {wanted} tokens {what}, but got {found}")


@check("messages.object",
       "A message has its keys, the role assistant, an id that begins with msg_, and a stop "
       "reason.",
       "must", "M6.1 M13.8")  # fmt: skip
async def whole(api: Api) -> None:
    found = await ask(api)
    expect_fields(found, stop_sequence=None)
    expect_form(api, found)
    reason = found["stop_reason"]
    expect(reason in ("end_turn", "max_tokens"), f"expected a stop reason, but got {reason!r}")
    block = only(found["content"], "block")
    valid = block["type"] == "text" and isinstance(block["text"], str) and block["text"]
    expect(valid, f"expected a block of text, but got {block}")


def expect_form(api: Api, message: Any) -> None:
    """Raise `Fail` unless a message has Anthropic's type: its keys, and its usage."""
    expect_fields(message, type="message", role="assistant")
    name, sequence = message.get("id"), message.get("stop_sequence", 0)
    expect(isinstance(name, str) and name.startswith("msg_"), f"expected msg_…, but got {name!r}")
    valid = sequence is None or isinstance(sequence, str)
    expect(valid, f"expected null or a text in stop_sequence, but got {message}")
    details = message.get("stop_details")
    expect(details is None, f"expected null in stop_details, but got {details!r}")
    expect_model(api, message.get("model"))
    usage = message["usage"]
    made, spent = usage.get("output_tokens"), usage.get("output_tokens_details")
    expect(
        type(made) is int and made >= 0, f"expected an integer in output_tokens, but got {usage}"
    )
    tier = usage.get("service_tier", TIERS[0])
    expect(tier in TIERS, f"expected one of {TIERS} in service_tier, but got {tier!r}")
    if spent is not None:
        thought = spent.get("thinking_tokens") if isinstance(spent, dict) else None
        valid = type(thought) is int and 0 <= thought <= made
        expect(valid, f"expected thinking_tokens up to output_tokens, but got {usage}")
    total(message)
    missing = [name for name in COUNTS if usage.get(name) is None]
    expect(not missing, f"expected integers in {', '.join(missing)}, but got {usage}")


def expect_fields(found: Any, **wanted: Any) -> None:
    """Raise `Fail` unless an object has these members."""
    wrong = {name: found.get(name, "nothing") for name in wanted
             if name not in found or found[name] != wanted[name]}  # fmt: skip
    expect(not wrong, f"expected {wanted}, but got {wrong}")


@check("messages.answer", "A message has the same text as a chat completion.", "must", "M3")
async def answer(api: Api) -> None:
    chat = await api.chat(ASK, temperature=0, max_tokens=24)
    wanted = chat["choices"][0]["message"]["content"]
    found = text_of(await ask(api))
    expect(found == wanted, f"expected {wanted!r}, but got {found!r}")


@check("messages.query", "The query of the beta clients changes nothing.", "must", "M1 M13.1")
async def query(api: Api) -> None:
    found = text_of((await send(api, f"{M}?beta=true")).ok())
    wanted = text_of(await ask(api))
    expect(found == wanted, f"expected {wanted!r}, but got {found!r}")


@check("messages.request-id",
       "A message has a request-id header, and an error has the same id in its body.",
       "must", "M1 M13.3")  # fmt: skip
async def request_id(api: Api) -> None:
    fine, wrong = await send(api), await send(api, messages=[])
    fine.ok()
    for reply in (fine, wrong):
        expect("request-id" in reply.headers, "expected a request-id header, but got none")
    expect_error(wrong, 400, "invalid_request_error")
    found = wrong.json().get("request_id")
    wanted = wrong.headers["request-id"]
    expect(found == wanted, f"expected {wanted!r} in request_id, but got {found!r}")


@check("messages.headers",
       "A request needs no anthropic-version, and an unknown anthropic-beta is accepted.",
       "must", "M1 M13.4")  # fmt: skip
async def headers(api: Api) -> None:
    (await send(api, headers={})).ok()
    (await send(api, headers={**VERSION, "anthropic-beta": "no-such-beta-2030-01-01"})).ok()


@check("messages.usage",
       "The input tokens, cached ones included, are those of a chat completion, twice in a row.",
       "must", "M7 M13.63")  # fmt: skip
async def usage(api: Api) -> None:
    chat = await api.chat(ASK, temperature=0, max_tokens=24)
    for _ in range(2):
        found = await ask(api)
        expect_same(total(found), chat["usage"]["prompt_tokens"], "as in chat")
        made, wanted = found["usage"]["output_tokens"], chat["usage"]["completion_tokens"]
        expect(made == wanted, f"expected {wanted} output tokens, but got {made}")


@check("messages.count",
       "count_tokens has the input tokens of the same request, with system and tools, and needs "
       "no max_tokens.",
       "must", "M1 M13.65")  # fmt: skip
async def count(api: Api) -> None:
    tools = [{"name": "get_weather", "input_schema": SCHEMA}]
    for fields in ({}, {"system": "Be brief.", "tools": tools}):
        body = body_of(api, **fields)
        del body["max_tokens"], body["temperature"]
        reply = await api.send("POST", COUNT, json.dumps(body).encode(), VERSION, body)
        found = reply.ok().get("input_tokens")
        expect_same(found, await size(api, **fields), "in count_tokens")


@check("messages.max-tokens",
       "An answer that reaches max_tokens ends with max_tokens, and has that many tokens.",
       "must", "M6.1 M13.40")  # fmt: skip
async def max_tokens(api: Api) -> None:
    found = await ask(api, max_tokens=3)
    expect_end(found, "max_tokens")
    made = found["usage"]["output_tokens"]
    expect(made == 3, f"expected 3 output tokens, but got {made}")


@check("messages.end-turn", "An answer that the model has ended ends with end_turn.",
       "must", "M6.1 M13.8")  # fmt: skip
async def end_turn(api: Api) -> None:
    found = await ask(api, max_tokens=400)
    if found["stop_reason"] == "max_tokens":
        raise Skip("the model needs more than 400 tokens for the answer")
    expect_end(found, "end_turn")


@check("messages.stop-sequence",
       "A stop sequence ends the answer before it, and the message names it.",
       "must", "M6.1 M13.41")  # fmt: skip
async def stop_sequence(api: Api) -> None:
    whole_text = text_of(await ask(api))
    if len(whole_text) < 4:
        raise Skip("the answer is too short to be cut")
    stop = whole_text[2:4]
    found = await ask(api, stop_sequences=["no such text", stop])
    expect_end(found, "stop_sequence", stop)
    wanted, got = whole_text[: whole_text.index(stop)], text_of(found)
    expect(got == wanted, f"expected {wanted!r}, but got {got!r}")


@check("messages.window",
       "max_tokens may exceed the context length.",
       "must", "M2.1 M13.42")  # fmt: skip
async def window(api: Api) -> None:
    found = await ask(api, max_tokens=10_000_000, stop_sequences=[","])
    reasons = ("end_turn", "stop_sequence", "model_context_window_exceeded")
    valid = found["stop_reason"] in reasons
    expect(valid, f"expected one of {reasons}, but got {found['stop_reason']!r}")


@check("messages.pre-warm",
       "With max_tokens 0 the message has no content and no output tokens.",
       "must", "M2.1 M13.44")  # fmt: skip
async def pre_warm(api: Api) -> None:
    found = await ask(api, max_tokens=0)
    expect(found["content"] == [], f"expected no content, but got {found['content']}")
    made = found["usage"]["output_tokens"]
    expect(made == 0, f"expected 0 output tokens, but got {made}")


@check("messages.format",
       "output_config.format gives JSON that matches the schema, and so does output_format.",
       "must", "M2.1 M13.46")  # fmt: skip
async def form(api: Api) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted}):
        found = await ask(api, max_tokens=100, **fields)
        try:
            value = json.loads(text_of(found))
        except ValueError:
            value = None
        valid = isinstance(value, dict) and value.get("city") in ("Paris", "Rome")
        expect(valid, f"expected JSON that matches the schema, but got {text_of(found)!r}")


@check("messages.thinking-accepted",
       "thinking adaptive and disabled are accepted, also by a model without reasoning.",
       "must", "M5.1 M13.48")  # fmt: skip
async def thinking_accepted(api: Api) -> None:
    for thinking in (ADAPTIVE, {"type": "disabled"}, {"block_binding": "x"}):
        await ask(api, thinking=thinking)


async def thoughts(api: Api, **fields: Any) -> tuple[Any, Any]:
    """Return a message and its first block, which is reasoning."""
    found = await ask(api, max_tokens=400, thinking={**ADAPTIVE, **fields})
    if not blocks(found, "thinking"):
        raise Skip("the model does not reason")
    block = found["content"][0]
    expect(block["type"] == "thinking", f"expected reasoning first, but got {found['content']}")
    return found, block


@check("messages.thinking",
       "Reasoning is a block before the answer, with its text and a signature, and is counted.",
       "must", "M5.3 M13.47 M13.64")  # fmt: skip
async def thinking(api: Api) -> None:
    found, block = await thoughts(api)
    valid = bool(block["thinking"]) and bool(block["signature"])
    expect(valid, f"expected reasoning and a signature, but got {block}")
    counts = found["usage"]
    spent = counts["output_tokens_details"]["thinking_tokens"]
    valid = 0 < spent <= counts["output_tokens"]
    expect(valid, f"expected thinking_tokens up to output_tokens, but got {counts}")


@check("messages.thinking-off", "Without thinking, or with disabled, there is no reasoning.",
       "must", "M5.1 M13.47")  # fmt: skip
async def thinking_off(api: Api) -> None:
    await thoughts(api)
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        found = await ask(api, max_tokens=400, **fields)
        expect(not blocks(found, "thinking"), f"expected no reasoning, but got {found['content']}")


@check("messages.thinking-omitted",
       "With display omitted, the next request has the reasoning by its signature.",
       "must", "M5.3 M13.50")  # fmt: skip
async def thinking_omitted(api: Api) -> None:
    _, shown = await thoughts(api)
    _, block = await thoughts(api, display="omitted")
    valid = block["thinking"] == "" and bool(block["signature"])
    expect(valid, f"expected no reasoning and a signature, but got {block}")
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Yes."}
    sizes: Sequence[int] = [
        await size(api, user(ASK), said(*before, call), user(result))
        for before in ([shown], [block], [])
    ]
    if sizes[0] == sizes[2]:
        raise Skip("the template omits earlier reasoning")
    expect_same(sizes[1], sizes[0], "with the signature alone")


@check("messages.thinking-foreign",
       "Reasoning of another server in the history is accepted.",
       "must", "M5.3 M13.51")  # fmt: skip
async def thinking_foreign(api: Api) -> None:
    for block in (
        {"type": "thinking", "thinking": "", "signature": "no such seal"},
        {"type": "redacted_thinking", "data": "no such data"},
    ):
        await size(api, user(ASK), said(block, text("1, 2")), user("And?"))
