"""Tests of the operations on conversations, over a store in memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from support.stored import PIXEL, Keyed, client_of, error_of

C = "/v1/conversations"
NONE = "conv_0660e9ffc1636faff6bf09c7"
HELLO = {"role": "user", "content": "Hello!"}
LONG = {"type": "message", "status": "completed", "role": "user"}
PARTS = [{"type": "input_text", "text": "Hello!"}]
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}


class Server(Keyed):
    """A client of the operations on conversations."""

    root = C

    async def made(self, *items: dict[str, Any], **body: Any) -> str:
        """Create a conversation and return its id."""
        reply = await self.send("POST", "", {"items": [*items], **body})
        assert reply.status_code == 200, reply.text
        name: str = reply.json()["id"]
        return name

    async def listed(self, name: str, query: str = "?order=asc") -> Any:
        """Return a list of items."""
        reply = await self.send("GET", f"/{name}/items{query}")
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """Return a server without keys."""
    async with client_of() as client:
        yield Server(client)


async def test_a_conversation_is_created_updated_and_deleted(server: Server) -> None:
    """A conversation has four keys; its metadata are replaced, and null removes them."""
    made = (await server.send("POST", "", {"metadata": {"a": "b"}})).json()
    assert re.fullmatch("conv_[0-9a-f]{48}", made["id"])
    assert isinstance(made["created_at"], int)
    assert made == {
        "id": made["id"],
        "object": "conversation",
        "created_at": made["created_at"],
        "metadata": {"a": "b"},
    }
    path = f"/{made['id']}"
    assert (await server.send("GET", path)).json() == made
    for sent, found in (({"c": "d"}, {"c": "d"}), (None, {})):
        reply = await server.send("POST", path, {"metadata": sent})
        assert reply.json() == {**made, "metadata": found}
        assert (await server.send("GET", path)).json() == reply.json()
    reply = await server.send("DELETE", path)
    assert reply.json() == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    assert (await server.send("GET", path)).status_code == 404


@pytest.mark.parametrize("body", [{}, {"items": None, "metadata": None}, {"items": []}])
async def test_a_conversation_can_be_empty(server: Server, body: Any) -> None:
    """Without items and metadata it has none."""
    made = (await server.send("POST", "", body)).json()
    assert made["metadata"] == {}
    assert await server.listed(made["id"]) == {
        "object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False,
    }  # fmt: skip


async def test_items_are_normalised(server: Server) -> None:
    """Items have ids, a status and parts, also those that a client sent in a short form."""
    image = {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]}
    answer = {"role": "assistant", "content": "Hi!", "id": "msg_mine", "phase": None}
    name = await server.made(HELLO, image, answer)
    added = (await server.send("POST", f"/{name}/items", {"items": [THOUGHT, CALL, RESULT]})).json()
    listed = await server.listed(name)
    assert listed["data"][3:] == added["data"]
    assert added | {"data": []} == {
        "object": "list",
        "data": [],
        "first_id": added["data"][0]["id"],
        "last_id": added["data"][2]["id"],
        "has_more": False,
    }
    ids = [one.pop("id") for one in listed["data"]]
    assert len({*ids}) == 6
    assert [re.sub("_.*", "", one) for one in ids] == ["msg", "msg", "msg", "rs", "fc", "fco"]
    assert ids[2] == "msg_mine"
    text = {"type": "output_text", "text": "Hi!", "annotations": [], "logprobs": []}
    assert listed["data"] == [
        {**LONG, "content": PARTS},
        {**LONG, "content": [{"type": "input_image", "image_url": PIXEL, "detail": "auto"}]},
        {**LONG, "role": "assistant", "content": [text]},
        {**THOUGHT, "summary": []},
        {**CALL, "status": "completed"},
        {**RESULT, "status": "completed"},
    ]


async def test_pages_of_items(server: Server) -> None:
    """A list begins with the newest item, has pages in both orders, and outlives deletions."""
    name = await server.made(*({**HELLO, "id": f"msg_{i}"} for i in range(20)))
    newest = {"items": [{**HELLO, "id": "msg_20"}]}
    assert (await server.send("POST", f"/{name}/items", newest)).status_code == 200
    page = await server.listed(name, "")
    ids = [f"msg_{i}" for i in range(21)]
    assert [one["id"] for one in page["data"]] == ids[:0:-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("msg_20", "msg_1", True)
    seen: list[str] = []
    query = "?order=asc&limit=2"
    while found := (await server.listed(name, query))["data"]:
        seen += [one["id"] for one in found]
        for one in found:
            assert (await server.send("DELETE", f"/{name}/items/{one['id']}")).status_code == 200
        query = f"?order=asc&limit=2&after={seen[-1]}"
    assert seen == ids


async def test_one_item_is_retrieved_and_deleted(server: Server) -> None:
    """The deletion of an item returns its conversation, which keeps the other items."""
    name = await server.made(HELLO, CALL, metadata={"a": "b"})
    first, second = (await server.listed(name))["data"]
    assert (await server.send("GET", f"/{name}/items/{first['id']}")).json() == first
    reply = await server.send("DELETE", f"/{name}/items/{first['id']}")
    assert reply.json() == (await server.send("GET", f"/{name}")).json()
    assert (await server.listed(name))["data"] == [second]
    for method in ("GET", "DELETE"):
        for item in (first["id"], "\0", "x" * 100):
            reply = await server.send(method, f"/{name}/items/{quote(item)}")
            assert error_of(reply) == (404, f"Item with id '{item}' not found.", None, None)


@pytest.mark.parametrize("name", [NONE, "none", "conv_%00"])
async def test_an_unknown_conversation_is_a_404(server: Server, name: str) -> None:
    """Every operation on a conversation that does not exist is a 404 with OpenAI's text."""
    operations: list[tuple[str, str, Any]] = [
        ("GET", "", None), ("POST", "", {"metadata": {}}), ("DELETE", "", None),
        ("GET", "/items", None), ("POST", "/items", {"items": [HELLO]}),
        ("GET", "/items/msg_1", None), ("DELETE", "/items/msg_1", None),
    ]  # fmt: skip
    shown = name.replace("%00", "\0")
    for method, path, body in operations:
        status, message, *rest = error_of(await server.send(method, f"/{name}{path}", body))
        assert (status, rest) == (404, [None, None]), (method, path)
        assert message == f"Conversation with id '{shown}' not found."


TWICE = "Duplicate item found with id msg_1. Remove duplicate items from your input and try again."
WRONG: list[tuple[Any, str, str | None]] = [
    ({}, "items", "missing_required_parameter"),
    ({"items": None}, "items", "invalid_type"),
    ({"items": [HELLO] * 21}, "items", "array_above_max_length"),
    ({"items": [{"type": "x"}]}, "items[0]", "invalid_value"),
    ({"items": [HELLO, {"role": "x", "content": ""}]}, "items[1]", "invalid_value"),
    ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0]", "invalid_value"),
    ({"items": [{"id": "msg_1"}]}, "items[0]", "invalid_value"),
    ({"items": [{**HELLO, "id": 5}]}, "items[0].id", "invalid_type"),
    ({"items": [{**HELLO, "id": ""}]}, "items[0].id", "empty_string"),
    ({"items": [{**HELLO, "id": "a/b"}]}, "items[0].id", "invalid_value"),
    ({"items": [{**HELLO, "id": "x" * 65}]}, "items[0].id", "string_above_max_length"),
    ({"items": [{**HELLO, "id": "msg_1"}] * 2}, "items", None),
]


@pytest.mark.parametrize(("body", "param", "code"), WRONG, ids=range(len(WRONG)))
async def test_wrong_items_are_rejected(
    server: Server, body: Any, param: str, code: str | None
) -> None:
    """A wrong item is a 400 that names it, and nothing is appended."""
    name = await server.made(CALL)
    reply = await server.send("POST", f"/{name}/items", body)
    status, message, *rest = error_of(reply)
    assert (status, *rest) == (400, param, code)
    assert message == TWICE or code is not None
    assert len((await server.listed(name))["data"]) == 1
    if body.get("items") is not None:
        assert error_of(await server.send("POST", "", body)) == error_of(reply)


async def test_an_id_of_the_conversation_is_taken(server: Server) -> None:
    """An item with the id of an earlier one is a 400."""
    name = await server.made({**HELLO, "id": "msg_1"})
    reply = await server.send("POST", f"/{name}/items", {"items": [{**CALL, "id": "msg_1"}]})
    assert error_of(reply) == (400, TWICE, "items", None)


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("order=x", "order"), ("after=msg_x", "after")],
)
async def test_a_wrong_query_is_rejected(server: Server, query: str, param: str) -> None:
    """A parameter of a list that is not allowed is a 400 that names it."""
    reply = await server.send("GET", f"/{await server.made(HELLO)}/items?{query}")
    status, _, found, _ = error_of(reply)
    assert (status, found) == (400, param)


async def test_wrong_metadata_are_rejected(server: Server) -> None:
    """Metadata are as everywhere: 16 short pairs of texts."""
    pairs = {str(i): "x" for i in range(17)}
    name = await server.made()
    for path in ("", f"/{name}"):
        reply = await server.send("POST", path, {"metadata": pairs})
        assert error_of(reply)[2:] == ("metadata", "object_above_max_properties")


async def test_unknown_fields_are_listed(server: Server) -> None:
    """Unknown fields of requests and items are named in a header; strict servers reject them."""
    body = {"items": [{**HELLO, "mood": "good"}], "name": "x"}
    reply = await server.send("POST", "", body)
    assert reply.headers["x-latimer-ignored"] == "items[0].mood, name"
    async with client_of(strict=True) as client:
        reply = await Server(client).send("POST", "", body)
        assert error_of(reply)[2:] == ("items[0].mood", "unknown_parameter")


async def test_keys_do_not_share_conversations() -> None:
    """Of another key, a conversation and its items do not exist."""
    async with client_of(api_keys=("sk-one", "sk-other")) as client:
        one, other = Server(client, "sk-one"), Server(client, "sk-other")
        name = await one.made({**HELLO, "id": "msg_1"})
        missing = f"Conversation with id '{name}' not found."
        for method, path, body in (
            ("GET", "", None), ("GET", "/items", None), ("GET", "/items/msg_1", None),
            ("POST", "", {"metadata": {}}), ("POST", "/items", {"items": [HELLO]}),
            ("DELETE", "/items/msg_1", None), ("DELETE", "", None),
        ):  # fmt: skip
            reply = await other.send(method, f"/{name}{path}", body)
            assert error_of(reply) == (404, missing, None, None)
        assert len((await one.listed(name))["data"]) == 1


async def test_without_a_store_they_are_refused() -> None:
    """With --store off, every path is a 404 that says so."""
    async with client_of(store="off") as client:
        for method, path in (
            ("POST", ""), ("GET", f"/{NONE}"), ("POST", f"/{NONE}"), ("DELETE", f"/{NONE}"),
            ("GET", f"/{NONE}/items"), ("POST", f"/{NONE}/items"),
            ("GET", f"/{NONE}/items/msg_1"), ("DELETE", f"/{NONE}/items/msg_1"),
        ):  # fmt: skip
            reply = await Server(client).send(method, path, {} if method == "POST" else None)
            status, message, param, code = error_of(reply)
            assert (status, param, code) == (404, None, "unsupported_endpoint")
            assert message.startswith(f"This server does not serve {method} {C}{path}, because")


async def test_a_store_that_fails_is_a_503(tmp_path: Path) -> None:
    """A conversation is not created in a store that cannot be opened."""
    (tmp_path / "store.db").write_bytes(b"no database" * 100)
    async with client_of(store=str(tmp_path / "store.db")) as client:
        reply = await Server(client).send("POST", "", {"items": [HELLO]})
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "store_unavailable"


async def test_a_conversation_that_never_fits_is_rejected() -> None:
    """Items that are larger than the store are a 400, which says what to do."""
    async with client_of(store_size=1) as client:
        server = Server(client)
        large = {"items": [{"role": "user", "content": "x" * 1_100_000}]}
        for path in ("", f"/{await server.made()}/items"):
            status, message, *rest = error_of(await server.send("POST", path, large))
            assert (status, *rest) == (400, "items", "invalid_value")
            assert "a larger store_size." in message
        assert (await client.get("/health")).json()["store"] == {"status": "ok"}


async def test_a_large_conversation(server: Server) -> None:
    """Items of megabytes are appended and returned as they were sent."""
    text = "x" * 3_000_000
    name = await server.made({"role": "user", "content": text}, {"role": "user", "content": text})
    first, second = (await server.listed(name))["data"]
    assert first["content"] == second["content"] == [{"type": "input_text", "text": text}]
