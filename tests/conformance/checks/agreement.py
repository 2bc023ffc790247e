"""Values that a server states more than once, in a stream, its end and a later reply: they agree.

Two statements of one answer are compared exactly. No engine computes them twice.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ..check import Body, Skip, check, expect
from ..target import Api, expect_finite, expect_model, expect_seconds, only
from .custom_tools import REGEX
from .embeddings import embed
from .responses import R, events_in, message_of, of_type, parsed, respond, stream, whole
from .responses_conversations import HELLO, SAID, items_of
from .responses_custom import NAMED, lamp
from .responses_input import LOGPROBS
from .responses_state import stored as stored_response
from .stored import found_at, listed_with, stored
from .tools import one_of

ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
LIMIT = 256
# A function with every field, whose parameters are nested.
LOOK_UP = {
    "type": "function", "name": "get_weather", "strict": True, "description": "Look it up.",
    "parameters": one_of(city=("Paris", "Rome")),
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"sky": {"type": "string", "enum": ["blue", "grey"]}},
          "required": ["sky"], "additionalProperties": False}  # fmt: skip
# Requests, each with fields that a Response states. The values are not the defaults.
REQUESTS: Mapping[str, Mapping[str, Any]] = {
    "fields": {
        "instructions": "Be brief.", "metadata": {"colour": "blue"}, "top_p": 0.5,
        "prompt_cache_key": "one", "safety_identifier": "somebody", "max_tool_calls": 3,
        "parallel_tool_calls": False, "truncation": "disabled",
    },
    "tools": {"tools": [{**LOOK_UP, "name": "get_time", "description": None}, LOOK_UP, lamp()],
              "tool_choice": {"type": "function", "name": "get_weather"}},
    "custom": {"tools": [LOOK_UP, lamp({"type": "grammar", "syntax": "regex",
                                        "definition": REGEX})],
               "tool_choice": {"type": "allowed_tools", "mode": "auto",
                               "tools": [{"type": "function", "name": "get_weather"}]}},
    "namespaces": {"tools": [{"type": "namespace", "name": "sky", "description": "Of the sky.",
                              "tools": [LOOK_UP, {**LOOK_UP, "name": "get_clouds"}]}]},
    "format": {"text": {"format": {"type": "json_schema", "name": "sky", "strict": True,
                                   "schema": SCHEMA}}},
}  # fmt: skip


def _expect_entries(entries: Sequence[Any], tops: int) -> None:
    """Raise `Fail` unless entries of `logprobs` are right: bytes, order, the token on top."""
    expect(entries, f"expected log-probabilities, but got {entries!r}")
    for entry in entries:
        top = entry["top_logprobs"]
        expect(0 < len(top) <= tops, f"expected 1 to {tops} alternatives, but got {entry}")
        for one in (entry, *top):
            keys = {"token", "logprob", "bytes"} - one.keys()
            expect(not keys, f"expected {sorted(keys)} in an entry, but got {one}")
            text = bytes(one["bytes"]).decode(errors="replace")
            same = "\ufffd" in text or text == one["token"]
            expect(same, f"expected the bytes of {one['token']!r}, but got {one['bytes']}")
        values = [one["logprob"] for one in top]
        expect_finite(values)
        expect(values == sorted(values, reverse=True), f"expected falling values, but got {values}")
        same = (top[0]["token"], top[0]["logprob"]) == (entry["token"], entry["logprob"])
        expect(same, f"expected the generated token first, but got {entry}")


def _expect_digits(values: Sequence[float]) -> None:
    """Raise `Fail` if numbers have at most four digits after the point."""
    precise = [value for value in values if value and round(value, 4) != value]
    expect(not any(values) or precise, f"expected full precision, but got {list(values)[:8]}")


@check("logprobs.precision",
       "Log-probabilities have full precision, in plain and in streamed responses of both "
       "endpoints.",
       "must", "2.6 3.4")  # fmt: skip
async def precision(api: Api) -> None:
    plain = await api.complete("Hello", temperature=0, max_tokens=6, logprobs=5)
    for top in plain["choices"][0]["logprobs"]["top_logprobs"]:
        _expect_digits([*top.values()])
    body = await api.chat("Count to 7.", logprobs=True, top_logprobs=5, max_tokens=6, temperature=0)
    for entry in body["choices"][0]["logprobs"]["content"]:
        _expect_digits([one["logprob"] for one in entry["top_logprobs"]])


@check("logprobs.stream-arrays",
       "Each chunk of a streamed completion with logprobs has four arrays of one length, in which "
       "the greedy token is the likeliest, with the same log-probability.",
       "must", "2.6.7")  # fmt: skip
async def stream_arrays(api: Api) -> None:
    chunks = await api.complete_stream("Hello world", temperature=0, max_tokens=6, logprobs=2)
    count = 0
    for chunk in chunks:
        for choice in chunk["choices"]:
            expect("logprobs" in choice, f"expected logprobs in each chunk, but got {choice}")
            arrays = choice["logprobs"]
            if arrays is None:
                continue
            lengths = {name: len(arrays[name]) for name in ARRAYS}
            expect(len(set(lengths.values())) == 1, f"expected one length, but got {lengths}")
            lists = (arrays[name] for name in ARRAYS[:3])
            for token, value, top in zip(*lists, strict=True):
                count += 1
                expect_finite([value, *top.values()])
                wanted = max(top.values(), default=None)
                same = top.get(token) == value == wanted
                expect(same, f"{token!r}: expected {wanted} twice, but got {value} and {top}")
                _expect_digits([*top.values()])
    expect(count, f"expected log-probabilities, but got {str(chunks)[:300]}")


@check("chat_logprobs.stream-entries",
       "Each entry of a chat completion's logprobs, streamed or not, has its bytes, falling "
       "alternatives, and the greedy token first with the same log-probability.",
       "must", "3.4 10.44")  # fmt: skip
async def entries_agree(api: Api) -> None:
    full = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 6}
    body = await api.chat("Count to 7.", **full)
    _expect_entries(body["choices"][0]["logprobs"]["content"], 3)
    chunks = await api.chat_stream("Count to 7.", **full)
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    found = [entry for part in parts if part for entry in part["content"] or ()]
    _expect_entries(found, 3)
    for part in filter(None, parts):
        expect("refusal" in part, f"expected refusal in logprobs, but got {part}")
    for entry in found:
        _expect_digits([one["logprob"] for one in entry["top_logprobs"]])


def _heads(path: str) -> Body:
    async def run(api: Api) -> None:
        asks = {"messages": [HELLO]} if "chat" in path else {"prompt": "Hello"}
        body = {"model": api.model, **asks, "max_tokens": 6, "temperature": 0}
        plain = (await api.post(path, body)).ok()
        chunks = await api.stream(path, body)
        for choice in (one for chunk in chunks for one in chunk["choices"]):
            refusal = choice.get("delta", {}).get("refusal")
            expect(refusal is None, f"expected null for refusal, but got {refusal!r}")
        for name in ("model", "system_fingerprint"):
            found = {str(chunk.get(name, "absent")) for chunk in chunks}
            wanted = {str(plain.get(name, "absent"))}
            expect(found == wanted, f"{name}: expected {wanted} in each chunk, but got {found}")
        for made in (plain, chunks[-1]):
            expect_model(api, made["model"])

    return run


check("streaming.same-head",
      "Each chunk of a completion names the model and the fingerprint of the plain response.",
      "should", "2.9")(_heads("/completions"))  # fmt: skip
check("streaming.chat-same-head",
      "Each chunk of a chat completion names the model and the fingerprint of the plain response.",
      "should", "3.6")(_heads("/chat/completions"))  # fmt: skip


@check("models.retrieve-same", "A model that is retrieved by its id equals the listed one.",
       "must", "5")  # fmt: skip
async def retrieve_same(api: Api) -> None:
    for listed in (await api.get("/models")).ok()["data"]:
        one = (await api.get("/models/" + quote(listed["id"], safe=""))).ok()
        wrong = {name for name in listed if one.get(name) != listed[name]}
        expect(not wrong, f"expected the values of the list, but these differ: {sorted(wrong)}")


@check("embeddings.precision",
       "An embedding in base64 has the floats of the same embedding as a list, in full precision.",
       "must", "6")  # fmt: skip
async def embedding_precision(api: Api) -> None:
    listed = (await embed(api, "The sky is blue."))["data"][0]["embedding"]
    packed = (await embed(api, "The sky is blue.", encoding_format="base64"))["data"][0]
    data = base64.b64decode(packed["embedding"], validate=True)
    expect(len(data) == 4 * len(listed), f"expected {4 * len(listed)} bytes, but got {len(data)}")
    values = struct.unpack(f"<{len(listed)}f", data)
    near = all(abs(a - b) < 1e-3 for a, b in zip(values, listed, strict=True))
    expect(near, f"expected {listed[:4]}, but got {values[:4]}")
    _expect_digits(listed)


@check("stored.same",
       "A stored chat completion is the same when it is retrieved, listed and updated.",
       "should", "4 10.88")  # fmt: skip
async def stored_same(api: Api) -> None:
    settings: Sequence[Mapping[str, Any]] = ({"temperature": 0.7, "top_p": 0.9, "seed": 7}, {})
    for asked in settings:
        logs = {"logprobs": True, "top_logprobs": 2} if asked else {}
        async with stored(api, **logs, **asked) as (made, mark):
            await _expect_kept(api, made, mark, asked)


async def _expect_kept(api: Api, made: Any, mark: str, asked: Mapping[str, Any]) -> None:
    """Raise `Fail` unless a stored chat completion is the same wherever it is stated."""
    one = await found_at(api, made["id"])
    found = {name: one.get(name) for name in asked}
    expect(found == asked, f"expected {asked}, but got {found}")
    expect(asked or one.get("seed") is None, f"expected no seed, but got {one.get('seed')!r}")
    page = await listed_with(api, mark)
    expect(page["data"] == [one], f"expected {one}, but got {page}")
    ends = page["first_id"], page["last_id"]
    expect(ends == (one["id"], one["id"]), f"expected the id twice, but got {ends}")
    _expect_stored(one, made)
    data = {"metadata": {"mark": mark, "side": "left"}}
    changed = (await api.post(f"/chat/completions/{made['id']}", data)).ok()
    expect(changed == {**one, **data}, f"expected new metadata only, but got {changed}")


def _expect_stored(one: Any, made: Any) -> None:
    """Raise `Fail` unless a stored chat completion is the one that was made.

    Without a value, a key may be missing in either.
    """
    for name in ("id", "object", "created", "model", "choices", "usage", "system_fingerprint"):
        values = [_without_nulls(body.get(name)) for body in (made, one)]
        expect(values[0] == values[1], f"{name}: expected {values[0]}, but got {values[1]}")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(one) for name, one in value.items() if one is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


@check("stored.stream-same",
       "A streamed chat completion is stored as the message that its chunks add up to.",
       "should", "4 10.89")  # fmt: skip
async def stored_stream_same(api: Api) -> None:
    async with stored(api):
        pass
    full = {"store": True, "max_tokens": 6, "temperature": 0,
            "stream_options": {"include_usage": True}}  # fmt: skip
    chunks = await api.chat_stream("Hello", **full)
    path = f"/chat/completions/{chunks[0]['id']}"
    found = await api.get(path)
    await api.send("DELETE", path)
    one = found.ok()
    expect(one.get("temperature") == 0, f"expected the temperature 0, but got {one}")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    message = {"role": "assistant", "content": text}
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    reason = only(reasons, "finish_reason")
    whole_one = {"index": 0, "message": message, "finish_reason": reason}
    last = {**chunks[-1], "object": "chat.completion", "choices": [whole_one]}
    kept = _without_nulls(one["choices"])
    for choice in kept:
        # An empty list says no more than its absence.
        choice["message"] = {name: value for name, value in choice["message"].items() if value}
    _expect_stored({**one, "choices": kept}, last)


@check("responses.logprobs-agree",
       "The log-probabilities of a streamed text are the same in its deltas, its end, its part, "
       "its item and the last Response, and each entry is complete.",
       "must", "R5.3 R9.1 R10.43")  # fmt: skip
async def logprobs_agree(api: Api) -> None:
    plain = await respond(api, max_output_tokens=16, **LOGPROBS)
    _expect_entries(message_of(plain)["content"][0]["logprobs"], 2)
    events = await stream(api, max_output_tokens=16, **LOGPROBS)
    last = message_of(events[-1]["response"])
    own = [
        one for one in events if last["id"] in (one.get("item_id"), one.get("item", {}).get("id"))
    ]
    places = [
        [one for event in of_type(own, "output_text.delta") for one in event["logprobs"]],
        of_type(own, "output_text.done")[0]["logprobs"],
        of_type(own, "content_part.done")[0]["part"]["logprobs"],
        of_type(own, "output_item.done")[0]["item"]["content"][0]["logprobs"],
        last["content"][0]["logprobs"],
    ]
    # The entries of events need no bytes.
    keys = ("token", "logprob", "top_logprobs")
    short = [[{key: entry[key] for key in keys} for entry in place] for place in places]
    for entries in short:
        for entry in entries:
            entry["top_logprobs"] = [
                {key: one[key] for key in keys[:2]} for one in entry["top_logprobs"]
            ]
    for found in short[1:]:
        expect(found == short[0], f"expected {short[0][:2]}, but got {found[:2]}")
    for entries in places:
        if "bytes" in entries[0]:
            _expect_entries(entries, 2)
    for entry in places[0]:
        _expect_digits([one["logprob"] for one in entry["top_logprobs"]])


def _stated(name: str) -> Body:
    async def run(api: Api) -> None:
        request = REQUESTS[name]
        plain = await respond(api, "Hello", max_output_tokens=16, **request)
        events = await stream(api, "Hello", max_output_tokens=16, **request)
        for found in (plain, *(event["response"] for event in events if "response" in event)):
            for key, value in request.items():
                expect(_has(found.get(key), value), f"{key}: expected {value}, but got "
                       f"{found.get(key)}")  # fmt: skip
                same = found.get(key) == plain.get(key)
                expect(same, f"{key}: expected {plain.get(key)}, but got {found.get(key)}")

    return run


def _has(found: Any, wanted: Any) -> bool:
    """Return True if a value has all of another one; objects may have more keys, and lack nulls."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            _has(found.get(name), value) for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list) and len(found) == len(wanted) and all(map(_has, found, wanted))
        )
    return bool(found == wanted)


def _kept(name: str) -> Body:
    async def run(api: Api) -> None:
        async with stored_response(api, "Hello", **REQUESTS[name]) as made:
            found = (await api.get(f"{R}/{made['id']}")).ok()
            expect(found == made, f"expected {made}, but got {found}")

    return run


for _name in REQUESTS:
    check(f"responses.store-{_name}",
          f"A Response that is retrieved has the {_name} and the output of the first one.",
          "should" if _name == "namespaces" else "must", "R7 R10.32")(_kept(_name))  # fmt: skip
    check(f"responses.states-{_name}",
          f"Each Response, plain and in events, states the {_name} of its request.",
          "should" if _name == "namespaces" else "must", "R3 R5.1")(_stated(_name))  # fmt: skip


@check("responses.stream-keys",
       "The Responses in the events of a stream have the keys of a plain one, one creation time, "
       "and a completion that is not earlier.",
       "must", "R3 R5.1")  # fmt: skip
async def stream_keys(api: Api) -> None:
    plain = await respond(api, max_output_tokens=400)
    events = await stream(api, max_output_tokens=400)
    found = [event["response"] for event in events if "response" in event]
    for one in (plain, *found):
        keys = plain.keys() ^ one.keys()
        expect(not keys, f"expected the keys of a plain Response, but these differ: {keys}")
        times = one["created_at"], one["completed_at"]
        if one["status"] == "completed":
            valid = type(times[1]) is int and times[1] >= times[0]
            expect(valid, f"expected a later integer in completed_at, but got {times}")
    for name in ("id", "created_at", "model"):
        values = {str(one[name]) for one in found}
        expect(len(values) == 1, f"expected one {name} in all events, but got {values}")
    new = plain["created_at"] > 1_500_000_000 and found[0]["created_at"] > 1_500_000_000
    expect(new, f"expected a Unix time, but got {plain['created_at']}")


def _items_agree(given: str, **request: Any) -> Body:
    async def run(api: Api) -> None:
        events = await stream(api, given, max_output_tokens=LIMIT, **request)
        output = whole(events[-1]["response"], LIMIT)["output"]
        done = [event["item"] for event in of_type(events, "output_item.done")]
        expect(done == output, f"expected {output}, but got {done}")
        for added, item in zip(of_type(events, "output_item.added"), done, strict=True):
            for name in ("id", "type", "name", "call_id"):
                same = added["item"].get(name) == item.get(name)
                expect(same, f"{name}: expected {item.get(name)!r}, but got {added['item']}")
        ends = [*of_type(events, "function_call_arguments.done"),
                *of_type(events, "custom_tool_call_input.done")]  # fmt: skip
        for end in ends:
            item = only([one for one in output if one["id"] == end["item_id"]], "item of an event")
            valid = end.get("name", item["name"]) == item["name"]
            expect(valid, f"expected the name {item['name']!r}, but got {end}")
            value = item.get("arguments", item.get("input"))
            found = end.get("arguments", end.get("input"))
            expect(found == value, f"expected {value!r}, but got {found!r}")
        tools = [tool["name"] for tool in request["tools"]]
        for item in output:
            named = item.get("name", tools[0]) in tools
            expect(named, f"expected a tool among {tools}, but got {item}")

    return run


check("responses.stream-call-agree",
      "A streamed function call is the same in its first event, its end, its item and the "
      "Response.",
      "must", "R5.3")(_items_agree("What is the weather?", tools=[LOOK_UP],
                                   tool_choice=REQUESTS["tools"]["tool_choice"]))  # fmt: skip
check("responses.stream-custom-agree",
      "A streamed custom tool call is the same in its first event, its end, its item and the "
      "Response.",
      "must", "R5.3")(_items_agree("Turn the lamp on.", tools=[lamp()],
                                   tool_choice=NAMED))  # fmt: skip


@check("responses.replay-same",
       "A streamed Response that is streamed again has the same events.",
       "should", "R1 R10.57")  # fmt: skip
async def replay_same(api: Api) -> None:
    body = {"model": api.model, "input": "Count to 7.", "max_output_tokens": 16, "store": True,
            "stream": True, "temperature": 0}  # fmt: skip
    async with stored_response(api):
        pass
    reply = await api.send("POST", R, json.dumps(body).encode(), sent=body)
    events = [data for _name, data in parsed(api, reply)]
    name = events[-1]["response"]["id"]
    again = await api.get(f"{R}/{name}?stream=true")
    later = await api.get(f"{R}/{name}")
    await api.send("DELETE", f"{R}/{name}")
    expect(later.ok() == events[-1]["response"], f"expected the Response, but got {later.text}")
    if again.status != 200:
        raise Skip(f"a Response without background is not streamed again: {again.text[:200]}")
    replayed = [data for _name, data in events_in(again.text)]
    texts = ["".join(e["delta"] for e in of_type(one, "output_text.delta"))
             for one in (events, replayed)]  # fmt: skip
    expect(texts[0] == texts[1], f"expected {texts[0]!r}, but got {texts[1]!r}")
    for kind in ("created", "in_progress", "output_item.added", "content_part.added",
                 "output_text.done", "content_part.done", "output_item.done"):  # fmt: skip
        found = [_unnumbered(of_type(one, kind)) for one in (events, replayed)]
        expect(found[0] == found[1], f"{kind}: expected {found[0]}, but got {found[1]}")
    place = ("item_id", "output_index", "content_index")
    for event in of_type(replayed, "output_text.delta"):
        first = of_type(events, "output_text.delta")[0]
        wrong = [key for key in place if event[key] != first[key]]
        expect(not wrong, f"expected the {wrong} of {first}, but got {event}")


def _unnumbered(events: Sequence[Any]) -> list[Any]:
    return [{key: one[key] for key in one if key != "sequence_number"} for one in events]


@check("responses.conversation-same",
       "A conversation and its items are the same when they are made, changed, listed and "
       "retrieved.",
       "should", "R1 R10.56")  # fmt: skip
async def conversation_same(api: Api) -> None:
    data = json.dumps({"metadata": {"colour": "blue"}, "items": [HELLO]}).encode()
    made = (await api.send("POST", "/conversations", data, sent={"items": [HELLO]})).ok()
    path = f"/conversations/{made['id']}"
    try:
        wanted = {"object": "conversation", "metadata": {"colour": "blue"}}
        wrong = [name for name in wanted if made.get(name) != wanted[name]]
        expect(not wrong, f"expected {wanted}, but got {made}")
        expect_seconds(made["created_at"])
        expect((await api.get(path)).ok() == made, "expected the conversation as it was made")
        new = {"metadata": {"side": "left"}}
        changed = (await api.post(path, new)).ok()
        expect(changed == {**made, **new}, f"expected new metadata only, but got {changed}")
        await _items_same(api, made["id"], changed)
    finally:
        await api.send("DELETE", path)


async def _items_same(api: Api, name: str, conversation: Any) -> None:
    path = f"/conversations/{name}/items"
    data = json.dumps({"items": [SAID, HELLO]}).encode()
    added = (await api.send("POST", path, data, sent={"items": [SAID, HELLO]})).ok()
    listed = await items_of(api, name)
    expect(listed["data"][1:] == added["data"], f"expected {added}, but got {listed}")
    for one in (added, listed):
        items = one["data"]
        found = one["object"], one["first_id"], one["last_id"], one["has_more"]
        wanted = "list", items[0]["id"], items[-1]["id"], False
        expect(found == wanted, f"expected {wanted}, but got {found}")
    for item, sent in zip(listed["data"], (HELLO, SAID, HELLO), strict=True):
        one = (await api.get(f"{path}/{item['id']}")).ok()
        expect(one == item, f"expected {item}, but got {one}")
        text = "".join(part["text"] for part in item["content"])
        same = (item["role"], text) == tuple(sent.values())
        expect(same, f"expected {sent}, but got {item}")
        complete = item["type"] == "message" and item["status"] == "completed"
        expect(complete, f"expected a completed message, but got {item}")
    deleted = (await api.send("DELETE", f"{path}/{listed['data'][1]['id']}")).ok()
    expect(deleted == conversation, f"expected the conversation, but got {deleted}")


@check("responses.input-items-same",
       "The input items of a stored Response are the items of its request, each with an id.",
       "should", "R1 R10.34")  # fmt: skip
async def input_items_same(api: Api) -> None:
    async with stored_response(api, [HELLO, SAID, HELLO]) as made:
        body = (await api.get(f"{R}/{made['id']}/input_items?order=asc")).ok()
        items = body["data"]
        found = [(one["role"], "".join(part["text"] for part in one["content"])) for one in items]
        wanted = [tuple(one.values()) for one in (HELLO, SAID, HELLO)]
        expect(found == wanted, f"expected {wanted}, but got {found}")
        ends = body["first_id"], body["last_id"], body["has_more"]
        expect(ends == (items[0]["id"], items[-1]["id"], False), f"expected its ends, got {ends}")
        for item in items:
            complete = item["type"] == "message" and item["status"] == "completed" and item["id"]
            expect(complete, f"expected a completed message with an id, but got {item}")
            texts = [part for part in item["content"] if part["type"] == "output_text"]
            lists = [part.get(name) for part in texts for name in ("annotations", "logprobs")]
            expect(lists == [[]] * len(lists), f"expected empty lists in parts, but got {item}")
