"""Tool calls, plain and streamed (contract 3.1, 3.2, 3.6).

`tool_choice` forces the calls, and narrow schemas constrain the arguments, so that the checks do
not depend on the ability of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from ..check import Body, Diverges, Skip, check, expect
from ..target import Api, only

H = "/chat/completions"
ASK = "What is the weather in Paris?"
BOTH = "What is the weather in Paris and in Rome?"
LIMIT = 256


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    """Return a function tool; None for `parameters` omits the key."""
    function = {"name": name, "description": f"Call {name}."}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def one_of(**values: Sequence[Any]) -> dict[str, Any]:
    """Return the schema of an object whose properties each allow a few values."""
    return {
        "type": "object",
        "properties": {name: {"enum": list(allowed)} for name, allowed in values.items()},
        "required": list(values),
        "additionalProperties": False,
    }


WEATHER = tool("get_weather", one_of(city=("Paris", "Rome"), unit=("C", "F")))
TIME = tool("get_time", one_of(zone=("UTC", "CET")))
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in (WEATHER, TIME)}


async def _choice(api: Api, messages: Any = ASK, **body: Any) -> Any:
    full = {"tools": [WEATHER, TIME], "tool_choice": "required", "temperature": 0,
            "max_tokens": LIMIT, **body}  # fmt: skip
    choice = only((await api.chat(messages, **full))["choices"], "choice")
    if choice["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    return choice


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    """Return the tool calls of a message that must have some."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        expect(False, f"expected tool calls, but got {message}")
    assert isinstance(calls, list)
    return calls


async def _calls(api: Api, **body: Any) -> list[Any]:
    return calls_of((await _choice(api, **body))["message"])


def _valid(call: Mapping[str, Any], schemas: Mapping[str, Any] = SCHEMAS) -> None:
    name, text = call["function"]["name"], call["function"]["arguments"]
    expect(name in schemas, f"expected one of {list(schemas)}, but got {name!r}")
    expect(isinstance(text, str), f"expected a string of arguments, but got {text!r}")
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    expect(isinstance(arguments, dict), f"expected a JSON object of arguments, but got {text!r}")
    error = next(Draft202012Validator(schemas[name]).iter_errors(arguments), None)
    expect(error is None, f"expected arguments that match the schema, but got {text!r}")


async def _deltas(api: Api, messages: Any = ASK, **body: Any) -> list[Any]:
    """Return the choices of a streamed call's chunks."""
    full = {"tools": [WEATHER, TIME], "tool_choice": "required", "temperature": 0,
            "max_tokens": LIMIT, **body}  # fmt: skip
    found = [c["choices"][0] for c in await api.chat_stream(messages, **full) if c["choices"]]
    if found[-1]["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    return found


def _parts(choices: Sequence[Any]) -> list[Any]:
    parts = [part for c in choices for part in c["delta"].get("tool_calls") or ()]
    expect(parts, f"expected tool calls in the stream, but got {choices[:3]}")
    return parts


# A conversation with a call that breaks the schema, which models repeat.
BROKEN = [
    {"role": "user", "content": ASK},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "18"},
    {"role": "user", "content": "And what is the weather in Rome?"},
]  # fmt: skip
STRICT = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}


@check("tools.strict-auto",
       "Where the model chooses to call a strict function, the arguments match its schema.",
       "must", "3.6 10.44",
       chance="A server that enforces nothing passes with q⁶, where q is the probability that the "
              "model obeys by itself, or answers with text; a right one never fails.")  # fmt: skip
async def strict_auto(api: Api) -> None:
    for seed, messages in enumerate((ASK, BROKEN) * 3):
        full = {"tools": [STRICT], "tool_choice": "auto", "temperature": 1, "seed": seed,
                "max_tokens": LIMIT}  # fmt: skip
        choice = only((await api.chat(messages, **full))["choices"], "choice")
        if choice["finish_reason"] != "length":
            for call in choice["message"].get("tool_calls") or ():
                _valid(call)


@check("tools.required",
       "With tool_choice required, the message has tool calls and the finish_reason is tool_calls.",
       "must", "3.3 10.64")  # fmt: skip
async def required(api: Api) -> None:
    choice = await _choice(api)
    calls_of(choice["message"])
    reason = choice["finish_reason"]
    expect(reason == "tool_calls", f"expected finish_reason tool_calls, but got {reason!r}")


@check("tools.content-null", "With tool calls, content is null or text that is not blank.",
       "must", "3.3 10.64")  # fmt: skip
async def content_null(api: Api) -> None:
    message = (await _choice(api))["message"]
    calls_of(message)
    content = message.get("content", 0)
    text = isinstance(content, str) and content.strip()
    expect(content is None or text, f"expected null or text as content, but got {message}")


@check("tools.arguments", "The arguments of a tool call are a string that contains a JSON object.",
       "must", "3.6 10.64")  # fmt: skip
async def arguments(api: Api) -> None:
    for call in await _calls(api):
        text = call["function"]["arguments"]
        expect(isinstance(text, str), f"expected a string, but got {text!r}")
        expect(isinstance(json.loads(text), dict), f"expected a JSON object, but got {text!r}")


@check("tools.schema", "The arguments of a tool call match the tool's parameters.", "must", "10.64")
async def schema(api: Api) -> None:
    for call in await _calls(api):
        _valid(call)


@check("tools.ids", "Every tool call has a unique id, which is a string.", "must", "3.6 10.64")
async def ids(api: Api) -> None:
    found = [
        call.get("id") for _ in range(2) for call in await _calls(api, messages="Weather and time?")
    ]
    expect(all(isinstance(one, str) and one for one in found), f"expected ids, but got {found}")
    expect(len(set(found)) == len(found), f"expected different ids, but got {found}")


@check("tools.id-form", "The id of a tool call begins with call_.", "should", "3.6")
async def id_form(api: Api) -> None:
    for call in await _calls(api):
        expect(str(call.get("id")).startswith("call_"), f"expected call_…, but got {call}")


@check("tools.type", "A tool call has the type function and the name of a tool in the request.",
       "must", "3.6")  # fmt: skip
async def kind(api: Api) -> None:
    for call in await _calls(api):
        expect(call.get("type") == "function", f"expected type function, but got {call}")
        expect(call["function"]["name"] in SCHEMAS, f"expected a tool's name, but got {call}")


@check("tools.none", "With tool_choice none, the message has text and no tool calls.",
       "must", "3.6 10.67")  # fmt: skip
async def none(api: Api) -> None:
    body = await api.chat(ASK, tools=[WEATHER], tool_choice="none", temperature=0, max_tokens=24)
    message = body["choices"][0]["message"]
    expect(not message.get("tool_calls"), f"expected no tool calls, but got {message}")
    expect(isinstance(message.get("content"), str), f"expected text, but got {message}")


@check("tools.named",
       "If tool_choice names a function, only it is called, with finish_reason stop or tool_calls.",
       "must", "3.6 10.68")  # fmt: skip
async def named(api: Api) -> None:
    for name in SCHEMAS:
        choice = await _choice(api, tool_choice={"type": "function", "function": {"name": name}})
        found = [call["function"]["name"] for call in calls_of(choice["message"])]
        expect(set(found) == {name}, f"expected {name}, but got {found}")
        reason = choice["finish_reason"]
        valid = reason in ("stop", "tool_calls")
        expect(valid, f"expected finish_reason stop or tool_calls, but got {reason!r}")


@check("tools.auto",
       "Without tool_choice, the message has tool calls or text, and finish_reason agrees with it.",
       "must", "3.3")  # fmt: skip
async def auto(api: Api) -> None:
    for question in (ASK, "Count to 3."):
        body = await api.chat(question, tools=[WEATHER], temperature=0, max_tokens=64)
        choice = body["choices"][0]
        calls, reason = choice["message"].get("tool_calls"), choice["finish_reason"]
        if calls:
            expect(reason in ("tool_calls", "length"), f"expected tool_calls, but got {reason!r}")
            continue
        expect(calls is None, f"expected no tool_calls without calls, but got {calls!r}")
        expect(reason in ("stop", "length"), f"expected stop or length, but got {reason!r}")
        text = choice["message"].get("content")
        expect(isinstance(text, str), f"expected a tool call or text, but got {choice}")


@check("tools.length", "A tool call that max_tokens cuts off has the finish_reason length.",
       "must", "3.3")  # fmt: skip
async def length(api: Api) -> None:
    full = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    reason = (await api.chat(ASK, max_tokens=3, **full))["choices"][0]["finish_reason"]
    expect(reason == "length", f"expected length, but got {reason!r}")


@check("tools.one-call", "With parallel_tool_calls false, a message has exactly one tool call.",
       "should", "3.1 10.69")  # fmt: skip
async def one_call(api: Api) -> None:
    calls = await _calls(api, messages=BOTH, parallel_tool_calls=False)
    expect(len(calls) == 1, f"expected one call, but got {len(calls)}")


@check("tools.several", "Several tool calls in one answer are separate items with valid arguments.",
       "should", "3.6 10.69")  # fmt: skip
async def several(api: Api) -> None:
    calls = await _calls(api, messages=BOTH, parallel_tool_calls=True)
    for call in calls:
        _valid(call)
    if len(calls) < 2:
        raise Skip("the model makes only one call")


@check("tools.no-parameters", "A tool without parameters is called with the arguments {}.",
       "must", "3.1 3.6")  # fmt: skip
async def no_parameters(api: Api) -> None:
    for parameters in (None, {"type": "object", "properties": {}}):
        for call in await _calls(api, tools=[tool("ping", parameters)]):
            text = call["function"]["arguments"]
            expect(json.loads(text) == {}, f"expected {{}}, but got {text!r}")


@check("tools.unicode",
       "The arguments of a tool call can contain quotes, backslashes and any Unicode character.",
       "must", "3.6")  # fmt: skip
async def unicode(api: Api) -> None:
    word = 'é "漢" \\ 🔥'
    calls = await _calls(api, tools=[tool("say", one_of(word=(word,)))])
    text = calls[0]["function"]["arguments"]
    expect(json.loads(text) == {"word": word}, f"expected {word!r} in it, but got {text!r}")


@check("tools.nested", "Nested lists, objects and numbers in arguments match the parameters.",
       "should", "10.64")  # fmt: skip
async def nested(api: Api) -> None:
    item = {"type": "object", "properties": {"n": {"type": "integer", "enum": [1, 2]}},
            "required": ["n"], "additionalProperties": False}  # fmt: skip
    parameters = {
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": item, "minItems": 1, "maxItems": 2},
            "deep": {"type": "object", "properties": {"on": {"type": "boolean"}},
                     "required": ["on"], "additionalProperties": False},
        },
        "required": ["items", "deep"], "additionalProperties": False,
    }  # fmt: skip
    for call in await _calls(api, tools=[tool("nest", parameters)]):
        _valid(call, {"nest": parameters})


@check("tools.n", "With n 2, each choice has tool calls, and all of their ids differ.",
       "should", "3.6")  # fmt: skip
async def several_choices(api: Api) -> None:
    body = await api.chat(ASK, tools=[WEATHER], tool_choice="required", n=2, max_tokens=LIMIT)
    calls = [call for choice in body["choices"] for call in calls_of(choice["message"])]
    ids = {call["id"] for call in calls}
    expect(len(ids) == len(calls), f"expected different ids, but got {calls}")


@check("tools.prompt", "The tools of a request are part of the prompt.", "must", "3.1")
async def prompt(api: Api) -> None:
    plain = (await api.chat(ASK, max_tokens=1))["usage"]["prompt_tokens"]
    body = await api.chat(ASK, tools=[WEATHER], tool_choice="required", max_tokens=1)
    count = body["usage"]["prompt_tokens"]
    expect(count > plain, f"expected more prompt tokens than {plain}, but got {count}")


def _turns(content: Any = "21 degrees", reply: Any = None, **more: Any) -> list[Any]:
    function = {"name": "get_weather", "arguments": '{"city":"Paris","unit":"C"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    assistant = {"role": "assistant", "content": reply, "tool_calls": [call], **more}
    result = {"role": "tool", "tool_call_id": "call_1", "content": content}
    return [{"role": "user", "content": ASK}, assistant, result]


@check("tools.round-trip",
       "A tool call and its result are accepted as messages, and the result is part of the prompt.",
       "must", "3.2 10.70")  # fmt: skip
async def round_trip(api: Api) -> None:
    counts = []
    for content in ("21", "21 degrees and a light wind from the west"):
        body = await api.chat(_turns(content), tools=[WEATHER], max_tokens=2)
        counts.append(body["usage"]["prompt_tokens"])
    expect(counts[1] > counts[0], f"expected the result in the prompt, but got {counts} tokens")


@check("tools.content-absent", "An assistant message with tool calls may have no content key.",
       "must", "3.2")  # fmt: skip
async def content_absent(api: Api) -> None:
    turns = _turns()
    del turns[1]["content"]
    await api.chat(turns, tools=[WEATHER], max_tokens=1)


@check("tools.result-parts",
       "The content of a tool message may be a list of text parts, which are all read.",
       "should", "3.2")  # fmt: skip
async def result_parts(api: Api) -> None:
    parts = [{"type": "text", "text": text} for text in ("21 degrees ", "and a light wind, later")]
    counts = []
    for content in ("21 degrees and a light wind, later", parts):
        body = await api.chat(_turns(content), tools=[WEATHER], max_tokens=1)
        counts.append(body["usage"]["prompt_tokens"])
    # Some servers put a newline between the parts.
    close = abs(counts[0] - counts[1]) <= 4
    expect(close, f"expected as many prompt tokens as for one text, but got {counts}")


@check("tools.orphan", "Messages with a tool call but without its result are rejected with 400.",
       "may", "3.2 10.71")  # fmt: skip
async def orphan(api: Api) -> None:
    await api.chat(_turns(), tools=[WEATHER], max_tokens=1)
    turns = [*_turns()[:2], {"role": "user", "content": "And?"}]
    body = {"model": api.model, "messages": turns, "tools": [WEATHER], "max_tokens": 1}
    reply = await api.post(H, body)
    if reply.status == 200:
        raise Diverges("the server accepts a tool call without its result")
    reply.error(400)


# Each row: the id, the invalid fields of a request with a valid tool, level, source, the word
# that the error must contain.
WRONG: Sequence[tuple[str, Mapping[str, Any], str, str, str]] = (
    ("choice-word", {"tool_choice": "sometimes"}, "must", "3.1", "tool_choice"),
    ("choice-unknown", {"tool_choice": {"type": "function", "function": {"name": "no_tool"}}},
     "should", "3.1", "tool_choice"),
    ("name-missing", {"tools": [{"type": "function", "function": {}}]}, "must", "3.1", "tools"),
    ("name-invalid", {"tools": [tool("no name!")]}, "should", "3.1", "tools"),
    ("type-unknown", {"tools": [{"type": "no_type"}]}, "must", "3.1", "tools"),
    ("parameters-list", {"tools": [tool("f", parameters=[])]}, "must", "3.1", "tools"),
)  # fmt: skip


def _rejected(changes: Mapping[str, Any], word: str) -> Body:
    async def run(api: Api) -> None:
        await api.chat(ASK, tools=[WEATHER], tool_choice="auto", max_tokens=1)
        messages = [{"role": "user", "content": ASK}]
        body = {"model": api.model, "messages": messages, "tools": [WEATHER], "max_tokens": 1}
        error = (await api.post(H, {**body, **changes})).error(400)
        named = word in str(error["param"] or error["message"])
        expect(named, f"expected an error that names {word!r}, but got {error}")

    return run


for _name, _changes, _level, _source, _word in WRONG:
    _shown = json.dumps(_changes)
    _promise = f"A request with {_shown} is rejected with a 400 error that names {_word!r}."
    check(f"tools.{_name}", _promise, _level, _source)(_rejected(_changes, _word))  # type: ignore[arg-type]


@check("tools.allowed", "If tool_choice is allowed_tools, only the listed tools are called.",
       "should", "3.1")  # fmt: skip
async def allowed(api: Api) -> None:
    for name in SCHEMAS:
        only_this = [{"type": "function", "function": {"name": name}}]
        choice = {"type": "allowed_tools",
                  "allowed_tools": {"mode": "required", "tools": only_this}}  # fmt: skip
        found = [call["function"]["name"] for call in await _calls(api, tool_choice=choice)]
        expect(set(found) == {name}, f"expected {name} only, but got {found}")


@check("tools.custom", "A custom tool is called with a string as its input.", "may", "3.9 [SDK]")
async def custom(api: Api) -> None:
    offered = [{"type": "custom", "custom": {"name": "shell", "description": "Run a command."}}]
    for call in await _calls(api, tools=offered):
        expect(call.get("type") == "custom", f"expected type custom, but got {call}")
        expect(call["custom"]["name"] == "shell", f"expected shell, but got {call}")
        expect(isinstance(call["custom"]["input"], str), f"expected a string, but got {call}")


@check("tools.functions",
       "The deprecated functions return a function_call in the message, with valid arguments.",
       "should", "3.1 3.9")  # fmt: skip
async def functions(api: Api) -> None:
    body = {"functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}
    choice = (await api.chat(ASK, max_tokens=LIMIT, temperature=0, **body))["choices"][0]
    if choice["finish_reason"] == "length":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    call = choice["message"].get("function_call")
    expect(isinstance(call, dict), f"expected function_call, but got {choice['message']}")
    _valid({"function": call})
    valid = choice["finish_reason"] in ("function_call", "stop")
    expect(valid, f"expected function_call or stop, but got {choice['finish_reason']!r}")


@check("tools.stream-header", "The first delta of a tool call has its index, id, type and name.",
       "must", "10.65")  # fmt: skip
async def stream_header(api: Api) -> None:
    seen: set[int] = set()
    for part in _parts(await _deltas(api)):
        index = part.get("index")
        expect(type(index) is int, f"expected an integer index, but got {part}")
        if index not in seen:
            seen.add(index)
            valid = part.get("id") and part.get("type") == "function"
            valid = valid and part["function"].get("name")
            expect(valid, f"expected id, type and name in the first delta, but got {part}")


@check("tools.stream-once", "The id, type and name of a streamed tool call are not repeated.",
       "must", "3.6 10.66")  # fmt: skip
async def stream_once(api: Api) -> None:
    seen: set[int] = set()
    for part in _parts(await _deltas(api)):
        if part["index"] in seen:
            again = part.get("id") or part.get("type") or part.get("function", {}).get("name")
            expect(not again, f"expected no id, type or name again, but got {part}")
        seen.add(part["index"])


@check("tools.stream-arguments",
       "The arguments of a streamed tool call join to JSON that matches the parameters.",
       "must", "3.6 10.65")  # fmt: skip
async def stream_arguments(api: Api) -> None:
    joined: dict[int, dict[str, Any]] = {}
    for part in _parts(await _deltas(api)):
        call = joined.setdefault(part["index"], {"name": None, "arguments": ""})
        function = part.get("function") or {}
        call["name"] = call["name"] or function.get("name")
        call["arguments"] += function.get("arguments") or ""
    for call in joined.values():
        _valid({"function": call})


@check("tools.stream-equal",
       "Streamed tool calls have the same names and arguments as those that are not streamed.",
       "must", "10.29 10.65")  # fmt: skip
async def stream_equal(api: Api) -> None:
    whole = [(c["function"]["name"], c["function"]["arguments"]) for c in await _calls(api)]
    joined: dict[int, list[str]] = {}
    for part in _parts(await _deltas(api)):
        function = part.get("function") or {}
        call = joined.setdefault(part["index"], [function.get("name", ""), ""])
        call[1] += function.get("arguments") or ""
    expect([tuple(call) for call in joined.values()] == whole,
           f"expected {whole}, but got {list(joined.values())}")  # fmt: skip


@check("tools.stream-order", "In a stream, a tool call is complete before the next begins.",
       "must", "3.6")  # fmt: skip
async def stream_order(api: Api) -> None:
    found = [part["index"] for part in _parts(await _deltas(api, BOTH, parallel_tool_calls=True))]
    expect(found == sorted(found) and found[0] == 0, f"expected 0, 0, …, 1, …, but got {found}")
    if found[-1] == 0:
        raise Skip("the model makes only one call")


@check("tools.stream-finish",
       "A stream with tool calls has the finish_reason tool_calls once, in its last chunk.",
       "must", "3.3 3.6")  # fmt: skip
async def stream_finish(api: Api) -> None:
    choices = await _deltas(api)
    found = [c["finish_reason"] for c in choices if c["finish_reason"] is not None]
    expect(found == ["tool_calls"], f"expected tool_calls once, but got {found}")
    expect(choices[-1]["finish_reason"], f"expected the finish_reason last, but got {choices[-1]}")


@check("tools.stream-first",
       "In a stream with tool calls, only the first delta has the role, and its content is null.",
       "should", "3.6 [SNAP]")  # fmt: skip
async def stream_first(api: Api) -> None:
    choices = await _deltas(api)
    delta = choices[0]["delta"]
    expect(delta.get("role") == "assistant", f"expected the role assistant, but got {delta}")
    content = delta.get("content", "no key")
    expect(content is None, f"expected null for content, but got {content!r}")
    again = [c["delta"] for c in choices[1:] if "role" in c["delta"]]
    expect(not again, f"expected the role once, but got it again in {again[:1]}")
