"""Streamed responses: the order of the events, and what each contains (contract of responses 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai._models import construct_type_unchecked
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent

from ..check import Diverges, Fail, Skip, check, expect
from ..target import Api, only
from .responses import (
    WEATHER,
    R,
    message_of,
    named_events,
    of_type,
    respond,
    stream,
    text_of,
)

# The events that have a whole Response.
WHOLE = ("created", "in_progress", "completed", "incomplete", "failed", "queued")
LAST = ("response.completed", "response.incomplete", "response.failed")
# The keys of a Response that differ from one run to the next.
OWN = ("id", "created_at", "completed_at", "output", "usage")


@check("responses.stream-names", "In a streamed Response, the name of each event is its type.",
       "must", "7")  # fmt: skip
async def stream_names(api: Api) -> None:
    for name, data in await named_events(api, max_output_tokens=16):
        expect(name == data.get("type"), f"expected event {data.get('type')!r}, but got {name!r}")


@check("responses.stream-numbers",
       "In a streamed Response, sequence_number counts the events from 0.",
       "must", "7")  # fmt: skip
async def stream_numbers(api: Api) -> None:
    found = [data.get("sequence_number") for data in await stream(api, max_output_tokens=16)]
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
    found = [data["type"] for data in await stream(api, max_output_tokens=16)]
    found = [name for at, name in enumerate(found) if at == 0 or name != found[at - 1]]
    valid = tuple(found[:-1]) == ORDER
    expect(valid, f"expected {ORDER}, but got {found}")
    valid = found[-1] in ("response.completed", "response.incomplete")
    expect(valid, f"expected response.completed or .incomplete last, but got {found[-1]}")


@check("responses.stream-head",
       "A streamed Response begins with response.created and response.in_progress, whose output "
       "is empty, and has one last event.",
       "must", "R5.3 R10.6")  # fmt: skip
async def stream_head(api: Api) -> None:
    events = await stream(api, max_output_tokens=16)
    found = [event["type"] for event in events]
    head = ["response.created", "response.in_progress"]
    expect(found[:2] == head, f"expected {head} first, but got {found[:2]}")
    for event in events[:2]:
        response = event["response"]
        empty = (response["output"], response["status"]) == ([], "in_progress")
        expect(empty, f"expected no output and in_progress, but got {str(response)[:200]}")
    ends = [name for name in found if name in LAST]
    expect(len(ends) == 1, f"expected one last event, but got {ends}")
    expect(found[-1] == ends[0], f"expected nothing after {ends[0]}, but got {found[-1]}")


@check("responses.stream-usage-null", "The usage of a Response that is in progress is null.",
       "must", "R6 R10.11")  # fmt: skip
async def stream_usage_null(api: Api) -> None:
    for event in (await stream(api, max_output_tokens=16))[:2]:
        usage = event["response"]["usage"]
        expect(usage is None, f"expected null for usage in {event['type']}, but got {usage}")


@check("responses.stream-text",
       "The text deltas of a streamed Response join to the text of one that is not streamed.",
       "must", "7 10.29")  # fmt: skip
async def stream_text(api: Api) -> None:
    whole = text_of(await respond(api, max_output_tokens=16))
    events = await stream(api, max_output_tokens=16)
    deltas = [data for data in events if data["type"] == "response.output_text.delta"]
    joined = "".join(data["delta"] for data in deltas)
    done = only(
        [d["text"] for d in events if d["type"] == "response.output_text.done"],
        "output_text.done event",
    )
    expect(joined == whole == done, f"expected {whole!r}, but got {joined!r} and {done!r}")
    for data in deltas:
        missing = [n for n in ("item_id", "output_index", "content_index") if n not in data]
        expect(not missing, f"expected {missing} in a delta, but got {data}")


@check("responses.stream-places",
       "Every event of a text names its place: the id and the index of its item, and of its part.",
       "must", "R5.2 R10.7 [lemonade#3607]")  # fmt: skip
async def stream_places(api: Api) -> None:
    events = await stream(api, max_output_tokens=16)
    added = only(of_type(events, "output_item.added"), "output_item.added event")
    done = only(of_type(events, "output_item.done"), "output_item.done event")
    final = message_of(events[-1]["response"])
    ids = [added["item"]["id"], done["item"]["id"], final["id"]]
    expect(len(set(ids)) == 1, f"expected one id of the item, but got {ids}")
    place = {"item_id": ids[0], "output_index": 0, "content_index": 0}
    for event in events:
        if "output_text" in event["type"] or "content_part" in event["type"]:
            found = {name: event.get(name) for name in place}
            expect(found == place, f"{event['type']}: expected {place}, but got {found}")
    for event in (added, done):
        expect(event["output_index"] == 0, f"expected output_index 0, but got {event}")


@check("responses.stream-agree",
       "The deltas of a streamed text, its done event, its part, its item and the last Response "
       "agree.",
       "must", "R5.3 R10.8")  # fmt: skip
async def stream_agree(api: Api) -> None:
    events = await stream(api, max_output_tokens=16)
    part = only(of_type(events, "content_part.done"), "content_part.done event")["part"]
    item = only(of_type(events, "output_item.done"), "output_item.done event")["item"]
    found = [
        "".join(event["delta"] for event in of_type(events, "output_text.delta")),
        only(of_type(events, "output_text.done"), "output_text.done event")["text"],
        part["text"],
        "".join(one["text"] for one in item["content"]),
        text_of(events[-1]["response"]),
    ]
    expect(len(set(found)) == 1, f"expected the same text five times, but got {found}")
    expect(item == message_of(events[-1]["response"]), f"expected the same item, but got {item}")


@check("responses.stream-parts",
       "Each part and each text event of a stream has its lists: annotations, logprobs.",
       "must", "R5.2 R10.3 [LM Studio#1089]")  # fmt: skip
async def stream_parts(api: Api) -> None:
    events = await stream(api, max_output_tokens=16)
    for event in events:
        if "content_part" in event["type"]:
            lists = [event["part"].get(name) for name in ("annotations", "logprobs")]
            expect(lists == [[], []], f"expected two empty lists, but got {event}")
        if "output_text" in event["type"]:
            found = event.get("logprobs")
            expect(found == [], f"expected empty logprobs in {event['type']}, but got {found!r}")


@check("responses.stream-usage",
       "The last event of a streamed Response has its output, and the same usage as one that is "
       "not streamed.",
       "must", "7")  # fmt: skip
async def stream_usage(api: Api) -> None:
    plain = (await respond(api, max_output_tokens=16))["usage"]
    last = (await stream(api, max_output_tokens=16))[-1]["response"]
    expect(last.get("output"), f"expected output in the last event, but got {str(last)[:200]}")
    counts = last.get("usage")
    expect(isinstance(counts, dict), f"expected usage, but got {counts!r}")
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        expect(
            counts[name] == plain[name], f"{name}: expected {plain[name]}, but got {counts[name]}"
        )


def _timeless(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Response without what differs from run to run; ids become the item's type."""
    output = [{**item, "id": item["type"]} for item in body["output"]]
    return {**{name: value for name, value in body.items() if name not in OWN}, "output": output}


@check("responses.stream-same",
       "The last event of a stream has the Response that is returned without a stream.",
       "must", "R5.1 R10.4")  # fmt: skip
async def stream_same(api: Api) -> None:
    whole = _timeless(await respond(api, max_output_tokens=16))
    last = (await stream(api, max_output_tokens=16))[-1]
    kind = f"response.{whole['status']}"
    expect(last["type"] == kind, f"expected {kind} last, but got {last['type']}")
    found = _timeless(last["response"])
    wrong = {name: found.get(name) for name in whole if found.get(name) != whole[name]}
    wanted = {name: whole[name] for name in wrong}
    expect(not wrong, f"expected {wanted}, but got {wrong}")


@check("responses.stream-incomplete",
       "A stream that the limit cuts off has all done events with the cut text, an incomplete item "
       "and response.incomplete.",
       "must", "R5.3 R10.18 [DD]")  # fmt: skip
async def stream_incomplete(api: Api) -> None:
    events = await stream(api, "Count to 400.", max_output_tokens=16)
    kinds = ["response.output_text.done", "response.content_part.done",
             "response.output_item.done", "response.incomplete"]  # fmt: skip
    found = [event["type"] for event in events[-4:]]
    expect(found == kinds, f"expected {kinds} last, but got {found}")
    text = "".join(event["delta"] for event in of_type(events, "output_text.delta"))
    cut = [events[-4]["text"], events[-3]["part"]["text"]]
    expect(cut == [text, text], f"expected {text!r} in the done events, but got {cut}")
    status = events[-2]["item"]["status"]
    expect(status == "incomplete", f"expected an incomplete item, but got {status!r}")
    last = events[-1]["response"]
    details = {"reason": "max_output_tokens"}
    valid = last["status"] == "incomplete" and last["incomplete_details"] == details
    expect(valid and last["usage"], f"expected the reason and usage, but got {str(last)[:300]}")


@check("responses.stream-type",
       "Every event of a streamed Response of the run matches OpenAI's published type.",
       "must", "7 10.95 R10.1", alone=True)  # fmt: skip
async def stream_type(api: Api) -> None:
    await stream(api, max_output_tokens=16)
    wrong = api.wrong.get(f"stream of {R}")
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")


@check("responses.stream-error",
       "An invalid request to /responses with stream true is rejected with JSON, not with events.",
       "must", "R5.3 R10.26 [PYD]")  # fmt: skip
async def stream_error(api: Api) -> None:
    await respond(api, max_output_tokens=16)
    body = {"model": api.model, "input": 5, "stream": True}
    reply = await api.post(R, body)
    reply.error(400)
    kind = reply.kind
    expect(kind == "application/json", f"expected JSON, but got {kind!r}")


@check("responses.obfuscation",
       "The deltas of a streamed Response are padded if include_obfuscation is true, and only "
       "then.",
       "should", "R2.1 R10.55")  # fmt: skip
async def obfuscation(api: Api) -> None:
    for asked in (True, False):
        options = {"include_obfuscation": asked}
        events = await stream(api, max_output_tokens=16, stream_options=options)
        deltas = of_type(events, "output_text.delta")
        given = [event.get("obfuscation") or "" for event in deltas]
        padded = {isinstance(padding, str) and padding != "" for padding in given}
        expect(
            padded == {asked},
            f"{options}: expected {'text' if asked else 'nothing'} as "
            f"obfuscation of each delta, but got {given}",
        )
    deltas = of_type(await stream(api, max_output_tokens=16), "output_text.delta")
    if any(event.get("obfuscation") for event in deltas):
        raise Diverges("the deltas are padded by default")


def accumulated(events: Sequence[Any]) -> Any:
    """Return the Response that the openai SDK makes of a stream."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    made: list[Any] = []
    for event in events:
        typed: Any = construct_type_unchecked(type_=ResponseStreamEvent, value=event)  # type: ignore[arg-type]
        try:
            made += state.handle_event(typed)
        except (AssertionError, RuntimeError, LookupError, AttributeError, TypeError) as error:
            raise Fail(
                f"expected events for the SDK, but {event['type']} gives {error!r}"
            ) from None
    last = made[-1]
    if last.type == "response.incomplete":
        raise Skip("the model needs more tokens for the answer")
    expect(last.type == "response.completed", f"expected a completed Response, but got {last.type}")
    return last.response


@check("responses.accumulator", "The openai SDK makes the text of a stream.",
       "must", "R5.5 R10.9 [SDK]")  # fmt: skip
async def accumulator(api: Api) -> None:
    events = await stream(api, max_output_tokens=400)
    response = accumulated(events)
    text = "".join(event["delta"] for event in of_type(events, "output_text.delta"))
    expect(response.output_text == text, f"expected {text!r}, but got {response.output_text!r}")


@check("responses.accumulator-call", "The openai SDK makes the call of a stream.",
       "must", "R5.5 R10.9 [SDK]")  # fmt: skip
async def accumulator_call(api: Api) -> None:
    choice = {"type": "function", "name": "get_weather"}
    full = {"tools": [WEATHER], "tool_choice": choice, "max_output_tokens": 256}
    events = await stream(api, "What is the weather?", **full)
    calls = [item for item in accumulated(events).output if item.type == "function_call"]
    done = only(of_type(events, "function_call_arguments.done"), "arguments.done event")
    found = [call.arguments for call in calls]
    expect(found == [done["arguments"]], f"expected {done['arguments']!r}, but got {found}")
