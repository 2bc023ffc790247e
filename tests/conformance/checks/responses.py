"""The Response object of `POST /responses` (contract 7; contract of responses 3, 4 and 6).

The checks of streams, tools, state and others are in the modules `responses_*`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .. import raw
from ..check import Fail, Skip, check, expect
from ..published import event_problem
from ..target import Api, Reply, expect_seconds, only
from .tools import one_of

R = "/responses"
ASK = "Count to 12."
KEYS = (
    "id", "object", "created_at", "error", "incomplete_details", "instructions", "model", "tools",
    "output", "parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p",
)  # fmt: skip
# The values of a Response whose request does not name the field.
DEFAULTS: Mapping[str, Any] = {
    "background": False, "frequency_penalty": 0, "presence_penalty": 0, "instructions": None,
    "max_tool_calls": None, "parallel_tool_calls": True, "previous_response_id": None,
    "prompt_cache_key": None, "safety_identifier": None, "tools": [], "tool_choice": "auto",
    "top_logprobs": 0, "truncation": "disabled", "metadata": {}, "error": None,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
}  # fmt: skip
# The other keys of a Response.
OTHERS = (
    "id", "object", "created_at", "status", "completed_at", "incomplete_details",
    "max_output_tokens", "model", "output", "reasoning", "service_tier", "store", "temperature",
    "top_p", "usage",
)  # fmt: skip
NUMBERS = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "top_logprobs")
WEATHER = {"type": "function", "name": "get_weather", "strict": True,
           "parameters": one_of(city=("Paris", "Rome"))}  # fmt: skip


async def respond(api: Api, given: Any = ASK, **body: Any) -> Any:
    """Return the body of a response that the server must support; the response is not stored."""
    full = {"model": api.model, "input": given, "store": False, "temperature": 0, **body}
    return (await api.post(R, full)).ok()


async def size(api: Api, given: Any = ASK, **body: Any) -> int:
    """Return the number of input tokens of a short response."""
    made = await respond(api, given, **{"max_output_tokens": 16, **body})
    count = made["usage"]["input_tokens"]
    assert isinstance(count, int)
    return count


def items_in(body: Any, kind: str) -> list[Any]:
    """Return the output items of one type."""
    return [item for item in body["output"] if item["type"] == kind]


def message_of(body: Any) -> Any:
    """Return the only message of a response; raise `Skip` if all its tokens are reasoning."""
    found = items_in(body, "message")
    if not found and body["status"] == "incomplete" and items_in(body, "reasoning"):
        raise Skip("the limit of tokens ends the answer before its text")
    return only(found, "message")


def text_of(body: Any) -> str:
    """Return the text of a response's only message."""
    return "".join(part["text"] for part in message_of(body)["content"])


def whole(body: Any, limit: int) -> Any:
    """Return a response; raise `Skip` if it reached a limit."""
    if body["status"] == "incomplete":
        raise Skip(f"the model needs more than {limit} tokens for the answer")
    return body


async def named_events(api: Api, given: Any = ASK, **body: Any) -> list[tuple[str, Any]]:
    """Return the name and the data of each event of a streamed response."""
    full = {"model": api.model, "input": given, "store": False, "temperature": 0, "stream": True,
            **body}  # fmt: skip
    reply = await api.send("POST", R, json.dumps(full).encode(), sent=full)
    if reply.status != 200:
        reply.ok()
    return parsed(api, reply)


async def stream(api: Api, given: Any = ASK, **body: Any) -> list[Any]:
    """Return the data of each event of a streamed response."""
    return [data for _name, data in await named_events(api, given, **body)]


def parsed(api: Api, reply: Reply) -> list[tuple[str, Any]]:
    """Return the name and the data of each event of a reply, and note a wrong type."""
    kind = reply.kind
    expect(kind == "text/event-stream", f"expected an event stream, but got {kind!r}")
    found = events_in(reply.text)
    expect(found, f"expected events, but got {reply.text[:200]!r}")
    for _name, data in found:
        wrong = event_problem(data)
        if wrong is not None:
            api.note(f"stream of {R}", f"{data.get('type')}: {wrong}")
    return found


def events_in(text: str) -> list[tuple[str, Any]]:
    """Return the name and the data of each event in the text of a stream."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = dict(_field(line) for line in block.split("\n"))
        data = lines.get("data")
        if data is None or data == "[DONE]":
            continue
        try:
            found.append((lines.get("event", ""), json.loads(data)))
        except ValueError:
            raise Fail(f"expected JSON in an event, but got {data[:200]}") from None
    return found


def _field(line: str) -> tuple[str, str]:
    """Return the name and the value of a line of a stream; a comment has no name."""
    name, _, value = line.partition(":")
    return name, value.removeprefix(" ")


async def event_on(reader: asyncio.StreamReader, *kinds: str) -> Any:
    """Return the first event of some types on a bare socket, as soon as all of it has arrived."""
    data = b""
    while True:
        whole = b""
        if b"\r\n\r\n" in data:
            whole = raw.parsed(data).body.replace(b"\r\n", b"\n").rpartition(b"\n\n")[0]
        for _name, event in events_in(whole.decode(errors="replace")):
            if event.get("type") in kinds:
                return event
        read = await reader.read(65536)
        expect(read, f"expected {' or '.join(kinds)}, but got {data[-300:]!r}")
        data += read


def of_type(events: Sequence[Any], kind: str) -> list[Any]:
    """Return the events of one type, which is given without `response.`."""
    return [event for event in events if event["type"] == f"response.{kind}"]


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


@check("responses.all-keys",
       "A Response has every key of OpenAI's, null or empty where there is no value.",
       "must", "R3 R10.2")  # fmt: skip
async def all_keys(api: Api) -> None:
    body = await respond(api, max_output_tokens=16)
    missing = sorted({*DEFAULTS, *OTHERS} - body.keys())
    expect(not missing, f"expected {missing} in the Response, but got {sorted(body)}")


@check("responses.defaults",
       "A Response has OpenAI's default for each field that the request does not name.",
       "must", "R3 R10.2")  # fmt: skip
async def defaults(api: Api) -> None:
    body = await respond(api, max_output_tokens=16)
    wrong = {name: body[name] for name, value in DEFAULTS.items() if body[name] != value}
    wanted = {name: DEFAULTS[name] for name in wrong}
    expect(not wrong, f"expected {wanted}, but got {wrong}")
    reasoning = body["reasoning"]
    valid = isinstance(reasoning, dict) and {"effort", "summary"} <= reasoning.keys()
    expect(valid, f"expected effort and summary in reasoning, but got {reasoning!r}")


@check("responses.numbers",
       "created_at is an integer, and the numbers of a Response are never null.",
       "must", "R3 R10.2 [litellm]")  # fmt: skip
async def numbers(api: Api) -> None:
    full = {"model": api.model, "input": ASK, "store": False, "max_output_tokens": 16}
    body = (await api.post(R, full)).ok()
    expect_seconds(body["created_at"])
    wrong = {name: body[name] for name in NUMBERS if type(body[name]) not in (int, float)}
    expect(not wrong, f"expected numbers, but got {wrong}")


@check("responses.type", "Every Response of the run matches OpenAI's published type.",
       "must", "7 10.95 R10.1", alone=True)  # fmt: skip
async def kind(api: Api) -> None:
    await respond(api, max_output_tokens=16)
    wrong = api.wrong.get(R)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")


@check("responses.message",
       "The output of a Response has one message of the assistant with one output_text part.",
       "must", "7")  # fmt: skip
async def message(api: Api) -> None:
    item = message_of(await respond(api, max_output_tokens=64))
    valid = item["role"] == "assistant" and item["id"].startswith("msg_")
    valid = valid and item["status"] in ("completed", "incomplete")
    expect(valid, f"expected the role assistant, msg_… and a status, but got {str(item)[:200]}")
    part = only(item["content"], "content part")
    valid = part["type"] == "output_text" and isinstance(part["text"], str)
    expect(valid, f"expected output_text, but got {part}")
    empty = [part.get(name) for name in ("annotations", "logprobs")]
    expect(empty == [[], []], f"expected empty annotations and logprobs, but got {part}")


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


@check("responses.usage-details",
       "The details of a Response's usage count cached, written and reasoning tokens.",
       "must", "R6 R10.10 [llama.cpp#22659]")  # fmt: skip
async def usage_details(api: Api) -> None:
    counts = (await respond(api, max_output_tokens=16))["usage"]
    given, made = counts["input_tokens_details"], counts["output_tokens_details"]
    found = [given.get("cached_tokens"), given.get("cache_write_tokens"),
             made.get("reasoning_tokens")]  # fmt: skip
    expect(all(type(one) is int for one in found), f"expected three counts, but got {counts}")


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


@check("responses.incomplete-item",
       "The item that max_output_tokens cuts off has the status incomplete.",
       "must", "R4 R10.18")  # fmt: skip
async def incomplete_item(api: Api) -> None:
    body = await respond(api, "Count to 400.", max_output_tokens=16)
    expect(body["status"] == "incomplete", f"expected incomplete, but got {body['status']!r}")
    found = [item.get("status") for item in body["output"]]
    expect(found[-1:] == ["incomplete"], f"expected the last item incomplete, but got {found}")


@check("responses.metadata", "A Response repeats the metadata of its request, also if not stored.",
       "should", "R2.1 R10.54")  # fmt: skip
async def metadata(api: Api) -> None:
    body = await respond(api, max_output_tokens=16, metadata={"colour": "blue"})
    found = body.get("metadata")
    expect(found == {"colour": "blue"}, f"expected the metadata, but got {found!r}")
