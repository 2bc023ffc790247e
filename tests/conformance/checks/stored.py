"""Stored chat completions: `store: true` and the operations on them (contract 4).

Each check marks its completions with a unique value in the metadata, and deletes them afterwards.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

from openai.types.chat import ChatCompletion, ChatCompletionDeleted, ChatCompletionStoreMessage

from ..check import Skip, check, expect
from ..published import first_wrong
from ..target import Api, Reply

H = "/chat/completions"
ASK = "Hello"


async def _require_list(api: Api) -> None:
    """Require a list of stored completions: without one, a 404 is a rejection and not a fault."""
    (await api.get(f"{H}?limit=1")).ok()


@asynccontextmanager
async def stored(api: Api, **body: Any) -> AsyncIterator[tuple[Any, str]]:
    """Store a completion, yield it with the mark in its metadata, and delete it at the end."""
    mark = uuid.uuid4().hex
    metadata = {"mark": mark, **body.pop("metadata", {})}
    full = {"store": True, "metadata": metadata, "max_tokens": 3, **body}
    made = await api.chat(full.pop("messages", ASK), **full)
    await _require_list(api)
    try:
        yield made, mark
    finally:
        await api.send("DELETE", f"{H}/{made['id']}")


async def found_at(api: Api, path: str) -> Any:
    reply = await api.get(f"{H}/{path}")
    expect(reply.status == 200, f"expected status 200, but got {reply.status}: "
           f"{reply.text[:200]}")  # fmt: skip
    return reply.json()


async def listed_with(api: Api, mark: str, query: str = "") -> Any:
    found = (await api.get(f"{H}?{quote('metadata[mark]')}={mark}{query}")).ok()
    for name in ("data", "first_id", "last_id", "has_more"):
        expect(name in found, f"expected {name!r} in the list, but got {str(found)[:200]}")
    return found


def _ids(listed: Any) -> list[str]:
    return [item["id"] for item in listed["data"]]


@check("stored.retrieve",
       "A stored chat completion can be retrieved by its id, with the same content.",
       "should", "4 10.88")  # fmt: skip
async def retrieve(api: Api) -> None:
    async with stored(api) as (made, _mark):
        found = await found_at(api, made["id"])
        for name in ("id", "object", "created", "model", "choices", "usage"):
            expect(name in found, f"expected {name!r}, but got {str(found)[:200]}")
        same = found["choices"][0]["message"]["content"] == made["choices"][0]["message"]["content"]
        expect(
            found["id"] == made["id"] and same,
            f"expected the stored chat completion, but got {str(found)[:200]}",
        )


@check("stored.type", "A retrieved chat completion matches OpenAI's published type.",
       "should", "4 10.95")  # fmt: skip
async def kind(api: Api) -> None:
    async with stored(api) as (made, _mark):
        wrong = first_wrong(ChatCompletion, await found_at(api, made["id"]))
        expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")


@check("stored.metadata", "A stored chat completion is returned with its metadata.",
       "should", "4 10.88")  # fmt: skip
async def metadata(api: Api) -> None:
    async with stored(api, metadata={"colour": "blue"}) as (made, mark):
        found = (await found_at(api, made["id"])).get("metadata")
        expected = {"mark": mark, "colour": "blue"}
        expect(found == expected, f"expected {expected}, but got {found}")


@check("stored.not-asked", "A chat completion is not stored if store is absent, false or null.",
       "should", "4 [SPEC]")  # fmt: skip
async def not_asked(api: Api) -> None:
    async with stored(api):
        for more in ({}, {"store": False}, {"store": None}):
            made = await api.chat(ASK, max_tokens=1, **more)
            (await api.get(f"{H}/{made['id']}")).error(404)


@check("stored.stream",
       "A streamed chat completion with store true is stored as a chat completion.",
       "should", "4")  # fmt: skip
async def stream(api: Api) -> None:
    async with stored(api):
        mark = uuid.uuid4().hex
        full = {"store": True, "metadata": {"mark": mark}, "max_tokens": 4, "temperature": 0}
        chunks = await api.chat_stream(ASK, **full)
        name = chunks[0]["id"]
        text = "".join(
            c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]
        )
        found = await found_at(api, name)
        await api.send("DELETE", f"{H}/{name}")
        expect(
            found["object"] == "chat.completion",
            f"expected chat.completion, but got {found['object']!r}",
        )
        content = found["choices"][0]["message"]["content"]
        expect(content == text, f"expected {text!r}, but got {content!r}")


@check("stored.unknown",
       "An unknown id of a stored chat completion returns 404, in each of the four operations.",
       "should", "4 10.88")  # fmt: skip
async def unknown(api: Api) -> None:
    await _require_list(api)
    for method, path, body in (
        ("GET", f"{H}/chatcmpl-none", None),
        ("DELETE", f"{H}/chatcmpl-none", None),
        ("POST", f"{H}/chatcmpl-none", b'{"metadata":{}}'),
        ("GET", f"{H}/chatcmpl-none/messages", None),
    ):
        (await api.send(method, path, body)).error(404)


@check("stored.list",
       "A list filtered by metadata has the stored chat completion in data, with first_id, "
       "last_id and has_more.",
       "should", "4 10.88")  # fmt: skip
async def listing(api: Api) -> None:
    async with stored(api) as (made, mark):
        found = await listed_with(api, mark)
        expect(
            found.get("object") == "list", f"expected object list, but got {found.get('object')}"
        )
        expect(_ids(found) == [made["id"]], f"expected {made['id']}, but got {_ids(found)}")
        ends = [found["first_id"], found["last_id"], found["has_more"]]
        expect(
            ends == [made["id"], made["id"], False],
            f"expected its id twice and has_more false, but got {ends}",
        )


@check("stored.filter", "A list filtered by metadata that no stored chat completion has is empty.",
       "should", "4 [EXP]")  # fmt: skip
async def filtered(api: Api) -> None:
    async with stored(api):
        found = await listed_with(api, uuid.uuid4().hex)
        expect(found["data"] == [], f"expected an empty list, but got {_ids(found)}")
        expect(found["has_more"] is False, f"expected has_more false, but got {found['has_more']}")
        ends = [found["first_id"], found["last_id"]]
        expect(ends in ([None, None], ["", ""]), f"expected no ids, but got {ends}")


@check("stored.filter-model", "The list of stored chat completions can be filtered by model.",
       "should", "4")  # fmt: skip
async def filtered_by_model(api: Api) -> None:
    async with stored(api) as (made, mark):
        for model, expected in ((made["model"], [made["id"]]), ("no-such-model", [])):
            found = _ids(await listed_with(api, mark, f"&model={quote(model, safe='')}"))
            expect(found == expected, f"{model}: expected {expected}, but got {found}")


async def _in_order(api: Api, one: Any, two: Any, mark: str) -> None:
    for query, expected in (("", [one, two]), ("&order=asc", [one, two]),
                            ("&order=desc", [two, one])):  # fmt: skip
        found = _ids(await listed_with(api, mark, query))
        wanted = [made["id"] for made in expected]
        expect(found == wanted, f"{query or 'no order'}: expected {wanted}, but got {found}")


def _apart(one: Any, two: Any) -> bool:
    """Return True if the second completion was created more than a second after the first.

    A server may sort by whole seconds, and by the end of a completion instead of `created`. A
    smaller difference can therefore be a tie.
    """
    times = [made.get("created") for made in (one, two)]
    return all(type(time) is int for time in times) and times[1] - times[0] > 1


@check("stored.order",
       "Stored chat completions are listed from oldest to newest, or the reverse with order=desc.",
       "should", "4")  # fmt: skip
async def order(api: Api) -> None:
    async with stored(api) as (one, mark):
        async with stored(api, metadata={"mark": mark}) as (two, _):
            apart = _apart(one, two)
            if apart:
                await _in_order(api, one, two, mark)
        if not apart:
            await asyncio.sleep(1.1)
            async with stored(api, metadata={"mark": mark}) as (two, _):
                await _in_order(api, one, two, mark)


@check("stored.pages",
       "The list of stored chat completions has pages of limit items, continued by after, until "
       "has_more is false.",
       "should", "4 [SDK]")  # fmt: skip
async def pages(api: Api) -> None:
    async with (
        stored(api) as (one, mark),
        stored(api, metadata={"mark": mark}) as (two, _),
        stored(api, metadata={"mark": mark}) as (three, _),
    ):
        first = await listed_with(api, mark, "&limit=2")
        expect(len(first["data"]) == 2, f"limit=2: expected 2 items, but got {len(first['data'])}")
        expect(first["has_more"] is True, f"expected has_more true, but got {first['has_more']}")
        second = await listed_with(api, mark, f"&limit=2&after={first['last_id']}")
        found = sorted(_ids(first) + _ids(second))
        wanted = sorted(made["id"] for made in (one, two, three))
        expect(found == wanted, f"expected {wanted}, but got {found}")
        expect(
            second["has_more"] is False, f"expected has_more false, but got {second['has_more']}"
        )


@check("stored.messages",
       "The messages of a stored chat completion's request can be listed, each with its own id.",
       "should", "4 10.88")  # fmt: skip
async def messages(api: Api) -> None:
    sent = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    async with stored(api, messages=sent) as (made, _mark):
        found = await found_at(api, f"{made['id']}/messages")
        listed = [(item["role"], item["content"]) for item in found["data"]]
        wanted = [(message["role"], message["content"]) for message in sent]
        expect(listed == wanted, f"expected {wanted}, but got {listed}")
        expect(found.get("object") == "list", f"expected the object list, but got {found}")
        given = [item.get(name) for item in found["data"] for name in ("name", "refusal")]
        expect(not any(given), f"expected no name and no refusal, but got {given}")
        ids = _ids(found)
        expect(len(set(ids)) == 2, f"expected two different ids, but got {ids}")
        ends = [found.get("first_id"), found.get("last_id"), found.get("has_more")]
        expect(ends == [*ids, False], f"expected {[*ids, False]}, but got {ends}")


@check("stored.messages-type",
       "The listed messages of a stored chat completion match OpenAI's published type.",
       "should", "4 10.95")  # fmt: skip
async def messages_type(api: Api) -> None:
    async with stored(api) as (made, _mark):
        for item in (await found_at(api, f"{made['id']}/messages"))["data"]:
            # The published type allows only the assistant's role, but a list may contain any role.
            wrong = first_wrong(ChatCompletionStoreMessage, {**item, "role": "assistant"})
            expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")


@check("stored.messages-pages",
       "The list of a stored chat completion's messages supports limit, after and order.",
       "should", "4")  # fmt: skip
async def messages_pages(api: Api) -> None:
    roles = ("user", "assistant", "user", "assistant", "user")
    sent = [{"role": r, "content": c} for r, c in zip(roles, "axbyc", strict=True)]
    async with stored(api, messages=sent) as (made, _mark):
        first = await found_at(api, f"{made['id']}/messages?limit=3")
        rest = await found_at(api, f"{made['id']}/messages?limit=3&after={first['last_id']}")
        found = [item["content"] for item in (*first["data"], *rest["data"])]
        wanted = [message["content"] for message in sent]
        expect(found == wanted, f"expected {wanted}, but got {found}")
        more = (first["has_more"], rest["has_more"])
        expect(more == (True, False), f"expected has_more true and then false, but got {more}")
        newest = await found_at(api, f"{made['id']}/messages?order=desc&limit=1")
        last = newest["data"][0]["content"]
        expect(last == "c", f"order=desc: expected the last message, but got {last!r}")


async def _update(api: Api, name: str, body: bytes) -> Reply:
    return await api.send("POST", f"{H}/{name}", body)


@check("stored.update", "The metadata of a stored chat completion can be replaced.",
       "should", "4 10.88")  # fmt: skip
async def update(api: Api) -> None:
    async with stored(api) as (made, _mark):
        reply = await _update(api, made["id"], b'{"metadata":{"other":"one"}}')
        for found in (reply.ok(), await found_at(api, made["id"])):
            metadata = found.get("metadata")
            expect(metadata == {"other": "one"}, f"expected the new metadata, but got {metadata}")


@check("stored.update-wrong",
       "An update of a stored chat completion without valid metadata is rejected with 400.",
       "should", "4 [SPEC]")  # fmt: skip
async def update_wrong(api: Api) -> None:
    async with stored(api) as (made, _mark):
        for body in (b"{}", b'{"metadata":{"a":1}}', b'{"metadata":"a"}'):
            (await _update(api, made["id"], body)).error(400)


@check("stored.delete",
       "A deleted chat completion is confirmed as deleted, and can then be neither retrieved nor "
       "listed.",
       "should", "4 10.88")  # fmt: skip
async def delete(api: Api) -> None:
    async with stored(api) as (made, mark):
        name = made["id"]
        body = (await api.send("DELETE", f"{H}/{name}")).ok()
        wanted = {"object": "chat.completion.deleted", "id": name, "deleted": True}
        same = {name: body.get(name) for name in wanted} == wanted
        expect(same, f"expected {wanted}, but got {body}")
        wrong = first_wrong(ChatCompletionDeleted, body)
        expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
        (await api.get(f"{H}/{name}")).error(404)
        found = _ids(await listed_with(api, mark))
        expect(found == [], f"expected an empty list, but got {found}")


# Excessive metadata: too many pairs, a long key, a long value, a number (contract 3.1).
INVALID = ({f"k{i}": "v" for i in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}, {"k": 1})


@check("stored.metadata-limits",
       "Metadata may have 16 pairs with keys of 64 and strings of 512 characters; more is "
       "rejected with 400.",
       "should", "3.1")  # fmt: skip
async def limits(api: Api) -> None:
    most = {**{f"k{i}": "v" for i in range(14)}, "k" * 64: "v" * 512}
    async with stored(api, metadata=most):
        pass
    messages = [{"role": "user", "content": ASK}]
    for wrong in INVALID:
        body = {"model": api.model, "messages": messages, "store": True, "metadata": wrong,
                "max_tokens": 1}  # fmt: skip
        error = (await api.post(H, body)).error(400)
        named = "metadata" in str(error["param"] or error["message"])
        expect(named, f"expected an error that names metadata, but got {error}")


@check("stored.query-wrong", "A list request with an invalid limit or order is rejected with 400.",
       "should", "4")  # fmt: skip
async def query_wrong(api: Api) -> None:
    await _require_list(api)
    for query in ("limit=none", "limit=0", "order=up"):
        (await api.get(f"{H}?{query}")).error(400)


@check("stored.request",
       "A stored chat completion has the temperature, top_p and seed of its request.",
       "may", "4 [SPEC]")  # fmt: skip
async def request(api: Api) -> None:
    async with stored(api, temperature=0.5, top_p=0.9, seed=7) as (made, _mark):
        found = await found_at(api, made["id"])
        settings = {name: found.get(name) for name in ("temperature", "top_p", "seed")}
        if not any(value is not None for value in settings.values()):
            raise Skip("the stored chat completion has none of these fields")
        wanted = {"temperature": 0.5, "top_p": 0.9, "seed": 7}
        expect(settings == wanted, f"expected {wanted}, but got {settings}")
