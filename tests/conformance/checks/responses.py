"""`POST /responses`, plain and streamed (contract 7)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..check import Body, Diverges, Fail, Skip, check, expect
from ..published import event_problem
from ..target import Api, Reply, only
from .tools import one_of

R = "/responses"
ASK = "Count to 12."
KEYS = (
    "id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools",
    "output", "parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p",
)  # fmt: skip
WEATHER = {"type": "function", "name": "get_weather", "strict": True,
           "parameters": one_of(city=("Paris", "Rome"))}  # fmt: skip


async def respond(api: Api, given: Any = ASK, **body: Any) -> Any:
    """Return the body of a response that the server must support; the response is not stored."""
    full = {"model": api.model, "input": given, "store": False, "temperature": 0, **body}
    return (await api.post(R, full)).ok()


def _message(body: Any) -> Any:
    found = [item for item in body["output"] if item["type"] == "message"]
    return only(found, "message")


def text_of(body: Any) -> str:
    """Return the text of a response's only message."""
    return "".join(part["text"] for part in _message(body)["content"])


async def _events(api: Api, given: Any = ASK, **body: Any) -> list[tuple[str, Any]]:
    """Return the name and the data of each event of a streamed response."""
    full = {"model": api.model, "input": given, "store": False, "temperature": 0, "stream": True,
            **body}  # fmt: skip
    reply = await api.send("POST", R, json.dumps(full).encode(), sent=full)
    if reply.status != 200:
        reply.ok()
    return _parsed(reply)


def _parsed(reply: Reply) -> list[tuple[str, Any]]:
    kind = reply.headers.get("content-type", "")
    expect(kind.startswith("text/event-stream"), f"expected an event stream, but got {kind!r}")
    found = []
    for block in reply.text.replace("\r\n", "\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        data = lines.get("data")
        if data is None or data == "[DONE]":
            continue
        try:
            found.append((lines.get("event", ""), json.loads(data)))
        except ValueError:
            raise Fail(f"expected JSON in an event, but got {data[:200]}") from None
    expect(found, f"expected events, but got {reply.text[:200]!r}")
    return found


@check("responses.keys",
       "A Response has every required key, the object response, an id that begins with resp_, "
       "and error null.",
       "must", "7 [SPEC]")  # fmt: skip
async def keys(api: Api) -> None:
    body = await respond(api, max_output_tokens=16)
    missing = [name for name in KEYS if name not in body]
    expect(not missing, f"expected {missing} in the Response, but got {sorted(body)}")
    expect(body["object"] == "response", f"expected object response, but got {body['object']!r}")
    expect(body["id"].startswith("resp_"), f"expected resp_…, but got {body['id']!r}")
    expect(body["error"] is None, f"expected null for error, but got {body['error']!r}")


@check("responses.type", "A Response matches OpenAI's published type.", "must", "7 10.95")
async def kind(api: Api) -> None:
    await respond(api, max_output_tokens=16)
    wrong = api.wrong.get(R)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")


@check("responses.message",
       "The output of a Response has one message of the assistant with one output_text part.",
       "must", "7")  # fmt: skip
async def message(api: Api) -> None:
    item = _message(await respond(api, max_output_tokens=64))
    valid = item["role"] == "assistant" and item["id"].startswith("msg_")
    valid = valid and item["status"] in ("completed", "incomplete")
    expect(valid, f"expected the role assistant, msg_… and a status, but got {str(item)[:200]}")
    part = only(item["content"], "content part")
    valid = part["type"] == "output_text" and isinstance(part["text"], str)
    expect(valid and part["annotations"] == [], f"expected output_text, but got {part}")


@check("responses.answer", "A Response has the same text as a chat completion for the same input.",
       "must", "7")  # fmt: skip
async def answer(api: Api) -> None:
    full = {"temperature": 0, "max_tokens": 16}
    chat = (await api.chat(ASK, **full))["choices"][0]["message"]["content"]
    found = text_of(await respond(api, max_output_tokens=16))
    expect(found == chat, f"expected {chat!r}, but got {found!r}")


@check("responses.usage",
       "The usage of a Response has input_tokens and output_tokens that add up to total_tokens, "
       "and both details.",
       "must", "7")  # fmt: skip
async def usage(api: Api) -> None:
    counts = (await respond(api, max_output_tokens=16))["usage"]
    values = [counts[f"{kind}_tokens"] for kind in ("input", "output", "total")]
    expect(
        values[0] + values[1] == values[2],
        f"expected a total_tokens that adds up, but got {counts}",
    )
    for name in ("input_tokens_details", "output_tokens_details"):
        expect(isinstance(counts.get(name), dict), f"expected {name}, but got {counts}")


@check("responses.complete",
       "A Response with a complete answer has the status completed and incomplete_details null.",
       "must", "7")  # fmt: skip
async def complete(api: Api) -> None:
    body = await respond(api, max_output_tokens=400)
    if body["status"] == "incomplete":
        raise Skip("the model needs more than 400 tokens for the answer")
    expect(body["status"] == "completed", f"expected completed, but got {body['status']!r}")
    details = body["incomplete_details"]
    expect(details is None, f"expected null for incomplete_details, but got {details}")


@check("responses.incomplete",
       "A Response that reaches max_output_tokens has the status incomplete and that reason.",
       "must", "7")  # fmt: skip
async def incomplete(api: Api) -> None:
    body = await respond(api, max_output_tokens=16)
    expect(body["status"] == "incomplete", f"expected incomplete, but got {body['status']!r}")
    details = body["incomplete_details"]
    valid = details == {"reason": "max_output_tokens"}
    expect(valid, f"expected max_output_tokens as the reason, but got {details}")
    expect(
        body["usage"]["output_tokens"] <= 16, f"expected at most 16 tokens, but got {body['usage']}"
    )


@check("responses.minimum",
       "A max_output_tokens below 16 is rejected with a 400 error whose param is "
       "max_output_tokens.",
       "should", "7 [pi#6265]")  # fmt: skip
async def minimum(api: Api) -> None:
    await respond(api, max_output_tokens=16)
    body = {"model": api.model, "input": ASK, "max_output_tokens": 1}
    reply = await api.post(R, body)
    if reply.status == 200:
        raise Diverges("the server accepts a limit below 16")
    error = reply.error(400)
    expect(
        error["param"] == "max_output_tokens", f"expected param max_output_tokens, but got {error}"
    )


@check("responses.instructions",
       "instructions are part of the prompt, and the Response repeats them.",
       "must", "7")  # fmt: skip
async def instructions(api: Api) -> None:
    plain = await respond(api, max_output_tokens=16)
    instructed = await respond(api, max_output_tokens=16, instructions="Answer in one word.")
    counts = [body["usage"]["input_tokens"] for body in (plain, instructed)]
    expect(counts[1] > counts[0], f"expected more input tokens with instructions, but got {counts}")
    found = instructed["instructions"]
    expect(found == "Answer in one word.", f"expected the instructions, but got {found!r}")


@check("responses.items",
       "The input may be a list of messages, with a string or with input_text parts as content.",
       "must", "7")  # fmt: skip
async def items(api: Api) -> None:
    whole = text_of(await respond(api, max_output_tokens=16))
    parts = [{"type": "input_text", "text": "Count "}, {"type": "input_text", "text": "to 12."}]
    for given in (
        [{"role": "user", "content": ASK}],
        [{"type": "message", "role": "user", "content": parts}],
    ):
        found = text_of(await respond(api, given, max_output_tokens=16))
        expect(found == whole, f"expected {whole!r}, but got {found!r}")


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


@check("responses.format", "With a JSON schema in text.format, the answer matches the schema.",
       "should", "7")  # fmt: skip
async def text_format(api: Api) -> None:
    schema = one_of(colour=("red", "blue"))
    form = {"type": "json_schema", "name": "answer", "strict": True, "schema": schema}
    body = await respond(api, "Which colour?", text={"format": form}, max_output_tokens=256)
    if body["status"] == "incomplete":
        raise Skip("the model needs more than 256 tokens for the answer")
    found = json.loads(text_of(body))
    expect(found in ({"colour": "red"}, {"colour": "blue"}), f"expected a colour, but got {found}")


@check("responses.nulls", "A request to /responses with null in its optional fields is accepted.",
       "must", "7")  # fmt: skip
async def nulls(api: Api) -> None:
    names = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "reasoning",
             "temperature", "top_p", "stream", "parallel_tool_calls")  # fmt: skip
    full = {**dict.fromkeys(names), "max_output_tokens": 16}
    await respond(api, "Hello", **full)


@check("responses.stream-names", "In a streamed Response, the name of each event is its type.",
       "must", "7")  # fmt: skip
async def stream_names(api: Api) -> None:
    for name, data in await _events(api, max_output_tokens=16):
        expect(name == data.get("type"), f"expected event {data.get('type')!r}, but got {name!r}")


@check("responses.stream-numbers",
       "In a streamed Response, sequence_number counts the events from 0.",
       "must", "7")  # fmt: skip
async def stream_numbers(api: Api) -> None:
    found = [data.get("sequence_number") for _, data in await _events(api, max_output_tokens=16)]
    expect(found == list(range(len(found))), f"expected 0, 1, 2, …, but got {found[:12]}")


ORDER = (
    "response.created", "response.in_progress", "response.output_item.added",
    "response.content_part.added", "response.output_text.delta", "response.output_text.done",
    "response.content_part.done", "response.output_item.done",
)  # fmt: skip


@check("responses.stream-order",
       "The events of a streamed Response have the documented order, and the last one ends the "
       "Response.",
       "must", "7")  # fmt: skip
async def stream_order(api: Api) -> None:
    found = [data["type"] for _, data in await _events(api, max_output_tokens=16)]
    found = [name for at, name in enumerate(found) if at == 0 or name != found[at - 1]]
    valid = tuple(found[:-1]) == ORDER
    expect(valid, f"expected {ORDER}, but got {found}")
    valid = found[-1] in ("response.completed", "response.incomplete")
    expect(valid, f"expected response.completed or .incomplete last, but got {found[-1]}")


@check("responses.stream-text",
       "The text deltas of a streamed Response join to the text of one that is not streamed.",
       "must", "7 10.29")  # fmt: skip
async def stream_text(api: Api) -> None:
    whole = text_of(await respond(api, max_output_tokens=16))
    events = await _events(api, max_output_tokens=16)
    deltas = [data for _, data in events if data["type"] == "response.output_text.delta"]
    joined = "".join(data["delta"] for data in deltas)
    done = only(
        [d["text"] for _, d in events if d["type"] == "response.output_text.done"],
        "output_text.done event",
    )
    expect(joined == whole == done, f"expected {whole!r}, but got {joined!r} and {done!r}")
    for data in deltas:
        missing = [n for n in ("item_id", "output_index", "content_index") if n not in data]
        expect(not missing, f"expected {missing} in a delta, but got {data}")


@check("responses.stream-usage",
       "The last event of a streamed Response has its output, and the same usage as one that is "
       "not streamed.",
       "must", "7")  # fmt: skip
async def stream_usage(api: Api) -> None:
    plain = (await respond(api, max_output_tokens=16))["usage"]
    last = (await _events(api, max_output_tokens=16))[-1][1]["response"]
    expect(last.get("output"), f"expected output in the last event, but got {str(last)[:200]}")
    counts = last.get("usage")
    expect(isinstance(counts, dict), f"expected usage, but got {counts!r}")
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        expect(
            counts[name] == plain[name], f"{name}: expected {plain[name]}, but got {counts[name]}"
        )


@check("responses.stream-type",
       "Every event of a streamed Response matches OpenAI's published type.",
       "must", "7 10.95")  # fmt: skip
async def stream_type(api: Api) -> None:
    for _name, data in await _events(api, max_output_tokens=16):
        wrong = event_problem(data)
        expect(
            wrong is None,
            f"expected OpenAI's published type, but {data.get('type')} fails at {wrong}",
        )


@check("responses.stream-call",
       "The argument deltas of a streamed function call join to its arguments.",
       "must", "7")  # fmt: skip
async def stream_call(api: Api) -> None:
    choice = {"type": "function", "name": "get_weather"}
    full = {"tools": [WEATHER], "tool_choice": choice, "max_output_tokens": 256}
    events = [data for _, data in await _events(api, "What is the weather?", **full)]
    if events[-1]["type"] == "response.incomplete":
        raise Skip("the model needs more than 256 tokens for the call")
    kind = "response.function_call_arguments"
    joined = "".join(data["delta"] for data in events if data["type"] == f"{kind}.delta")
    done = only(
        [data["arguments"] for data in events if data["type"] == f"{kind}.done"],
        f"{kind}.done event",
    )
    expect(joined == done, f"expected {done!r}, but got {joined!r}")
    expect(
        json.loads(done) in ({"city": "Paris"}, {"city": "Rome"}),
        f"expected a city, but got {done!r}",
    )


@check("responses.store", "Without store, a Response is stored, and can be retrieved and deleted.",
       "should", "7 [SPEC]")  # fmt: skip
async def store(api: Api) -> None:
    made = (await api.post(R, {"model": api.model, "input": "Hello",
                               "max_output_tokens": 16})).ok()  # fmt: skip
    if made.get("store") is False:
        raise Diverges("the Response has store false")
    found = (await api.get(f"{R}/{made['id']}")).ok()
    expect(
        text_of(found) == text_of(made), f"expected the stored Response, but got {str(found)[:200]}"
    )
    deleted = (await api.send("DELETE", f"{R}/{made['id']}")).ok()
    expect(deleted.get("deleted") is True, f"expected deleted true, but got {deleted}")
    (await api.get(f"{R}/{made['id']}")).error(404)


@check("responses.not-stored", "A Response with store false cannot be retrieved.", "should", "7")
async def not_stored(api: Api) -> None:
    made = await respond(api, "Hello", max_output_tokens=16)
    (await api.get(f"{R}/{made['id']}")).error(404)


@check("responses.previous",
       "With previous_response_id, the earlier input and output are part of the prompt.",
       "should", "7")  # fmt: skip
async def previous(api: Api) -> None:
    one = await respond(api, "Count to 7.", max_output_tokens=64, store=True)
    two = await respond(api, "Hello", max_output_tokens=16, previous_response_id=one["id"])
    alone = await respond(api, "Hello", max_output_tokens=16)
    counts = [body["usage"]["input_tokens"] for body in (alone, two)]
    expect(
        counts[1] > counts[0],
        f"expected more input tokens with an earlier Response, but got {counts}",
    )
    await api.send("DELETE", f"{R}/{one['id']}")


@check("responses.input-items", "The input items of a stored Response can be listed.",
       "should", "7")  # fmt: skip
async def input_items(api: Api) -> None:
    made = await respond(api, "Hello", max_output_tokens=16, store=True)
    found = (await api.get(f"{R}/{made['id']}/input_items")).ok()
    await api.send("DELETE", f"{R}/{made['id']}")
    item = only(found["data"], "input item")
    valid = item["role"] == "user" and item["content"][0]["text"] == "Hello"
    expect(valid, f"expected the input message, but got {item}")


@check("responses.input-tokens",
       "POST /responses/input_tokens returns the number of input tokens that a Response would use.",
       "should", "7 1.1")  # fmt: skip
async def input_tokens(api: Api) -> None:
    counted = (await api.post(f"{R}/input_tokens", {"model": api.model, "input": ASK})).ok()
    used = (await respond(api, max_output_tokens=16))["usage"]["input_tokens"]
    expect(counted["input_tokens"] == used, f"expected {used}, but got {counted}")


# Each row: the id, the invalid fields, statuses, level, the word that the error must contain.
WRONG: Sequence[tuple[str, Mapping[str, Any], Sequence[int], str, str]] = (
    ("temperature-above", {"temperature": 3}, [400], "must", "temperature"),
    ("input-number", {"input": 5}, [400], "must", "input"),
    ("limit-string", {"max_output_tokens": "many"}, [400], "must", "max_output_tokens"),
    ("model-unknown", {"model": "no-such-model-anywhere"}, [400, 404], "should", "model"),
    ("previous-unknown", {"previous_response_id": "resp_none"}, [400, 404], "should", "previous"),
)


def _rejected(changes: Mapping[str, Any], statuses: Sequence[int], word: str) -> Body:
    async def run(api: Api) -> None:
        await respond(api, "Hello", max_output_tokens=16)
        body = {"model": api.model, "input": "Hello", "max_output_tokens": 16, **changes}
        reply = await api.post(R, body)
        if reply.status == 200 and "model" in changes:
            raise Diverges("the server accepts every model name")
        error = reply.error(*statuses)
        expect(word in str(error), f"expected an error that names {word!r}, but got {error}")

    return run


for _name, _changes, _statuses, _level, _word in WRONG:
    _codes = " or ".join(map(str, _statuses))
    _promise = (
        f"A request to /responses with {json.dumps(_changes)} is rejected with a {_codes} error "
        f"that names {_word!r}."
    )
    check(f"responses.{_name}", _promise, _level, "7 1.2")(_rejected(_changes, _statuses, _word))  # type: ignore[arg-type]


@check("responses.unknown", "An unknown Response id returns 404.", "should", "7")
async def unknown(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    (await api.get(f"{R}/resp_none")).error(404)
