"""Tests of the operations on stored chat completions, over the demo model and a store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from support.engines.echo import Echo
from support.stored import Keyed, client_of, error_of, opened, record
from support.turns import measured

H = "/v1/chat/completions"
NONE = "chatcmpl-0660e9ffc1636faff6bf09c7"
HELLO = {"role": "user", "content": "Hello!"}
LOGPROB = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]}


class Server(Keyed):
    """A client of the operations on chat completions."""

    root = H

    async def made(self, **body: Any) -> Any:
        """Create a completion, by default a stored one, and return it."""
        asked = {"model": "demo", "messages": [HELLO], "max_tokens": 2, "store": True, **body}
        reply = await self.send("POST", "", asked)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def listed(self, query: str = "") -> list[str]:
        """Return the ids of a page."""
        reply = await self.send("GET", query)
        assert reply.status_code == 200, reply.text
        return [one["id"] for one in reply.json()["data"]]


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    """Return a server without keys; its store has what other tests stored."""
    async with client_of() as client:
        yield Server(client)


async def test_a_completion_is_retrieved_as_it_was_made(server: Server) -> None:
    """A stored completion is retrieved with its choices, log-probabilities and metadata."""
    made = await server.made(n=2, logprobs=True, metadata={"a": "b"}, seed=7, user="ann")
    reply = await server.send("GET", f"/{made['id']}")
    found = reply.json()
    for choice in made["choices"]:
        choice["message"] |= {"tool_calls": None, "function_call": None}
    assert {name: found[name] for name in made} == made
    assert found["metadata"] == {"a": "b"}
    assert (found["seed"], found["input_user"]) == (7, "ann")
    assert found["request_id"].startswith("req_")
    assert found["request_id"] != reply.headers["x-request-id"]


async def test_lists_have_pages_and_filters(server: Server) -> None:
    """A list is filtered by model and metadata, in both orders, and `after` continues it."""
    ids = []
    for number in range(5):
        mark = {"test": "pages", "a [b]&=é": str(number % 2)}
        model = "org/one" if number < 3 else "two"
        ids.append((await server.made(metadata=mark, model=model))["id"])
    mine = "?metadata%5Btest%5D=pages"
    assert await server.listed(mine) == ids
    assert await server.listed(f"{mine}&order=desc") == ids[::-1]
    assert await server.listed(f"{mine}&model=org/one") == ids[:3]
    assert await server.listed(f"{mine}&metadata[a%20[b]%26%3D%C3%A9]=1") == ids[1::2]
    assert await server.listed(f"{mine}&metadata[none]=1") == []
    assert await server.listed(f"{mine}&after={ids[1]}&limit=2") == ids[2:4]
    assert await server.listed(f"{mine}&after={ids[3]}&order=desc") == ids[2::-1]
    assert await server.listed(f"{mine}&after=") == ids
    for limit, has_more in ((4, True), (5, False)):
        found = (await server.send("GET", f"{mine}&limit={limit}")).json()
        ends = (found["first_id"], found["last_id"], found["has_more"])
        assert ends == (ids[0], ids[limit - 1], has_more)


async def test_a_client_may_delete_what_it_lists(server: Server) -> None:
    """Pages continue at the right place after the item that `after` names was deleted."""
    ids = [(await server.made(metadata={"test": "delete"}))["id"] for _ in range(5)]
    query = "?metadata[test]=delete&limit=2"
    seen: list[str] = []
    while found := await server.listed(query + (f"&after={seen[-1]}" if seen else "")):
        seen += found
        for one in found:
            assert (await server.send("DELETE", f"/{one}")).json()["deleted"] is True
    assert seen == ids


async def test_metadata_is_replaced(server: Server) -> None:
    """An update replaces all metadata, which lists then find; null removes it."""
    name = (await server.made(metadata={"test": "update", "a": "b"}))["id"]
    for sent, found in (({"test": "updated"}, {"test": "updated"}), (None, {})):
        reply = await server.send("POST", f"/{name}", {"metadata": sent, "model": "other"})
        assert reply.headers["x-latimer-ignored"] == "model"
        for body in (reply.json(), (await server.send("GET", f"/{name}")).json()):
            assert (body["metadata"], body["model"]) == (found, "demo")
        assert await server.listed("?metadata[test]=update") == []
        assert await server.listed("?metadata[test]=updated") == ([name] if found else [])


async def test_messages_are_those_of_the_request(server: Server) -> None:
    """The messages of a request are listed, and `after` continues after one of them."""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    sent = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    name = (await server.made(messages=sent))["id"]
    found = (await server.send("GET", f"/{name}/messages")).json()
    assert [(one["content"], one["content_parts"]) for one in found["data"]] == [
        ("Be brief.", None),
        ("Hello!", parts),
    ]
    assert await server.listed(f"/{name}/messages?after={name}-0") == [f"{name}-1"]
    assert await server.listed(f"/{name}/messages?order=desc&limit=1") == [f"{name}-1"]
    for after in ("1", f"{name}-2", f"{NONE}-0", name):
        status, message, param, code = error_of(
            await server.send("GET", f"/{name}/messages?after={after}")
        )
        assert (status, param, code) == (400, "after", "invalid_value")
        assert message == (
            f"Invalid 'after': '{after}' is not the id of a message of this chat completion. Send "
            "the 'last_id' of the previous page, or omit it."
        )


@pytest.mark.parametrize("name", [NONE, "none", "a b", "%00", "%F0%9F%98%80", "x" * 3000])
async def test_unknown_ids(server: Server, name: str) -> None:
    """An id that does not exist, of any spelling, is a 404 in each operation."""
    for method, path, body in (
        ("GET", "", None), ("DELETE", "", None), ("POST", "", {"metadata": {}}),
        ("GET", "/messages", None),
    ):  # fmt: skip
        reply = await server.send(method, f"/{name}{path}", body)
        status, message, param, code = error_of(reply)
        assert (status, param, code) == (404, None, None)
        assert message.startswith("Chat completion with id '")
        assert message.endswith("' not found.")
        assert len(message) < 300


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("order=up", "order"), ("after=none", "after"), ("after=%00", "after"),
     ("metadata=a", "metadata"), ("metadata[a]=%00", "metadata"), ("model=%ff", None)],
)  # fmt: skip
async def test_invalid_queries_are_400(server: Server, query: str, param: str | None) -> None:
    """An invalid query of a list is a 400 that names the parameter."""
    reply = await server.send("GET", f"?{query}")
    assert error_of(reply)[0::2] == (400, param)


async def test_methods(server: Server) -> None:
    """Each path lists its methods in a 405, and `HEAD` is `GET` without its body."""
    for path, allowed in (
        ("", "GET, HEAD, POST"),
        (f"/{NONE}", "GET, HEAD, POST, DELETE"),
        (f"/{NONE}/messages", "GET, HEAD"),
    ):
        reply = await server.send("PATCH", path, {})
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
    name = (await server.made())["id"]
    for path in ("?limit=1", f"/{name}", f"/{name}/messages"):
        head, get = await server.send("HEAD", path), await server.send("GET", path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("shared", [False, True])
async def test_each_key_has_its_own(shared: bool) -> None:
    """A key's completions do not exist for another key, with shared prefixes too."""
    keys = ["sk-one", "sk-two"]
    async with client_of(api_keys=keys, share_prefixes=shared) as client:
        one, two = (Server(client, key) for key in keys)
        name = (await one.made(metadata={"a": "b"}))["id"]
        for method, path, body in (
            ("GET", "", None), ("POST", "", {"metadata": {}}), ("GET", "/messages", None),
            ("DELETE", "", None),
        ):  # fmt: skip
            assert (await two.send(method, f"/{name}{path}", body)).status_code == 404
        assert await two.listed() == []
        assert await two.listed("?metadata[a]=b") == []
        assert await one.listed("?metadata[a]=b") == [name]
        assert (await Server(client).send("GET", f"/{name}")).status_code == 401


async def test_strict_refuses_unknown_parameters() -> None:
    """With `strict`, unknown parameters of queries and updates are errors."""
    async with client_of(strict=True) as client:
        server = Server(client)
        for method, path, body in (
            ("GET", "?foo=1", None),
            ("GET", f"/{NONE}/messages?foo=1", None),
            ("POST", f"/{NONE}", {"metadata": {}, "foo": 1}),
        ):
            status, message, param, code = error_of(await server.send(method, path, body))
            assert (status, param, code) == (400, "foo", "unknown_parameter")
            assert message == "Unknown parameter: 'foo'."


async def test_a_server_without_a_store() -> None:
    """Without a store, completions are created, and the operations are a 404 that says why."""
    async with client_of(store="off") as client:
        server = Server(client)
        assert (await server.made(store=False))["object"] == "chat.completion"
        for method, path, body in (
            ("GET", "", None), ("GET", f"/{NONE}", None), ("DELETE", f"/{NONE}", None),
            ("POST", f"/{NONE}", {"metadata": {}}), ("GET", f"/{NONE}/messages", None),
        ):  # fmt: skip
            reply = await server.send(method, path, body)
            assert error_of(reply) == (
                404,
                f"This server does not serve {method} {H}{path}, because it runs with "
                'store="off". Start it with store="memory", or with a file.',
                None,
                "unsupported_endpoint",
            )


@pytest.mark.timed
def test_large_responses_leave_the_loop_to_others(tmp_path: Path) -> None:
    """Completions with many log-probabilities, and large images, do not block the event loop."""
    file = str(tmp_path / "store.db")
    large = record("Hi", image="data:image/png;base64," + "A" * 20_000_000)
    token = {**LOGPROB, "top_logprobs": [LOGPROB] * 20}
    choice: dict[str, Any] = large.reply["choices"][0]
    choice["logprobs"] = {"content": [token] * 4_000, "refusal": None}

    async def keep() -> None:
        async with opened(file) as store:
            assert store.keep(large)

    asyncio.run(keep())
    app = OpenAIAdapter(Echo(context=64), store=file)
    with (
        measured(lambda: app) as (address, loop),
        httpx2.Client(base_url=address, timeout=60) as client,
    ):
        client.get(H)
        loop.longest = 0.0
        for path in (H, f"{H}/{large.id}", f"{H}/{large.id}/messages"):
            reply = client.get(path)
            assert reply.status_code == 200
            assert len(reply.content) > 4_000_000
    assert loop.longest < 0.05
