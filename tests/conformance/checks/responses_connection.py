"""Connections of `/responses`: WebSockets, clients that leave, engines that die (contract of
responses 1 and 5.4)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ..check import Diverges, Fail, Skip, check, expect
from ..raw import connected, exchange, parsed
from ..target import Api
from .engine import ENDS, answers, end_engine
from .responses import R, event_on, events_in, respond

# A format with a long answer, also from a model that is brief.
LETTERS = {"type": "array", "minItems": 400, "maxItems": 400, "items": {"enum": ["a", "b"]}}
FORMAT = {
    "type": "json_schema", "name": "letters", "strict": True,
    "schema": {"type": "object", "properties": {"letters": LETTERS}, "required": ["letters"],
               "additionalProperties": False},
}  # fmt: skip
UPGRADE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}  # fmt: skip


def _long(api: Api) -> dict[str, Any]:
    return {"model": api.model, "input": "Count to 1000.", "max_output_tokens": 1500,
            "temperature": 0, "stream": True, "text": {"format": FORMAT}}  # fmt: skip


@check("responses.websocket",
       "A WebSocket at /responses is served, or refused with 426, so that clients use HTTP.",
       "must", "R1 R10.52 [CODEX]")  # fmt: skip
async def websocket(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    async with connected(api, "GET", R, b"", headers=UPGRADE) as (reader, _writer):
        line = (await reader.readline()).decode("latin-1")
    status = int(line.split()[1])
    if status in (400, 403, 404, 405):
        raise Diverges(f"the server refuses the WebSocket with {status} instead of 426")
    expect(status in (101, 426), f"expected status 101 or 426, but got {status}")


@check("responses.compact",
       "POST /responses/compact is served, or refused with a 404 error that names the path.",
       "must", "R1 R10.52")  # fmt: skip
async def compact(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    reply = await api.post(f"{R}/compact", {"model": api.model, "input": "Hello"})
    if reply.status == 200:
        kind = reply.json().get("object")
        expect(kind == "response.compaction", f"expected a compaction, but got {kind!r}")
        return
    error = reply.error(404)
    expect("compact" in error["message"], f"expected an error that names compact, but got {error}")


@check("responses.disconnect",
       "When the client of a stream disconnects, generation ends, and the Response is not stored.",
       "must", "R5.1 R10.51", alone=True)  # fmt: skip
async def disconnect(api: Api) -> None:
    one = {"model": api.model, "input": "Hello", "max_output_tokens": 16, "store": False}
    (await api.post(R, one)).ok()
    start = time.monotonic()
    await exchange(api, "POST", R, one)
    idle = time.monotonic() - start
    names = []
    for _ in range(8):
        async with connected(api, "POST", R, _long(api)) as (reader, _writer):
            names.append((await event_on(reader, "response.created"))["response"]["id"])
    await asyncio.sleep(1.5)
    start = time.monotonic()
    await exchange(api, "POST", R, one)
    took = time.monotonic() - start
    expect(
        took < idle + 1.0,
        f"expected the next answer after {idle:.2f} s, but got it after {took:.2f} s",
    )
    kept = [name for name in names if (await api.get(f"{R}/{name}")).status == 200]
    expect(not kept, f"expected no stored Response of a client that left, but got {len(kept)}")


@check("responses.engine-dies",
       "A stream whose engine dies ends with an error event with an error object, and "
       "response.failed; it is never completed.",
       "must", "R5.4 R10.50", alone=True, seconds=120)  # fmt: skip
async def engine_dies(api: Api) -> None:
    api.needs_break()
    await respond(api, "Hello", max_output_tokens=16)
    async with connected(api, "POST", R, _long(api)) as (reader, _writer):
        data = await reader.readuntil(b"response.output_text.delta")
        await end_engine(api)
        try:
            data += await asyncio.wait_for(reader.read(-1), ENDS)
        except TimeoutError:
            raise Fail(f"expected the stream to end within {ENDS:.0f} s") from None
    await answers(api)
    events = [event for _name, event in events_in(parsed(data).body.decode(errors="replace"))]
    found = [event["type"] for event in events]
    if "response.output_text.done" in found:
        raise Skip("the answer was complete before the engine stopped")
    expect(found[-2:] == ["error", "response.failed"], f"expected failed, but got {found[-2:]}")
    error, failed = events[-2].get("error"), events[-1]["response"]
    valid = isinstance(error, dict) and isinstance(error.get("message"), str)
    expect(valid, f"expected an error object in the event, but got {events[-2]}")
    told = (failed["status"], bool(failed["error"]), failed["usage"])
    expect(told == ("failed", True, None), f"expected a failed Response, but got {told}")
