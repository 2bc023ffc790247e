"""Custom tools of `/responses`, and a coding agent's request (contract of responses 2.6, 8)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..check import Body, Skip, check, expect
from ..target import Api
from .custom_tools import LARK, REGEX
from .responses import WEATHER, items_in, named_events, of_type, respond, size, stream, whole

ASK = "Turn the lamp on."
LIMIT = 256
NAMED = {"type": "custom", "name": "lamp"}
DELTA, DONE = "custom_tool_call_input.delta", "custom_tool_call_input.done"
# Each format, and the pattern that its inputs match.
FORMS: Mapping[str, tuple[Any, str]] = {
    "text": ({"type": "text"}, ".*"),
    "regex": ({"type": "grammar", "syntax": "regex", "definition": REGEX}, REGEX),
    "lark": ({"type": "grammar", "syntax": "lark", "definition": LARK}, f"turn {REGEX}"),
}


def lamp(form: Any = None) -> dict[str, Any]:
    """Return a custom tool; None for `form` omits the format."""
    tool = {"type": "custom", "name": "lamp", "description": "Send text to the lamp."}
    return tool if form is None else {**tool, "format": form}


def _called(form: Any, pattern: str) -> Body:
    async def run(api: Api) -> None:
        full = {"tools": [lamp(form), WEATHER], "tool_choice": NAMED, "max_output_tokens": LIMIT}
        made = whole(await respond(api, ASK, **full), LIMIT)
        calls = items_in(made, "custom_tool_call")
        expect(calls, f"expected a custom_tool_call item, but got {str(made['output'])[:300]}")
        for call in calls:
            valid = call["name"] == "lamp" and call["id"] and call["call_id"] not in ("", None)
            expect(valid and call["id"] != call["call_id"], f"expected two ids, but got {call}")
            text = call["input"]
            matches = isinstance(text, str) and re.fullmatch(pattern, text, re.DOTALL)
            expect(matches, f"expected an input that matches {pattern!r}, but got {text!r}")

    return run


for _name, (_form, _pattern) in FORMS.items():
    _what = "free text" if _name == "text" else f"text that matches its {_name} grammar"
    check(f"responses.custom-{_name}",
          f"A named custom tool gives a custom_tool_call item whose input is {_what}.",
          "must" if _name == "text" else "should",
          "R2.6 R10.47")(_called(_form, _pattern))  # fmt: skip


@check("responses.custom-stream",
       "A streamed custom tool call is added without input; its deltas join to the input of its "
       "end and of its item.",
       "must", "R5.3 R10.47")  # fmt: skip
async def custom_stream(api: Api) -> None:
    full = {"tools": [lamp()], "tool_choice": NAMED, "max_output_tokens": LIMIT}
    events = await stream(api, ASK, **full)
    if events[-1]["type"] == "response.incomplete":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    kind = "custom_tool_call"
    added = [e["item"] for e in of_type(events, "output_item.added") if e["item"]["type"] == kind]
    ended = [e["item"] for e in of_type(events, "output_item.done") if e["item"]["type"] == kind]
    expect(len(added) == len(ended) > 0, f"expected calls that end, but got {added} and {ended}")
    for begun, done in zip(added, ended, strict=True):
        expect(begun["input"] == "", f"expected an item without input, but got {begun}")
        own = [event for event in events if event.get("item_id") == done["id"]]
        joined = "".join(event["delta"] for event in of_type(own, DELTA))
        texts = [joined, *(event["input"] for event in of_type(own, DONE)), done["input"]]
        agree = len(texts) == 3 and len(set(texts)) == 1
        expect(agree, f"expected the same input three times, but got {texts}")


@check("responses.custom-round-trip",
       "An earlier custom tool call and its output are part of the prompt.",
       "must", "R2.3 R10.47")  # fmt: skip
async def custom_round_trip(api: Api) -> None:
    long = "on, with a warm and gentle light, until the morning comes"
    counts = []
    for text, result in (("on", "on"), (long, "on"), (long, long)):
        given = [
            {"role": "user", "content": ASK},
            {"type": "custom_tool_call", "call_id": "call_1", "name": "lamp", "input": text},
            {"type": "custom_tool_call_output", "call_id": "call_1", "output": result},
        ]
        counts.append(await size(api, given, tools=[lamp()]))
    grows = counts[0] < counts[1] < counts[2]
    expect(grows, f"expected more input tokens for each longer text, but got {counts}")


def _text(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


# The fields, tools and items that Codex sends, shorter.
CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer",
         "content": [_text("input_text", "You may read all files.")]},
        {"type": "message", "role": "user", "content": [_text("input_text", "List the files.")]},
        {"type": "reasoning", "summary": [_text("summary_text", "I look.")], "content": None,
         "encrypted_content": "gAAAAABo"},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}',
         "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "test.py"},
        {"type": "message", "role": "user", "content": [_text("input_text", "Hello")]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Runs a command.",
         "strict": False, "parameters": {"type": "object",
                                         "properties": {"cmd": {"type": "string"}}}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": FORMS["lark"][0]},
        {"type": "namespace", "name": "mail", "description": "Tools for mail.", "tools": [
            {"type": "function", "name": "search", "description": "Searches.", "strict": False,
             "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}]},
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198c2a4-0000-7000-8000-000000000000",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "5"},
}  # fmt: skip


# The keys of items that the agent needs, by the item's type.
NEEDED: Mapping[str, Sequence[str]] = {
    "reasoning": ("summary",), "function_call": ("name", "arguments", "call_id"),
    "custom_tool_call": ("name", "input", "call_id"), "message": ("content",),
}  # fmt: skip


@check("responses.codex",
       "The request of a coding agent, with every kind of tool and item, gets a stream that it can "
       "read to its end.",
       "must", "R8 R10.21 [CODEX]")  # fmt: skip
async def codex(api: Api) -> None:
    fields = {name: value for name, value in CODEX.items() if name != "input"}
    events = await named_events(api, CODEX["input"], max_output_tokens=400, **fields)
    done = [data["item"] for name, data in events if name == "response.output_item.done"]
    for item in done:
        kind = item["type"]
        missing = [name for name in NEEDED.get(kind, ()) if item.get(name) is None]
        expect(not missing, f"expected {missing} in an item, but got {item}")
    name, last = events[-1]
    ended = name in ("response.completed", "response.incomplete")
    expect(ended, f"expected response.completed, but got {name}")
    usage = last["response"]["usage"]
    numbers = [usage[f"{kind}_tokens"] for kind in ("input", "output", "total")]
    whole_usage = all(type(one) is int for one in numbers) and last["response"]["id"]
    expect(whole_usage, f"expected the id and the usage, but got {str(last['response'])[:300]}")
    expect(last["response"]["output"] == done, f"expected the items {done} in the Response")


@check("responses.namespace",
       "A function in a namespace is called by its name, with the namespace next to it.",
       "should", "R2.6 R10.21 [codex#26234]")  # fmt: skip
async def namespace(api: Api) -> None:
    inner = {**WEATHER, "name": "look_up"}
    space = {"type": "namespace", "name": "sky", "description": "Tools.", "tools": [inner]}
    full = {"tools": [space], "tool_choice": "required", "max_output_tokens": LIMIT}
    made = whole(await respond(api, "What is the weather in Paris?", **full), LIMIT)
    found = [(call["name"], call.get("namespace")) for call in items_in(made, "function_call")]
    expect(set(found) == {("look_up", "sky")}, f"expected look_up in sky, but got {found}")
