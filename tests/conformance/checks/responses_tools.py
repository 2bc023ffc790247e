"""Functions of `/responses`: calls, their outputs, and the choice among them.

The contract of responses has them in sections 2.6, 4, 5.3 and 9.3. `tool_choice` forces the calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from openai.types.responses import Response

from ..check import Skip, check, expect
from ..target import Api, only
from .responses import WEATHER, items_in, of_type, respond, size, stream, whole
from .tools import BOTH, one_of

ASK = "What is the weather in Paris?"
LIMIT = 256
TIME = {"type": "function", "name": "get_time", "strict": True,
        "parameters": one_of(zone=("UTC", "CET"))}  # fmt: skip
NAMED = {"type": "function", "name": "get_weather"}
DELTA, DONE = "function_call_arguments.delta", "function_call_arguments.done"
ADDED, END = "output_item.added", "output_item.done"


async def called(api: Api, given: Any = ASK, **body: Any) -> list[Any]:
    """Return the calls of a response that must have some."""
    full = {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": LIMIT, **body}
    made = whole(await respond(api, given, **full), LIMIT)
    calls = items_in(made, "function_call")
    expect(calls, f"expected a function_call item, but got {str(made['output'])[:300]}")
    return calls


async def call_events(api: Api, given: Any = ASK, **body: Any) -> list[Any]:
    """Return the events of a streamed response with a call, which is not cut off."""
    full = {"tools": [WEATHER], "tool_choice": NAMED, "max_output_tokens": LIMIT, **body}
    events = await stream(api, given, **full)
    if events[-1]["type"] == "response.incomplete":
        raise Skip(f"the model needs more than {LIMIT} tokens for the call")
    return events


@check("responses.call",
       "If tool_choice names a function, the output has one function_call item with id and "
       "call_id.",
       "must", "7")  # fmt: skip
async def call(api: Api) -> None:
    choice = {"type": "function", "name": "get_weather"}
    body = await respond(api, "What is the weather in Paris?", tools=[WEATHER],
                         tool_choice=choice, max_output_tokens=256)  # fmt: skip
    if body["status"] == "incomplete":
        raise Skip("the model needs more than 256 tokens for the call")
    item = only([one for one in body["output"] if one["type"] == "function_call"], "function_call")
    valid = item["name"] == "get_weather" and item["call_id"] and item["id"].startswith("fc_")
    expect(valid, f"expected a call with id and call_id, but got {item}")
    arguments = json.loads(item["arguments"])
    expect(
        arguments in ({"city": "Paris"}, {"city": "Rome"}), f"expected a city, but got {arguments}"
    )


@check("responses.call-ids",
       "A function_call item is completed, its arguments are a string, and its id is not its "
       "call_id.",
       "must", "R4 R10.12 [llama.cpp#24882]")  # fmt: skip
async def call_ids(api: Api) -> None:
    for item in await called(api):
        ids = [item.get("id"), item.get("call_id")]
        expect(all(isinstance(one, str) and one for one in ids), f"expected two ids, but got {ids}")
        expect(ids[0] != ids[1], f"expected different ids, but got {ids}")
        status = item.get("status")
        expect(status == "completed", f"expected the status completed, but got {status!r}")
        text = item["arguments"]
        expect(isinstance(text, str), f"expected a string of arguments, but got {text!r}")
        expect(isinstance(json.loads(text), dict), f"expected a JSON object, but got {text!r}")


@check("responses.call-back",
       "The input may have a function_call item and its function_call_output.",
       "must", "7")  # fmt: skip
async def call_back(api: Api) -> None:
    given = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"type": "function_call", "call_id": "call_1", "name": "get_weather",
         "arguments": '{"city":"Paris"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"},
    ]  # fmt: skip
    await respond(api, given, tools=[WEATHER], max_output_tokens=16)


@check("responses.stream-call",
       "The argument deltas of a streamed function call join to its arguments.",
       "must", "7")  # fmt: skip
async def stream_call(api: Api) -> None:
    events = await call_events(api)
    joined = "".join(event["delta"] for event in of_type(events, DELTA))
    done = only([event["arguments"] for event in of_type(events, DONE)], f"{DONE} event")
    expect(joined == done, f"expected {done!r}, but got {joined!r}")
    expect(
        json.loads(done) in ({"city": "Paris"}, {"city": "Rome"}),
        f"expected a city, but got {done!r}",
    )


def _own(events: Sequence[Any]) -> list[Any]:
    """Return the events of function calls and of their items."""
    kinds = tuple(f"response.{kind}" for kind in (ADDED, DELTA, DONE, END))
    calls = {event["item"]["id"] for event in of_type(events, ADDED)
             if event["item"]["type"] == "function_call"}  # fmt: skip
    return [
        event for event in events
        if event["type"] in kinds
        and (event.get("item_id") or event.get("item", {}).get("id")) in calls
    ]  # fmt: skip


@check("responses.stream-call-order",
       "A streamed function call is added without arguments; deltas, their end and the whole item "
       "follow, without content parts.",
       "must", "R5.3 R10.13")  # fmt: skip
async def stream_call_order(api: Api) -> None:
    events = await call_events(api)
    own = _own(events)
    found = [event["type"].removeprefix("response.") for event in own]
    names = [name for at, name in enumerate(found) if at == 0 or name != found[at - 1]]
    wanted = [ADDED, DELTA, DONE, END]
    expect(names == wanted, f"expected {wanted}, but got {names}")
    head = own[0]["item"]
    begun = (head["arguments"], head["status"])
    expect(begun == ("", "in_progress"), f"expected an item without arguments, but got {head}")
    places = {event["output_index"] for event in own}
    expect(len(places) == 1, f"expected one output_index, but got {places}")
    last = own[-1]["item"]
    valid = last["arguments"] == own[-2]["arguments"] and last["status"] == "completed"
    expect(valid, f"expected a completed item with the arguments, but got {last}")
    parts = [e for e in events if "content_part" in e["type"] and e["item_id"] == head["id"]]
    expect(not parts, f"expected no content part of a call, but got {parts[:1]}")


@check("responses.stream-calls",
       "Several streamed function calls come one after another, each with its own output_index.",
       "must", "R5.3 R10.14")  # fmt: skip
async def stream_calls(api: Api) -> None:
    events = await call_events(api, BOTH, tool_choice="required", parallel_tool_calls=True)
    own = _own(events)
    places = [event["output_index"] for event in own]
    expect(places == sorted(places), f"expected one call after another, but got {places}")
    ends = [e["type"] for e in own if e["type"] in (f"response.{ADDED}", f"response.{END}")]
    count = len(ends) // 2
    wanted = [f"response.{ADDED}", f"response.{END}"] * count
    expect(ends == wanted, f"expected a call to end before the next one begins, but got {ends}")
    if count < 2:
        raise Skip("the model makes only one call")
    expect(len(set(places)) == count, f"expected {count} places, but got {sorted(set(places))}")
    final = items_in(events[-1]["response"], "function_call")
    ids = [event["item"]["id"] for event in own if event["type"] == f"response.{ADDED}"]
    expect([item["id"] for item in final] == ids, f"expected the calls {ids}, but got {final}")


@check("responses.one-call", "With parallel_tool_calls false, a Response has exactly one call.",
       "must", "R2.1 R10.46")  # fmt: skip
async def one_call(api: Api) -> None:
    calls = await called(api, BOTH, parallel_tool_calls=False)
    expect(len(calls) == 1, f"expected one call, but got {len(calls)}")


@check("responses.call-dump",
       "The output as the openai SDK dumps it is accepted as input, with the output of its call.",
       "must", "R2.3 R10.15 [AGENTS]")  # fmt: skip
async def call_dump(api: Api) -> None:
    full = {"tools": [WEATHER], "tool_choice": NAMED, "max_output_tokens": LIMIT}
    made = whole(await respond(api, ASK, **full), LIMIT)
    typed = Response.model_validate(made)
    dumped = [item.model_dump(mode="json") for item in typed.output]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "21 degrees"}
        for call in items_in(made, "function_call")
    ]
    given = [{"role": "user", "content": ASK}, *dumped, *results]
    count = await size(api, given, tools=[WEATHER])
    before = made["usage"]["input_tokens"]
    expect(count > before, f"expected more than {before} input tokens, but got {count}")


def _pair(name: str, city: str, result: str) -> tuple[dict[str, Any], dict[str, Any]]:
    arguments = json.dumps({"city": city})
    return (
        {"type": "function_call", "call_id": name, "name": "get_weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": name, "output": result},
    )


@check("responses.outputs-swapped",
       "The outputs of two calls may come in any order: they belong to their calls by call_id.",
       "must", "R2.5 R10.16")  # fmt: skip
async def outputs_swapped(api: Api) -> None:
    first, second = _pair("call_1", "Paris", "21 degrees"), _pair("call_2", "Rome", "rain")
    counts = []
    for outputs in ((first[1], second[1]), (second[1], first[1])):
        given = [{"role": "user", "content": BOTH}, first[0], second[0], *outputs]
        counts.append(await size(api, given, tools=[WEATHER]))
    expect(counts[0] == counts[1], f"expected equal numbers of input tokens, but got {counts}")


@check("responses.choice-none", "With tool_choice none, a Response has no call.",
       "must", "R9.3 R10.44")  # fmt: skip
async def choice_none(api: Api) -> None:
    body = await respond(api, ASK, tools=[WEATHER], tool_choice="none", max_output_tokens=32)
    calls = items_in(body, "function_call")
    expect(not calls, f"expected no call, but got {calls}")
    tools = [tool["name"] for tool in body["tools"]]
    expect(tools == ["get_weather"], f"expected the tools in the Response, but got {tools}")


@check("responses.choice-required", "With tool_choice required, a Response has a call.",
       "must", "R9.3 R10.44")  # fmt: skip
async def choice_required(api: Api) -> None:
    for call in await called(api, "Hello", tools=[WEATHER, TIME]):
        known = call["name"] in ("get_weather", "get_time")
        expect(known, f"expected a call of a given function, but got {call}")


@check("responses.choice-allowed",
       "With tool_choice allowed_tools, only the named functions are called.",
       "must", "R9.3 R10.44")  # fmt: skip
async def choice_allowed(api: Api) -> None:
    names = []
    for name in ("get_weather", "get_time"):
        choice = {"type": "allowed_tools", "mode": "required",
                  "tools": [{"type": "function", "name": name}]}  # fmt: skip
        calls = await called(api, tools=[WEATHER, TIME], tool_choice=choice)
        names.append({call["name"] for call in calls})
    expect(names == [{"get_weather"}, {"get_time"}], f"expected the named one, but got {names}")


# Tools that OpenAI runs itself, as clients mix them with functions.
HOSTED: Sequence[dict[str, Any]] = (
    {"type": "web_search"}, {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "local_shell"},
)  # fmt: skip


@check("responses.hosted",
       "Tools that the service runs itself may be mixed with a function, which is called.",
       "must", "R2.6 R10.20 [llama.cpp#20156]")  # fmt: skip
async def hosted(api: Api) -> None:
    calls = await called(api, tools=[HOSTED[0], WEATHER, *HOSTED[1:]], tool_choice=NAMED)
    names = {call["name"] for call in calls}
    expect(names == {"get_weather"}, f"expected a call of get_weather, but got {names}")


@check("responses.hosted-choice",
       "A tool_choice of a tool that the service runs itself is served, or rejected with a 400 "
       "error that names it.",
       "must", "R2.6 R10.20")  # fmt: skip
async def hosted_choice(api: Api) -> None:
    await called(api)
    choice = {"type": "file_search"}
    full = {"tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}, WEATHER]}
    body = {"model": api.model, "input": ASK, "max_output_tokens": 16, "tool_choice": choice,
            **full}  # fmt: skip
    reply = await api.post("/responses", body)
    if reply.status == 200:
        kinds = [item["type"] for item in reply.json()["output"]]
        expect("file_search_call" in kinds, f"expected a call of the tool, but got {kinds}")
        return
    error = reply.error(400, 404)
    named = str(error["param"]).startswith("tool") or "file_search" in error["message"]
    expect(named, f"expected an error that names tool_choice or the tool, but got {error}")
