"""Sessions of coding agents, sent again (contract 3.2, 3.6; of responses, 8; of messages, 9).

The files of `sessions/` have what each agent sends: its fields, its tools, and its messages in
their order. An agent must get an answer that it can read to each request, and the model must get
every text. The loops of tools are in `agents_loops`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..check import Body, check, expect
from ..target import Api, expect_usage, only
from .messages import blocks, total
from .messages_stream import accumulated
from .responses import R, events_in, parsed

FOLDER = Path(__file__).parent.parent / "sessions"
H = "/chat/completions"
# The tokens of an answer, which may be cut off: the requests count.
LIMIT = 64
# Agents that use chat completions, and what is special in their requests.
CHAT: Mapping[str, str] = {
    "aider": "example messages, and a system message at the end",
    "claude-code": "system prompts in parts, and system messages between results",
    "cline": "tools in the text, an empty answer, and messages of one role in a row",
    "codex": "developer messages between results, and parallel calls",
    "continue": "empty arguments, blank content, and an assistant message first",
    "copilot": "marks of its own on messages, empty results, and a tool without parameters",
    "crush": "a reminder before the question, and reasoning without content",
    "goose": "tools of MCP servers, and malformed arguments",
    "opencode": "three system messages, a request for a title, and parallel calls",
    "qwen-code": "truncated, empty or list arguments, and reasoning",
    "roo-code": "strict tools with nested parameters, and a user message after each result",
    "zed": "answers and results in parts, calls with null as content, and a title without tools",
}
# What lengthens each text of a conversation, if it is read.
MORE = " and so on, until the evening comes, and the night, and another long day of work,"


@cache
def session(name: str) -> Any:
    """Return the content of a session's file."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


async def _answer(api: Api, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message and the reason that answer a chat request, as an agent reads them."""
    if not body.get("stream"):
        found = await api.chat(**body)
        expect_usage(found["usage"])
        choice = only(found["choices"], "choice")
        return {**choice["message"], "reason": choice["finish_reason"]}
    chunks = await api.stream(H, body)
    if (body.get("stream_options") or {}).get("include_usage"):
        last = chunks[-1]
        expect(last["choices"] == [], f"expected the usage at the end, but got {last}")
        expect_usage(last.get("usage"))
    return joined(chunks)


def joined(chunks: Sequence[Any]) -> dict[str, Any]:
    """Return the message and the reason that chunks add up to."""
    text, reason = "", None
    calls: dict[int, Any] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice["delta"]
        text += delta.get("content") or ""
        reason = choice["finish_reason"] or reason
        for part in delta.get("tool_calls") or ():
            function = part.get("function") or {}
            call = calls.setdefault(part["index"], {
                "id": part.get("id"), "type": part.get("type"),
                "function": {"name": function.get("name"), "arguments": ""},
            })  # fmt: skip
            call["function"]["arguments"] += function.get("arguments") or ""
    found = {"role": "assistant", "content": text or None, "reason": reason}
    return {**found, "tool_calls": [*calls.values()]} if calls else found


def expect_calls(message: Mapping[str, Any], tools: Sequence[Any]) -> list[Any]:
    """Return the calls of a message; raise `Fail` unless an agent can run them."""
    calls: list[Any] = message.get("tool_calls") or []
    names = {tool["function"]["name"] for tool in tools}
    ids = [call.get("id") for call in calls]
    expect(all(ids) and len({*ids}) == len(ids), f"expected different ids, but got {ids}")
    for call in calls:
        function = call["function"]
        expect(call["type"] == "function", f"expected the type function, but got {call}")
        expect(function["name"] in names, f"expected one of {sorted(names)}, but got {call}")
        expect_object(function["arguments"])
    return calls


def expect_object(text: Any) -> Any:
    """Return the object in the arguments of a call; raise `Fail` if there is none."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        value = None
    expect(isinstance(value, dict), f"expected arguments that are a JSON object, but got {text!r}")
    return value


def _expect_answer(message: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raise `Fail` unless an agent can go on with the answer."""
    reason = message["reason"]
    expect(message["role"] == "assistant", f"expected the role assistant, but got {message}")
    if reason == "length":
        return
    calls = expect_calls(message, body.get("tools") or ())
    wanted = ["tool_calls"] if calls else ["stop"]
    expect([reason] == wanted, f"expected the reason {wanted[0]}, but got {reason!r}")
    text = message.get("content")
    expect(calls or isinstance(text, str), f"expected text or calls, but got {message}")


def lengthened(messages: Sequence[Any], only_last: bool = False) -> tuple[int, list[Any]]:
    """Return messages with a longer text, and the number of those that are longer.

    Args:
        only_last: lengthen only the last of the texts.
    """
    count, found = 0, []
    for message in reversed(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        is_longer = bool(parts and parts[-1]["text"].strip()) and not (only_last and count)
        count += is_longer
        if is_longer:
            parts = [*parts[:-1], {**parts[-1], "text": parts[-1]["text"] + MORE}]
            content = parts if isinstance(content, list) else parts[0]["text"]
        found.append({**message, "content": content})
    return count, found[::-1]


async def _expect_all_read(api: Api, request: Mapping[str, Any]) -> None:
    """Raise `Fail` unless the prompt has every text of a request's messages."""
    given = request["messages"]
    count, longest = lengthened(given)
    _, longer = lengthened(given, only_last=True)
    sizes = []
    for messages in (given, longer, longest):
        tools = {name: request[name] for name in ("tools",) if name in request}
        body = await api.chat(messages, **tools, max_tokens=1)
        sizes.append(body["usage"]["prompt_tokens"])
    one, all_ = sizes[1] - sizes[0], sizes[2] - sizes[0]
    expect(
        one > 0 and all_ > (count - 0.5) * one,
        f"expected {one} tokens more for each of {count} longer texts, but got {all_}",
    )


def _replayed(name: str) -> Body:
    async def run(api: Api) -> None:
        requests = session(name)["requests"]
        for request in requests:
            most = min(request.get("max_tokens", LIMIT), LIMIT)
            body = {**request, "max_tokens": most}
            answer = await _answer(api, body)
            for _ in range(2):
                # A small model may end at once by chance.
                if not (answer.get("content") or answer.get("tool_calls")):
                    answer = await _answer(api, body)
            _expect_answer(answer, body)
        await _expect_all_read(api, requests[-1])

    return run


for _name, _what in CHAT.items():
    _id = f"{_name}-chat" if _name in ("claude-code", "codex") else _name
    check(f"agents.{_id}",
          f"The requests of {_name} are answered, with every text in the prompt: {_what}.",
          "must", f"3.2 3.6 [{_name}]", seconds=60)(_replayed(_name))  # fmt: skip


def _items(turn: Mapping[str, Any], number: int, spaces: Sequence[str]) -> Iterator[Any]:
    """Yield what Codex sends back after a turn: the answer of the model, and the results."""
    if turn.get("text"):
        part = {"type": "output_text", "text": turn["text"]}
        yield {"type": "message", "role": "assistant", "content": [part]}
    outputs = []
    for at, (call, output) in enumerate(zip(turn["calls"], turn["outputs"], strict=True)):
        call_id, name = f"call_{number}_{at}", call["name"]
        space = next((one for one in spaces if name.startswith(f"{one}__")), None)
        named = {"name": name.removeprefix(f"{space}__"), "namespace": space} if space else {
            "name": name}  # fmt: skip
        kind = "custom_tool_call" if "input" in call else "function_call"
        given = {"input": call["input"]} if "input" in call else {
            "arguments": json.dumps(call["arguments"])}  # fmt: skip
        yield {"type": kind, "call_id": call_id, **named, **given}
        outputs.append({"type": f"{kind}_output", "call_id": call_id, "output": output})
    yield from outputs


async def _step(api: Api, body: Mapping[str, Any]) -> int:
    """Return the input tokens of a response, which is read as Codex reads it."""
    full = {**body, "model": api.model, "max_output_tokens": LIMIT}
    reply = await api.send("POST", R, json.dumps(full).encode(), sent=full)
    if reply.status != 200:
        reply.ok()
    events = parsed(api, reply)
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    for item in done:
        if item["type"] == "function_call" and item["status"] == "completed":
            expect_object(item["arguments"])
            expect(item["call_id"] and item["name"], f"expected a name and an id, but got {item}")
    name, last = events[-1]
    ended = name in ("response.completed", "response.incomplete")
    expect(ended, f"expected response.completed, but got {name}")
    found = last["response"]
    expect(found["output"] == done, f"expected the items {done}, but got {found['output']}")
    count = found["usage"]["input_tokens"]
    assert isinstance(count, int)
    return count


def expect_growth(counts: Sequence[int]) -> None:
    """Raise `Fail` unless each prompt of a conversation is longer than the one before."""
    grows = all(a < b for a, b in pairwise(counts))
    expect(grows, f"expected more input tokens in each turn, but got {counts}")


async def _codex(api: Api, name: str, turns: int) -> tuple[Mapping[str, Any], list[Any]]:
    """Replay turns of a session, and return the fields and the input of the last request."""
    told = session("responses-codex")["sessions"][name]
    spaces = [tool["name"] for tool in told["request"]["tools"] if tool["type"] == "namespace"]
    given: list[Any] = []
    counts = []
    for number, turn in enumerate(told["turns"][:turns]):
        given += turn["input"]
        counts.append(await _step(api, {**told["request"], "input": given}))
        given += _items(turn, number, spaces)
    if given[-1]["type"].endswith("_output"):
        counts.append(await _step(api, {**told["request"], "input": given}))
    expect_growth(counts)
    return told["request"], given


@check("agents.codex",
       "The requests of Codex are answered over the Responses API: functions in namespaces, "
       "parallel calls, reasoning, and a turn that the user interrupted.",
       "must", "R2.3 R8 R10.21 [CODEX]", seconds=60)  # fmt: skip
async def codex(api: Api) -> None:
    await _codex(api, "a model of one's own", 4)


@check("agents.codex-patch",
       "The requests of Codex with a custom tool for patches are answered, and the patch is part "
       "of the prompt.",
       "should", "R2.6 R8 [CODEX]", seconds=60)  # fmt: skip
async def codex_patch(api: Api) -> None:
    request, given = await _codex(api, "a model of Codex's list", 2)
    empty = [{**item, "input": ""} if "input" in item else item for item in given]
    counts = [await _step(api, {**request, "input": items}) for items in (empty, given)]
    expect_growth(counts)


@check("agents.claude-code",
       "The requests of Claude Code are answered over the Messages API: eight turns with parallel "
       "calls, errors of tools, system messages and thinking.",
       "must", "M2.1 M3.1 M3.2 M5.1 M13.9 [CC]", seconds=90)  # fmt: skip
async def claude_code(api: Api) -> None:
    told = session("messages-claude-code")
    counts = []
    for end in range(2, len(told["messages"]) + 1, 2):
        body = {**told["request"], "model": api.model, "messages": told["messages"][:end],
                "max_tokens": LIMIT}  # fmt: skip
        data = json.dumps(body).encode()
        reply = await api.send("POST", told["path"], data, told["headers"], body)
        if reply.status != 200:
            reply.ok()
        events = [data for name, data in events_in(reply.text) if name != "ping"]
        message = accumulated(events)
        counts.append(total(message))
        calls = blocks(message, "tool_use")
        names = {tool["name"] for tool in body["tools"]}
        for call in calls:
            valid = call["name"] in names and isinstance(call["input"], dict)
            expect(valid, f"expected a tool of the request and an object, but got {call}")
        reason = message["stop_reason"]
        wanted = ("max_tokens", "tool_use" if calls else "end_turn")
        expect(reason in wanted, f"expected one of {wanted}, but got {reason!r}")
    expect_growth(counts)
