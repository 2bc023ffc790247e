"""Conversations: lists of items that responses continue (contract of responses 1 and 7)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai.types.conversations import Conversation, ConversationDeletedResource
from openai.types.conversations.conversation_item_list import ConversationItemList

from ..check import check, expect
from ..published import first_wrong
from ..target import Api, Reply
from .responses import ASK, R, respond, size, text_of

C = "/conversations"
HELLO = {"role": "user", "content": "Hello"}
SAID = {"role": "assistant", "content": "Hello! I can count."}


async def _send(api: Api, method: str, path: str, body: Any = None) -> Reply:
    data = None if body is None else json.dumps(body).encode()
    return await api.send(method, f"{C}{path}", data, sent=body)


@asynccontextmanager
async def opened(api: Api, *items: Any, **body: Any) -> AsyncIterator[str]:
    """Create a conversation, yield its id, and delete it at the end."""
    made = (await _send(api, "POST", "", {"items": [*items], **body})).ok()
    try:
        yield made["id"]
    finally:
        await _send(api, "DELETE", f"/{made['id']}")


async def items_of(api: Api, name: str, query: str = "?order=asc") -> Any:
    return (await _send(api, "GET", f"/{name}/items{query}")).ok()


def _texts(listed: Any) -> list[str]:
    """Return the texts of the messages in a list of items, without reasoning."""
    found = [item["content"] for item in listed["data"] if item["type"] == "message"]
    return ["".join(part["text"] for part in content) for content in found]


@check("responses.conversation",
       "A conversation is created with metadata, which can be replaced, and retrieved by its id.",
       "should", "R1 R10.56 [PYD]")  # fmt: skip
async def conversation(api: Api) -> None:
    async with opened(api, metadata={"colour": "blue"}) as name:
        found = (await _send(api, "GET", f"/{name}")).ok()
        wrong = first_wrong(Conversation, found)
        expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
        expect(name.startswith("conv_"), f"expected conv_…, but got {name!r}")
        kept = found["metadata"]
        expect(kept == {"colour": "blue"}, f"expected the metadata, but got {kept}")
        changed = (await _send(api, "POST", f"/{name}", {"metadata": {"side": "left"}})).ok()
        expect(changed["metadata"] == {"side": "left"}, f"expected new metadata, but got {changed}")


@check("responses.conversation-items",
       "The items of a conversation are added and listed in their order, and each can be retrieved "
       "and deleted.",
       "should", "R1 R10.56")  # fmt: skip
async def conversation_items(api: Api) -> None:
    async with opened(api, HELLO, SAID) as name:
        added = (await _send(api, "POST", f"/{name}/items", {"items": [HELLO]})).ok()
        found = await items_of(api, name)
        wrong = first_wrong(ConversationItemList, found)
        expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
        wanted = ["Hello", "Hello! I can count.", "Hello"]
        expect(_texts(found) == wanted, f"expected {wanted}, but got {_texts(found)}")
        newest = _texts(await items_of(api, name, "?limit=2"))
        expect(newest == wanted[:0:-1], f"expected the newest first, but got {newest}")
        last = added["data"][0]["id"]
        expect(found["data"][2]["id"] == last, f"expected {last} last, but got {found}")
        one = (await _send(api, "GET", f"/{name}/items/{last}")).ok()
        expect(one == found["data"][2], f"expected the listed item, but got {one}")
        (await _send(api, "DELETE", f"/{name}/items/{last}")).ok()
        rest = _texts(await items_of(api, name))
        expect(rest == wanted[:2], f"expected {wanted[:2]}, but got {rest}")


@check("responses.conversation-continued",
       "A Response reads its conversation, names it, and appends its input and its output.",
       "should", "R7 R10.56")  # fmt: skip
async def conversation_continued(api: Api) -> None:
    plain = await size(api, ASK)
    async with opened(api, HELLO, SAID) as name:
        body = {"conversation": name, "store": True, "max_output_tokens": 16}
        made = await respond(api, ASK, **body)
        count = made["usage"]["input_tokens"]
        expect(count > plain, f"expected more than {plain} input tokens, but got {count}")
        told = made.get("conversation")
        same = isinstance(told, dict) and told.get("id") == name
        expect(same, f"expected the conversation, but got {told}")
        found = await items_of(api, name)
        wanted = ["Hello", "Hello! I can count.", ASK, text_of(made)]
        expect(_texts(found) == wanted, f"expected {wanted}, but got {_texts(found)}")
        again = await respond(api, "Hello", **{**body, "conversation": {"id": name}})
        more = again["usage"]["input_tokens"]
        expect(more > count, f"expected more than {count} input tokens, but got {more}")
    for one in (made, again):
        await api.send("DELETE", f"{R}/{one['id']}")


@check("responses.conversation-unstored",
       "A Response with store false appends its input and its output to its conversation.",
       "should", "R7")  # fmt: skip
async def conversation_unstored(api: Api) -> None:
    async with opened(api, HELLO, SAID) as name:
        made = await respond(api, ASK, conversation=name, store=False, max_output_tokens=16)
        found = _texts(await items_of(api, name))
        wanted = ["Hello", "Hello! I can count.", ASK, text_of(made)]
        expect(found == wanted, f"expected {wanted}, but got {found}")


@check("responses.conversation-parallel",
       "Items that clients append to a conversation at the same time are all there, each with "
       "those that were sent with it.",
       "should", "R1 R10.56")  # fmt: skip
async def conversation_parallel(api: Api) -> None:
    async with opened(api) as name:
        turns = [[{**HELLO, "content": f"{n}?"}, {**SAID, "content": f"{n}!"}] for n in range(8)]
        replies = await asyncio.gather(
            *(_send(api, "POST", f"/{name}/items", {"items": turn}) for turn in turns)
        )
        for one in replies:
            one.ok()
        found = _texts(await items_of(api, name, "?order=asc&limit=100"))
        wanted = [text for n in range(8) for text in (f"{n}?", f"{n}!")]
        expect(sorted(found) == sorted(wanted), f"expected {wanted} in any order, but got {found}")
        pairs = [*zip(found[::2], found[1::2], strict=True)]
        expect(all(one[:-1] == two[:-1] for one, two in pairs), f"expected pairs, but got {found}")


@check("responses.conversation-deleted",
       "A deleted conversation is confirmed as deleted, and then unknown.",
       "should", "R1 R10.56 [PROBE]")  # fmt: skip
async def conversation_deleted(api: Api) -> None:
    async with opened(api, HELLO) as name:
        done = (await _send(api, "DELETE", f"/{name}")).ok()
        wrong = first_wrong(ConversationDeletedResource, done)
        expect(wrong is None, f"expected OpenAI's published type, but it fails at {wrong}")
        valid = (done["id"], done["deleted"]) == (name, True)
        expect(valid, f"expected the id and deleted true, but got {done}")
        for path in (f"/{name}", f"/{name}/items"):
            error = (await _send(api, "GET", path)).error(404)
            text = f"Conversation with id '{name}' not found."
            expect(error["message"].startswith(text), f"expected {text!r}, but got {error}")


@check("responses.conversation-alone",
       "A conversation and a previous_response_id exclude each other: 400, "
       "mutually_exclusive_parameters.",
       "should", "R2.2 R10.56")  # fmt: skip
async def conversation_alone(api: Api) -> None:
    async with opened(api, HELLO) as name:
        made = await respond(api, max_output_tokens=16, store=True)
        body = {"model": api.model, "input": ASK, "conversation": name,
                "previous_response_id": made["id"]}  # fmt: skip
        error = (await api.post(R, body)).error(400)
        await api.send("DELETE", f"{R}/{made['id']}")
    code = error["code"]
    expect(
        code == "mutually_exclusive_parameters",
        f"expected mutually_exclusive_parameters, but got {error}",
    )
