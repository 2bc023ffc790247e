"""Custom tools: calls with text, plain or by a grammar (contract 3.1, 3.6 and 3.9)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..check import Body, Skip, check, expect
from ..target import Api, events, only
from .tools import LIMIT, WEATHER, calls_of

H = "/chat/completions"
ASK = "Turn the lamp on."


def custom(name: str, form: Any = None) -> dict[str, Any]:
    """Return a custom tool; None for `form` omits the format."""
    inner = {"name": name, "description": f"Send text to {name}."}
    return {"type": "custom", "custom": inner if form is None else {**inner, "format": form}}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    """Return the format of a custom tool with a grammar."""
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


REGEX = "(left|right) [0-9]{2}"
LARK = 'start: "turn " SIDE " " DIGIT DIGIT\nSIDE: "left" | "right"\nDIGIT: /[0-9]/\n'
# Each format, and the pattern that its inputs match.
FORMS: Mapping[str, tuple[Any, str]] = {
    "text": ({"type": "text"}, ".*"),
    "regex": (grammar("regex", REGEX), REGEX),
    "lark": (grammar("lark", LARK), f"turn {REGEX}"),
}


def _input(call: Any, name: str, pattern: str) -> str:
    """Return the input of a call; raise `Fail` unless the call is as promised."""
    expect(call.get("type") == "custom", f"expected the type custom, but got {call}")
    expect(isinstance(call.get("id"), str) and call["id"], f"expected an id, but got {call}")
    expect(call["custom"]["name"] == name, f"expected the name {name}, but got {call}")
    text = call["custom"]["input"]
    expect(isinstance(text, str), f"expected a string as input, but got {text!r}")
    matches = re.fullmatch(pattern, text, re.DOTALL)
    expect(matches, f"expected an input that matches {pattern!r}, but got {text!r}")
    return str(text)


def _request(tools: Sequence[Any], choice: Any = "required", **more: Any) -> dict[str, Any]:
    return {"tools": tools, "tool_choice": choice, "temperature": 0, "max_tokens": LIMIT, **more}


async def _calls(api: Api, tools: Sequence[Any], choice: Any = "required") -> list[Any]:
    found = only((await api.chat(ASK, **_request(tools, choice)))["choices"], "choice")
    if found["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    return calls_of(found["message"])


def _follows(form: Any, pattern: str) -> Body:
    async def run(api: Api) -> None:
        for call in await _calls(api, [custom("lamp", form)]):
            _input(call, "lamp", pattern)

    return run


for _name, (_form, _pattern) in FORMS.items():
    _what = "free text" if _name == "text" else f"the {_name} grammar of its format"
    check(f"custom_tools.{_name}", f"The input of a custom tool's call is {_what}."
          if _name == "text" else f"The input of a custom tool's call matches {_what}.",
          "should", "3.1 3.9 [SDK]")(_follows(_form, _pattern))  # fmt: skip


@check("custom_tools.named",
       "If tool_choice names a custom tool, it is called, also with functions in tools.",
       "should", "3.1 3.9 [SDK]")  # fmt: skip
async def named(api: Api) -> None:
    tools = [WEATHER, custom("lamp", FORMS["regex"][0]), custom("door")]
    choice = {"type": "custom", "custom": {"name": "lamp"}}
    for call in await _calls(api, tools, choice):
        _input(call, "lamp", REGEX)


@check("custom_tools.stream",
       "In a stream, a custom tool's call begins with index, id, type and name, and its input "
       "matches the grammar.",
       "should", "3.6 3.9 [SDK]")  # fmt: skip
async def stream(api: Api) -> None:
    # The published type of a chunk has no custom calls, although OpenAI sends them.
    messages = [{"role": "user", "content": ASK}]
    body = {"model": api.model, "messages": messages, "stream": True,
            **_request([custom("lamp", FORMS["regex"][0])])}  # fmt: skip
    reply = await api.send("POST", H, json.dumps(body).encode(), sent=body)
    if reply.status != 200:
        reply.ok()
    choices = [chunk["choices"][0] for chunk in events(reply) if chunk["choices"]]
    if choices[-1]["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    parts = [part for one in choices for part in one["delta"].get("tool_calls") or ()]
    expect(parts, f"expected tool calls in the stream, but got {choices[:3]}")
    joined: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part["index"] not in joined:
            joined[part["index"]] = {**part, "custom": {**part["custom"], "input": ""}}
        else:
            repeated = part.get("id") or part.get("type") or part["custom"].get("name")
            expect(not repeated, f"expected only input in a later delta, but got {part}")
        joined[part["index"]]["custom"]["input"] += part["custom"].get("input") or ""
    for call in joined.values():
        _input(call, "lamp", REGEX)
    reason = choices[-1]["finish_reason"]
    expect(reason == "tool_calls", f"expected the finish_reason tool_calls, but got {reason!r}")


@check("custom_tools.round-trip",
       "An earlier call of a custom tool and its result are part of the prompt.",
       "should", "3.2 3.9 [SDK]")  # fmt: skip
async def round_trip(api: Api) -> None:
    tools = [custom("lamp")]
    long = "on, with a warm and gentle light, until the morning comes"
    counts = []
    for text, result in (("on", "on"), (long, "on"), (long, long)):
        call = {"id": "call_1", "type": "custom", "custom": {"name": "lamp", "input": text}}
        messages = [
            {"role": "user", "content": ASK},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]
        body = await api.chat(messages, tools=tools, max_tokens=1)
        counts.append(body["usage"]["prompt_tokens"])
    grows = counts[0] < counts[1] < counts[2]
    expect(grows, f"expected more prompt tokens for each longer text, but got {counts}")


# Each row: the id, the invalid format in words, and as JSON.
WRONG: Sequence[tuple[str, str, Any]] = (
    ("bad-regex", "an invalid regex", grammar("regex", "(left")),
    ("bad-lark", "an invalid Lark grammar", grammar("lark", 'start: "left" |( SIDE\n')),
    ("bad-syntax", "an unknown syntax", grammar("no_syntax", "left")),
    ("bad-type", "an unknown type", {"type": "no_type"}),
)


def _refused(form: Any) -> Body:
    async def run(api: Api) -> None:
        await api.chat(ASK, **_request([custom("lamp", FORMS["regex"][0])]))
        messages = [{"role": "user", "content": ASK}]
        body = {"model": api.model, "messages": messages, **_request([custom("lamp", form)])}
        error = (await api.post(H, body)).error(400)
        named = str(error["param"] or error["message"])
        expect("tools" in named, f"expected an error that names tools, but got {error}")

    return run


for _name, _what, _wrong in WRONG:
    check(f"custom_tools.{_name}",
          f"A custom tool whose format has {_what} is rejected with a 400 error that names tools.",
          "should", "3.1 [SDK]")(_refused(_wrong))  # fmt: skip
