"""Stored responses, and conversations that continue them (contract of responses 1 and 7)."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai.types.responses import ResponseItemList

from ..check import Diverges, Skip, Unsupported, check, expect
from ..published import first_wrong
from ..raw import connected
from ..target import Api, only
from .responses import (
    ASK,
    WEATHER,
    R,
    event_on,
    of_type,
    parsed,
    respond,
    size,
    text_of,
)

HELLO = {"role": "user", "content": "Hello"}
AGAIN = {"role": "user", "content": "Count to 7."}
# The Responses of which one must be stored: a busy server may say that one was not, in time.
TRIES = 3


@asynccontextmanager
async def stored(api: Api, given: Any = ASK, **body: Any) -> AsyncIterator[Any]:
    """Store a response, yield it, and delete it at the end.

    Without stored responses, a 404 of the paths below is a rejection and not a fault.
    """
    for _ in range(TRIES):
        made = await respond(api, given, **{"max_output_tokens": 16, "store": True, **body})
        if made.get("store") is not False:
            break
    else:
        raise Unsupported("the Response has store false")
    (await api.get(f"{R}/{made['id']}")).ok()
    try:
        yield made
    finally:
        await api.send("DELETE", f"{R}/{made['id']}")


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
    told = deleted.get("deleted") is True and deleted.get("id") == made["id"]
    told = told and deleted.get("object") in ("response", "response.deleted")
    expect(told, f"expected the id, a response and deleted true, but got {deleted}")
    (await api.get(f"{R}/{made['id']}")).error(404)


@check("responses.store-equal", "A retrieved Response equals the one that was returned first.",
       "must", "R7 R10.32")  # fmt: skip
async def store_equal(api: Api) -> None:
    async with stored(api) as made:
        found = (await api.get(f"{R}/{made['id']}")).ok()
        wrong = [name for name in made.keys() | found.keys() if made.get(name) != found.get(name)]
        expect(not wrong, f"expected the same values, but these differ: {sorted(wrong)}")


@check("responses.store-stream",
       "A streamed Response can be retrieved as soon as its last event arrives.",
       "must", "R5.1 R10.33 [LM Studio#1188]")  # fmt: skip
async def store_stream(api: Api) -> None:
    async with stored(api):
        pass
    body = {"model": api.model, "input": ASK, "max_output_tokens": 16, "store": True,
            "stream": True, "temperature": 0}  # fmt: skip
    async with connected(api, "POST", R, body) as (reader, _writer):
        last = await event_on(reader, "response.completed", "response.incomplete")
        found = await api.get(f"{R}/{last['response']['id']}")
    await api.send("DELETE", f"{R}/{last['response']['id']}")
    expect(found.status == 200, f"expected the Response, but got status {found.status}")
    expect(found.json()["output"], f"expected output, but got {found.text[:200]}")


@check("responses.not-stored", "A Response with store false cannot be retrieved.", "should", "7")
async def not_stored(api: Api) -> None:
    made = await respond(api, "Hello", max_output_tokens=16)
    (await api.get(f"{R}/{made['id']}")).error(404)


@check("responses.not-parent",
       "A Response with store false cannot be continued: 400, previous_response_not_found.",
       "must", "R7 R10.31")  # fmt: skip
async def not_parent(api: Api) -> None:
    async with stored(api) as parent:
        await respond(api, "Hello", max_output_tokens=16, previous_response_id=parent["id"])
    made = await respond(api, "Hello", max_output_tokens=16)
    body = {"model": api.model, "input": "Hello", "previous_response_id": made["id"]}
    error = (await api.post(R, body)).error(400)
    found = [error["param"], error["code"]]
    wanted = ["previous_response_id", "previous_response_not_found"]
    expect(found == wanted, f"expected {wanted}, but got {error}")


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


@check("responses.previous-same",
       "A continued Response has the prompt of one whose input has the earlier items.",
       "should", "R7 R10.30")  # fmt: skip
async def previous_same(api: Api) -> None:
    async with stored(api) as one:
        async with stored(api, [HELLO], previous_response_id=one["id"]) as two:
            found = await size(api, [AGAIN], previous_response_id=two["id"])
        items = [{"role": "user", "content": ASK}, *one["output"], HELLO, *two["output"], AGAIN]
        wanted = await size(api, items)
    expect(found == wanted, f"expected {wanted} input tokens, but got {found}")


@check("responses.previous-echo",
       "A continued Response names the one before, and does not inherit its tools or its metadata.",
       "must", "R7 R10.30")  # fmt: skip
async def previous_echo(api: Api) -> None:
    more = {"tools": [WEATHER], "tool_choice": "none", "metadata": {"colour": "blue"}}
    async with stored(api, **more) as one:
        two = await respond(api, "Hello", max_output_tokens=16, previous_response_id=one["id"])
        async with stored(api, previous_response_id=one["id"]) as three:
            kept = (await api.get(f"{R}/{three['id']}")).ok()["previous_response_id"]
    expect(kept == one["id"], f"expected {one['id']} in the stored Response, but got {kept!r}")
    found = [two["previous_response_id"], two["tools"], two["metadata"]]
    expect(found == [one["id"], [], {}], f"expected {one['id']}, no tools, but got {found}")


@check("responses.instructions-once",
       "The instructions of a Response are not inherited by one that continues it.",
       "must", "R7 R10.29")  # fmt: skip
async def instructions_once(api: Api) -> None:
    long = "Name each city that you know in the south of the country. " * 20
    async with stored(api, instructions=long) as one:
        two = await respond(api, "Hello", max_output_tokens=16, previous_response_id=one["id"])
    counts = [body["usage"]["input_tokens"] for body in (one, two)]
    expect(counts[1] < counts[0], f"expected fewer than {counts[0]} input tokens, but got {counts}")
    found = two["instructions"]
    expect(found is None, f"expected null for instructions, but got {found!r}")


@check("responses.previous-output",
       "The output of a call is enough as the input of a Response that continues the call.",
       "must", "R7 R10.30 [OR]")  # fmt: skip
async def previous_output(api: Api) -> None:
    choice = {"type": "function", "name": "get_weather"}
    full = {"tools": [WEATHER], "tool_choice": choice, "max_output_tokens": 256}
    async with stored(api, "What is the weather in Paris?", **full) as one:
        calls = [item for item in one["output"] if item["type"] == "function_call"]
        if one["status"] == "incomplete" or not calls:
            raise Skip("the model needs more than 256 tokens for the call")
        given = [{"type": "function_call_output", "call_id": call["call_id"],
                  "output": "21 degrees"} for call in calls]  # fmt: skip
        count = await size(api, given, tools=[WEATHER], previous_response_id=one["id"])
        before = one["usage"]["input_tokens"]
    expect(count > before, f"expected more than {before} input tokens, but got {count}")


@check("responses.input-tokens-chain",
       "The number of input tokens counts the Responses that are continued.",
       "must", "R1 R10.37")  # fmt: skip
async def input_tokens_chain(api: Api) -> None:
    async with stored(api) as one:
        body = {"model": api.model, "input": [HELLO], "previous_response_id": one["id"]}
        counted = (await api.post(f"{R}/input_tokens", body)).ok()["input_tokens"]
        used = await size(api, [HELLO], previous_response_id=one["id"])
    expect(counted == used, f"expected {used}, but got {counted}")


@check("responses.input-items", "The input items of a stored Response can be listed.",
       "should", "7")  # fmt: skip
async def input_items(api: Api) -> None:
    made = await respond(api, "Hello", max_output_tokens=16, store=True)
    found = (await api.get(f"{R}/{made['id']}/input_items")).ok()
    await api.send("DELETE", f"{R}/{made['id']}")
    item = only(found["data"], "input item")
    valid = item["role"] == "user" and item["content"][0]["text"] == "Hello"
    expect(valid, f"expected the input message, but got {item}")


async def _listed(api: Api, made: Any, query: str = "") -> Any:
    found = (await api.get(f"{R}/{made['id']}/input_items{query}")).ok()
    for name in ("object", "data", "first_id", "last_id", "has_more"):
        expect(name in found, f"expected {name!r} in the list, but got {str(found)[:200]}")
    return found


@check("responses.input-items-type",
       "Listed input items have an id, and parts as content; the list matches OpenAI's published "
       "type.",
       "must", "R4 R10.35")  # fmt: skip
async def input_items_type(api: Api) -> None:
    given = [HELLO, {"role": "assistant", "content": "Hello!"}, AGAIN]
    async with stored(api, given) as made:
        found = await _listed(api, made, "?order=asc")
    wrong = first_wrong(ResponseItemList, found)
    expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
    kinds = [[part["type"] for part in item["content"]] for item in found["data"]]
    wanted = [["input_text"], ["output_text"], ["input_text"]]
    expect(kinds == wanted, f"expected {wanted}, but got {kinds}")
    ids = [item["id"] for item in found["data"]]
    expect(len(set(ids)) == 3, f"expected three ids, but got {ids}")


@check("responses.input-items-pages",
       "Input items are listed from the last one, or the reverse with order=asc, in pages of limit "
       "that after continues.",
       "must", "R1 R10.35")  # fmt: skip
async def input_items_pages(api: Api) -> None:
    given = [{"role": "user", "content": text} for text in ("one", "two", "three")]
    async with stored(api, given) as made:
        pages = {query: await _listed(api, made, query)
                 for query in ("", "?order=asc", "?limit=2")}  # fmt: skip
        last = pages["?limit=2"]["last_id"]
        rest = await _listed(api, made, f"?limit=2&after={last}")
    texts = {query: [item["content"][0]["text"] for item in page["data"]]
             for query, page in pages.items()}  # fmt: skip
    wanted = {"": ["three", "two", "one"], "?order=asc": ["one", "two", "three"],
              "?limit=2": ["three", "two"]}  # fmt: skip
    expect(texts == wanted, f"expected {wanted}, but got {texts}")
    found = [item["content"][0]["text"] for item in rest["data"]]
    expect(found == ["one"], f"expected the rest after {last}, but got {found}")
    more = [pages["?limit=2"]["has_more"], rest["has_more"]]
    expect(more == [True, False], f"expected has_more true and then false, but got {more}")


@check("responses.reference",
       "A reference to a stored item is the same as the item; an unknown one is a 404 error.",
       "must", "R2.3 R10.36 [AISDK]")  # fmt: skip
async def reference(api: Api) -> None:
    async with stored(api) as made:
        ask = {"role": "user", "content": ASK}
        item = made["output"][-1]
        counts = [
            await size(api, [ask, one, HELLO])
            for one in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}, item)
        ]
        expect(len(set(counts)) == 1, f"expected equal numbers of input tokens, but got {counts}")
    given = [HELLO, {"type": "item_reference", "id": "msg_none"}]
    error = (await api.post(R, {"model": api.model, "input": given})).error(404)
    text = "Item with id 'msg_none' not found."
    valid = error["message"].startswith(text) and error["param"] == "input"
    expect(valid, f"expected {text!r} and the param input, but got {error}")


@check("responses.cancel", "A Response that has ended cannot be cancelled: 400.",
       "must", "R1 R10.52")  # fmt: skip
async def cancel(api: Api) -> None:
    async with stored(api) as made:
        (await api.send("POST", f"{R}/{made['id']}/cancel", b"{}")).error(400)
    (await api.send("POST", f"{R}/resp_none/cancel", b"{}")).error(404)


@check("responses.replay",
       "A stored Response can be streamed again, after any event: with its numbers and its end.",
       "should", "R1 R10.57 [PYD]")  # fmt: skip
async def replay(api: Api) -> None:
    async with stored(api) as made:
        path = f"{R}/{made['id']}?stream=true"
        reply = await api.get(path)
        if reply.status != 200:
            raise Unsupported(f"a Response without background is not streamed: {reply.text[:200]}")
        events = [data for _name, data in parsed(api, reply)]
        numbers = [event["sequence_number"] for event in events]
        expect(numbers == [*range(len(events))], f"expected 0, 1, 2, …, but got {numbers}")
        text = "".join(event["delta"] for event in of_type(events, "output_text.delta"))
        expect(text == text_of(made), f"expected {text_of(made)!r}, but got {text!r}")
        last = events[-1].get("response")
        expect(last == made, f"expected the stored Response last, but got {str(last)[:200]}")
        rest = [data for _name, data in parsed(api, await api.get(f"{path}&starting_after=2"))]
        expect(rest == events[3:], f"expected the events from 3 on, but got {str(rest)[:200]}")


@check("responses.unknown", "An unknown Response id returns 404.", "should", "7")
async def unknown(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    (await api.get(f"{R}/resp_none")).error(404)


# Contexts up to this length, in tokens, are filled by a request that is answered. For longer ones
# the tokens are only counted, because a small computer needs minutes to read them.
SHORT = 8_192


@check("responses.truncation",
       "With truncation auto, the oldest turns of a conversation that exceeds the context length "
       "are omitted, or auto is rejected with a 400 error whose param is truncation.",
       "should", "R9.5")  # fmt: skip
async def truncation(api: Api) -> None:
    await respond(api, "Hello", max_output_tokens=16)
    beyond = await api.post(R, {"model": api.model, "input": "a b " * 1_000_000})
    length = re.search(r"context length is (\d+)", str(beyond.error(400)["message"]))
    if length is None:
        raise Skip("the error does not name the context length")
    context = int(length[1])
    turns = [{**HELLO, "content": "word " * 200} for _ in range(context // 150)]
    body = {"model": api.model, "input": [*turns, AGAIN], "instructions": "Be short.",
            "truncation": "auto"}  # fmt: skip
    if context <= SHORT:
        reply = await api.post(R, {**body, "store": False, "max_output_tokens": 16})
    else:
        reply = await api.post(f"{R}/input_tokens", body)
    if reply.status == 400 and reply.error(400)["param"] == "truncation":
        return
    found = reply.ok()
    count = found["usage"]["input_tokens"] if "usage" in found else found["input_tokens"]
    expect(0 < count <= context, f"expected at most {context} input tokens, but got {count}")
    named = found.get("truncation", "auto")
    expect(named == "auto", f"expected truncation auto, but got {named!r}")
