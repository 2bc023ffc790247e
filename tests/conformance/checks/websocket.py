"""Responses over a WebSocket (contract of responses over WebSocket)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

from httpx2 import Headers

from ..check import Body, Diverges, Fail, Skip, check, expect
from ..frames import ASK, ENDS, R, Rejected, opened, response_of
from ..published import event_problem
from ..raw import exchange
from ..target import Api, Reply
from .responses import WEATHER, stream, text_of
from .responses_connection import FORMAT

COUNT = "Count to 5."
# The first events of a response.
BEGINNING = ["response.created", "response.in_progress"]
# What Codex sends with its handshake.
CODEX = {"OpenAI-Beta": "responses_websockets=2026-02-06", "originator": "codex_cli_rs",
         "session-id": "01", "x-codex-turn-metadata": "{}"}  # fmt: skip
# Lanes with a name on one connection, and the lanes that a check lets generate.
LANES, BUSY = 32, 8
FULL = "websocket_stream_limit_reached"
# Bytes of a frame that every server of such frames takes.
LARGE = 20 << 20
# What belongs to one event, connection or run.
OWN = {"sequence_number", "obfuscation", "stream_id"}
# Seconds of silence after the end of a response.
SILENCE = 0.3
# The responses of which one must be stored: a busy server may say that one was not, in time.
TRIES = 3


def _types(events: Sequence[Any]) -> list[str]:
    return [event["type"] for event in events]


@check("websocket.handshake", "A handshake with the headers of Codex and its compression is "
       "accepted, and one without them.", "must", "W8.1 W8.2 [CODEX]")  # fmt: skip
async def handshake(api: Api) -> None:
    for headers in ({}, CODEX):
        async with opened(api, headers) as frames:
            await frames.respond()


@check("websocket.key", "A handshake with a wrong API key gets an HTTP 401 with an error object.",
       "must", "W8.1")  # fmt: skip
async def key(api: Api) -> None:
    if "authorization" not in api.client.headers:
        raise Skip("this check needs an API key: --api-key")
    try:
        async with opened(api, bearer="Bearer sk-wrong"):
            pass
    except Rejected as refused:
        expect(refused.status == 401, f"expected status 401, but got {refused.status}")
        reply = Reply(refused.status, Headers(), refused.body, R, {})
        reply.error(401)
        return
    raise Diverges("the server accepts any API key")


@check("websocket.events", "Each event is one text frame with an object of OpenAI's published "
       "type: created, in_progress, the items, the end.", "must", "W8.4")  # fmt: skip
async def events(api: Api) -> None:
    async with opened(api) as frames:
        await frames.create(COUNT)
        found = await frames.events()
    response_of(found)
    types = _types(found)
    expect(types[:2] == BEGINNING, f"expected {BEGINNING} first, but got {types[:2]}")
    for name in ("response.output_item.added", "response.output_text.delta",
                 "response.output_item.done"):  # fmt: skip
        expect(name in types, f"expected an event {name}, but got {types}")
    wrong = [f"{event['type']}: {event_problem(event)}" for event in found if event_problem(event)]
    expect(not wrong, f"expected events of the published types, but got {wrong[:1]}")


@check("websocket.sequence", "The events of each response are numbered from 0, one after another.",
       "must", "W8.4 W8.6")  # fmt: skip
async def sequence(api: Api) -> None:
    async with opened(api) as frames:
        for _ in range(2):
            await frames.create()
            found = [event.get("sequence_number") for event in await frames.events()]
            right = list(range(len(found)))
            expect(found == right, f"expected the numbers from 0, but got {found}")


def _told(events: Sequence[Any]) -> list[Any]:
    """Return events without what two runs do not share: their pieces, ids, times and caches."""
    names: dict[str, str] = {}

    def plain(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: plain(one, name) for name, one in value.items() if name not in OWN}
        if isinstance(value, list):
            return [*map(plain, value)]
        if key in ("cached_tokens", "cache_write_tokens"):
            return "a count" if type(value) is int and value >= 0 else value
        if key in ("id", "item_id", "call_id") and isinstance(value, str):
            return names.setdefault(value, f"{value.partition('_')[0]} {len(names)}")
        is_time = key in ("created_at", "completed_at") and type(value) is int
        return "a time" if is_time and value > 1_500_000_000 else value

    found: list[Any] = []
    for event in map(plain, events):
        last = found[-1] if found else {}
        if "delta" in event and {**last, "delta": ""} == {**event, "delta": ""}:
            last["delta"] += event["delta"]
        else:
            found.append(event)
    return found


def _same(given: str, **request: Any) -> Body:
    async def run(api: Api) -> None:
        full = {"max_output_tokens": 64, **ASK, **request}
        wanted = _told(await stream(api, given, **full))
        async with opened(api) as frames:
            await frames.create(given, **full)
            found = _told(await frames.events())
        for event, right in zip(found, wanted, strict=False):
            expect(event == right, f"expected {right}, but got {event}")
        expect(len(found) == len(wanted), f"expected {len(wanted)} events, but got {len(found)}")

    return run


check("websocket.same", "The events of a response are those of a stream by HTTP, with the same "
      "values.", "must", "W8.4")(_same("Count to 400.", instructions="Be brief.",
                                       max_output_tokens=16))  # fmt: skip
check("websocket.same-call", "The events of a function call are those of a stream by HTTP, with "
      "the same values.", "must", "W8.4")(_same("What is the weather?", tools=[WEATHER],
                                                tool_choice="required"))  # fmt: skip


@check("websocket.end", "Nothing follows the last event of a response: no [DONE], no comment.",
       "must", "W8.5")  # fmt: skip
async def end(api: Api) -> None:
    async with opened(api) as frames:
        await frames.respond()
        more = await frames.silent(SILENCE)
        expect(more is None, f"expected no frame after the end, but got {str(more)[:200]}")


@check("websocket.stream-field", "stream may be true, false or null; the response is a stream.",
       "must", "W8.7 [CODEX]")  # fmt: skip
async def stream_field(api: Api) -> None:
    async with opened(api) as frames:
        for value in (True, False, None):
            await frames.create(stream=value)
            found = await frames.events()
            response_of(found)
            expect(len(found) > 3, f"expected a stream with stream {value}, but got {found}")


@check("websocket.background", "background: true is a 400 error frame that names it, and the "
       "connection stays open.", "must", "W8.8")  # fmt: skip
async def background(api: Api) -> None:
    async with opened(api) as frames:
        await frames.create(background=True)
        error = await frames.error("unsupported_parameter")
        expect("background" in error["message"], f"expected the field's name, but got {error}")
        await frames.respond()


@check("websocket.warm-up", "generate: false ends with response.completed, without output and "
       "output tokens, at any time.", "must", "W8.9 W8.11 [CODEX]")  # fmt: skip
async def warm_up(api: Api) -> None:
    async with opened(api) as frames:
        for _ in range(2):
            made = await frames.respond(COUNT, generate=False)
            usage = made["usage"]
            got = (made["status"], made["output"], usage["output_tokens"])
            expect(got == ("completed", [], 0), f"expected a completed warm-up, but got {got}")
            expect(usage["input_tokens"] > 0, f"expected input tokens, but got {usage}")
            await frames.respond()


@check("websocket.warm-up-continued", "A warm-up is continued with an empty input, and answers as "
       "if it had been sent at once.", "must", "W8.10 [PROBE]")  # fmt: skip
async def warm_up_continued(api: Api) -> None:
    async with opened(api) as frames:
        expected = text_of(await frames.respond(COUNT))
        warm = await frames.respond(COUNT, generate=False)
        made = await frames.respond([], previous_response_id=warm["id"])
        got = text_of(made)
        expect(got == expected, f"expected {expected!r}, but got {got!r}")


@check("websocket.continue", "A response that is not stored can be continued on its connection, "
       "with the new items only.", "must", "W8.12")  # fmt: skip
async def continued(api: Api) -> None:
    async with opened(api) as frames:
        first = await frames.respond(COUNT)
        alone = await frames.respond("And now?")
        first = await frames.respond(COUNT)
        second = await frames.respond("And now?", previous_response_id=first["id"])
        counts = [one["usage"]["input_tokens"] for one in (first, alone, second)]
        told = second.get("previous_response_id") == first["id"]
        expect(told, f"expected previous_response_id, but got {str(second)[:200]}")
        right = counts[2] > max(counts[0], counts[1])
        expect(right, f"expected more input tokens than {counts[:2]}, but got {counts[2]}")


@check("websocket.new-connection", "A response that is not stored is not found on another "
       "connection.", "must", "W8.13")  # fmt: skip
async def new_connection(api: Api) -> None:
    async with opened(api) as frames:
        made = await frames.respond()
    async with opened(api) as frames:
        await frames.create(previous_response_id=made["id"])
        error = await frames.error("previous_response_not_found")
        right = error.get("param") == "previous_response_id" and made["id"] in error["message"]
        expect(right, f"expected an error that names the response, but got {error}")


@check("websocket.stored", "A stored response can be continued on another connection, and "
       "retrieved by HTTP.", "must", "W8.14")  # fmt: skip
async def stored(api: Api) -> None:
    async with opened(api) as frames:
        for _ in range(TRIES):
            made = await frames.respond(store=True)
            if made.get("store") is not False:
                break
        else:
            raise Skip("the response has store false")
    try:
        status = (await api.get(f"{R}/{made['id']}")).status
        expect(status == 200, f"expected the stored response, but got status {status}")
        async with opened(api) as frames:
            await frames.respond("And now?", previous_response_id=made["id"])
    finally:
        await api.send("DELETE", f"{R}/{made['id']}")


@check("websocket.older", "Only the latest response of a lane can be continued, unless it is "
       "stored.", "must", "W8.15")  # fmt: skip
async def older(api: Api) -> None:
    async with opened(api) as frames:
        first = await frames.respond()
        await frames.respond(COUNT)
        await frames.create(previous_response_id=first["id"])
        await frames.error("previous_response_not_found")


@check("websocket.not-inherited", "instructions and tools are not inherited.",
       "must", "W8.16")  # fmt: skip
async def not_inherited(api: Api) -> None:
    async with opened(api) as frames:
        plain = await frames.respond("Hello", instructions="Be brief. " * 8)
        more = await frames.respond("Hello", previous_response_id=plain["id"])
        got = (more.get("instructions"), more.get("tools"))
        expect(got == (None, []), f"expected no instructions and tools, but got {got}")
        counts = [one["usage"]["input_tokens"] for one in (plain, more)]
        expect(counts[1] < counts[0] + 16, f"expected no instructions, but got {counts} tokens")


@check("websocket.call", "A call is answered with its output as the only item of the input.",
       "must", "W8.17")  # fmt: skip
async def call(api: Api) -> None:
    body: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": 64}
    async with opened(api) as frames:
        made = await frames.respond("What is the weather in Paris?", tool_choice="required", **body)
        calls = [item for item in made["output"] if item["type"] == "function_call"]
        expect(calls, f"expected a call, but got {str(made['output'])[:200]}")
        output = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "Warm."}
        await frames.respond([output], previous_response_id=made["id"], tool_choice="none", **body)


@check("websocket.evicted", "A continuation that fails makes its response unknown; one that fails "
       "on another lane does not.", "must", "W8.18")  # fmt: skip
async def evicted(api: Api) -> None:
    async with opened(api) as frames:
        made = await frames.respond()
        parent = {"previous_response_id": made["id"]}
        await frames.create(stream_id="fork", temperature=5, **parent)
        await frames.error(None)
        made = await frames.respond(**parent)
        parent = {"previous_response_id": made["id"]}
        await frames.create(temperature=5, **parent)
        await frames.error(None)
        await frames.create(**parent)
        await frames.error("previous_response_not_found")


@check("websocket.fork", "The latest response of a lane can be continued on another one.",
       "must", "W8.18")  # fmt: skip
async def fork(api: Api) -> None:
    async with opened(api) as frames:
        made = await frames.respond(COUNT)
        more = await frames.respond("And?", previous_response_id=made["id"], stream_id="fork")
        counts = [one["usage"]["input_tokens"] for one in (made, more)]
        expect(counts[1] > counts[0], f"expected more than {counts[0]} tokens, but got {counts[1]}")


@check("websocket.lane", "Every event and every error of a lane has its stream_id, and no other "
       "event has one.", "must", "W8.19")  # fmt: skip
async def lane(api: Api) -> None:
    async with opened(api) as frames:
        for name in ("a.B-1_", None):
            given = {} if name is None else {"stream_id": name}
            await frames.create(**given)
            found = {event.get("stream_id", None) for event in await frames.events()}
            expect(found == {name}, f"expected the stream_id {name}, but got {found}")
            await frames.create(temperature=5, **given)
            error = await frames.error(None)
            got = error["stream_id"]
            expect(got == name, f"expected the stream_id {name} in the error, but got {got}")


@check("websocket.wrong-lane", "A stream_id that is not valid is rejected with invalid_stream_id.",
       "must", "W8.20")  # fmt: skip
async def wrong_lane(api: Api) -> None:
    async with opened(api) as frames:
        for name in ("", "a" * 257, "a b"):
            await frames.create(stream_id=name)
            await frames.error("invalid_stream_id")


@check("websocket.many-lanes", "A connection has 32 lanes with a name; another one is rejected, "
       "and the others go on.", "must", "W8.21")  # fmt: skip
async def many_lanes(api: Api) -> None:
    async with opened(api) as frames:
        for number in range(LANES):
            # A short rejection uses a lane, too.
            await frames.create(stream_id=f"l{number}", temperature=5)
            told = (await frames.error(None)).get("code")
            expect(told != FULL, f"expected {LANES} lanes, but got {number}")
        await frames.create(stream_id="more")
        await frames.error(FULL)
        await frames.respond(stream_id="l0")


@check("websocket.order", "Responses of one lane follow one another, and those of two lanes both "
       "end.", "must", "W8.22")  # fmt: skip
async def order(api: Api) -> None:
    async with opened(api) as frames:
        for _ in range(2):
            await frames.create(COUNT)
        groups = [await frames.events() for _ in range(2)]
        ids = [sorted({one["response"]["id"] for one in group if "response" in one})
               for group in groups]  # fmt: skip
        right = [*map(len, ids)] == [1, 1] and ids[0] != ids[1]
        expect(right, f"expected one response after the other, but got the events of {ids}")
        for name in ("one", "two"):
            await frames.create(COUNT, stream_id=name)
        ended: set[str | None] = set()
        while len(ended) < 2:
            event = await frames.next()
            if event["type"] in ENDS:
                ended.add(event.get("stream_id"))
        expect(ended == {"one", "two"}, f"expected the ends of both lanes, but got {ended}")


@check("websocket.broken", "A frame that is no JSON object, is binary or has an unknown type gets "
       "a 400 error frame, and the connection stays open.", "must", "W8.23")  # fmt: skip
async def broken(api: Api) -> None:
    async with opened(api) as frames:
        wrong = ("{", "[]", b"{}", "{}", json.dumps({"type": "no.such.type"}))
        for frame in wrong:
            await frames.send(frame)
            await frames.error(None)
        await frames.respond()


@check("websocket.rejected", "A request that is not valid gets an error frame with its status, and "
       "the type, the code and the param of HTTP, and the connection stays open.",
       "must", "W8.24")  # fmt: skip
async def rejected(api: Api) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"model": "no-such-model-anywhere"},
        {"temperature": "warm"},
        {"input": []},
    )
    async with opened(api) as frames:
        for fields in wrong:
            body = {"model": api.model, "input": "Hello", "max_output_tokens": 16, **fields}
            reply = await api.post(R, body)
            told = reply.error(400, 404)
            await frames.send({"type": "response.create", **ASK, **body})
            error = await frames.error(told["code"], reply.status)
            for name in ("type", "code", "param"):
                same = error.get(name, "nothing") == told[name]
                expect(same, f"{name}: expected {told[name]!r} as by HTTP, but got {error}")
        await frames.respond()


@check("websocket.context", "An input that is longer than the context gets an error frame with "
       "context_length_exceeded.", "must", "W8.24", seconds=60)  # fmt: skip
async def context(api: Api) -> None:
    async with opened(api) as frames:
        await frames.create("hello " * 400_000)
        await frames.error("context_length_exceeded")
        await frames.respond()


@check("websocket.silent", "response.processed gets no answer.", "must", "W8.25 [CODEX]")
async def silent(api: Api) -> None:
    async with opened(api) as frames:
        made = await frames.respond()
        await frames.send({"type": "response.processed", "response_id": made["id"]})
        more = await frames.silent(SILENCE)
        expect(more is None, f"expected no answer, but got {str(more)[:200]}")


@check("websocket.steer", "response.steer is accepted, or fails with response.steer.failed.",
       "must", "W8.25")  # fmt: skip
async def steer(api: Api) -> None:
    async with opened(api) as frames:
        made = await frames.respond()
        await frames.send({"type": "response.steer", "previous_response_id": made["id"],
                           "input": "Faster."})  # fmt: skip
        got = (await frames.next()).get("type")
        known = got in ("response.steer.failed", "response.steer.accepted")
        expect(known, f"expected response.steer.failed, but got {got}")


@check("websocket.disconnect", "When the client closes the connection, its responses end.",
       "must", "W8.26", alone=True)  # fmt: skip
async def disconnect(api: Api) -> None:
    one = {"model": api.model, "input": "Hello", "max_output_tokens": 16, **ASK}
    (await api.post(R, one)).ok()
    start = time.monotonic()
    await exchange(api, "POST", R, one)
    idle = time.monotonic() - start
    async with opened(api) as frames:
        for number in range(BUSY):
            await frames.create("Count to 1000.", max_output_tokens=1500, text={"format": FORMAT},
                                stream_id=f"l{number}")  # fmt: skip
        await frames.next()
    await asyncio.sleep(1.5)
    start = time.monotonic()
    await exchange(api, "POST", R, one)
    took = time.monotonic() - start
    expect(
        took < idle + 1.0,
        f"expected the next answer after {idle:.2f} s, but got it after {took:.2f} s",
    )


@check("websocket.large", "A frame of 20 MiB is read; the connection stays open.",
       "should", "W8.27", seconds=60)  # fmt: skip
async def large(api: Api) -> None:
    async with opened(api) as frames:
        await frames.create("Hello", metadata={"long": "x" * LARGE})
        try:
            await frames.error(None)
        except Fail as wrong:
            raise Diverges(f"a frame of 20 MiB is not read: {wrong}") from None
        await frames.respond()
