"""Tests of the state of the Responses API over a backend without a model."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from latimer.adapter.endpoints.response_state import keep_turn
from latimer.adapter.responses import items, sealed
from latimer.adapter.responses.lanes import Create, KeptTurns
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import adapting
from support.engines.echo import Echo
from support.stored import error_of

R = "/v1/responses"
ASK = "What is the capital of France?"


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an adapter with two API keys and a store in memory."""
    async with adapting(Echo("Paris.", context=2048), api_keys=["one", "two"]) as made:
        made.headers["authorization"] = "Bearer one"
        yield made


async def created(client: httpx2.AsyncClient, given: Any = ASK, **more: Any) -> dict[str, Any]:
    """Return a new response."""
    body = {"model": "demo", "input": given, "temperature": 0, "max_output_tokens": 24, **more}
    reply = await client.post(R, json=body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


async def test_a_deleted_response_is_named(client: httpx2.AsyncClient) -> None:
    """The error for a chain with a deleted response names that response."""
    first = await created(client)
    second = await created(client, previous_response_id=first["id"])
    third = await created(client, previous_response_id=second["id"])
    assert (await client.delete(f"{R}/{first['id']}")).status_code == 200
    body = {"model": "demo", "input": "x", "previous_response_id": third["id"]}
    error = (await client.post(R, json=body)).json()["error"]
    assert (error["message"], error["code"]) == (
        f"Previous response with id '{first['id']}' not found. '{third['id']}' continues it.",
        "previous_response_not_found",
    )  # fmt: skip


async def test_kept_turns_take_little_more_memory_than_is_counted() -> None:
    """A short turn that a WebSocket keeps takes no block of 4 KiB."""
    kept, count = KeptTurns(), 100
    state: Any = SimpleNamespace(referenced=False, turns=(), chain=None, is_unstored=False)
    request: Any = SimpleNamespace(conversation=None)
    frames = [Create({"input": "Hi"}, 40, "", True, kept.of_connection()) for _ in range(count)]
    usage = {"output_tokens": 1}
    reply = {"id": "resp", "status": "completed", "store": False, "output": [], "usage": usage}
    tracemalloc.start()
    try:
        for frame in frames:
            await keep_turn(frame, request, state, reply)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0 < kept.size < taken < count * 2048


async def test_responses_are_listed(client: httpx2.AsyncClient) -> None:
    """Stored responses have a list with pages and filters, as stored completions have."""
    made = [(await created(client, metadata={"run": "list", "n": str(n)})) for n in range(3)]
    await created(client, metadata={"run": "other"})
    query: dict[str, Any] = {"metadata[run]": "list", "limit": 2, "order": "desc"}
    first = (await client.get(R, params=query)).json()
    assert [one["id"] for one in first["data"]] == [made[2]["id"], made[1]["id"]]
    assert (first["object"], first["has_more"]) == ("list", True)
    assert first["data"][0] == (await client.get(f"{R}/{made[2]['id']}")).json()
    rest = (await client.get(R, params={**query, "after": first["last_id"]})).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([made[0]["id"]], False)
    assert (await client.get(R, params={**query, "model": "none"})).json()["data"] == []
    other = {"authorization": "Bearer two"}
    assert (await client.get(R, params=query, headers=other)).json()["data"] == []
    assert error_of(await client.get(R, params={"after": "x"}))[::2] == (400, "after")


async def test_another_key_sees_nothing(client: httpx2.AsyncClient) -> None:
    """The responses and items of one API key do not exist for another one."""
    made = await created(client)
    other = {"authorization": "Bearer two"}
    for path in ("", "/input_items"):
        reply = await client.get(f"{R}/{made['id']}{path}", headers=other)
        assert reply.status_code == 404
    assert (await client.delete(f"{R}/{made['id']}", headers=other)).status_code == 404
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    for body in (
        {"input": "x", "previous_response_id": made["id"]},
        {"input": [reference, {"role": "user", "content": "x"}]},
    ):
        reply = await client.post(R, json={"model": "demo", **body}, headers=other)
        assert reply.status_code in (400, 404)


async def test_an_incomplete_response_is_continued(client: httpx2.AsyncClient) -> None:
    """A response that the limit cut off is stored, and its text is part of the next prompt."""
    first = await created(client, "Count to 30.", max_output_tokens=16, ignore_eos=True)
    assert first["status"] == "incomplete"
    second = await created(client, "Go on.", previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]


async def test_a_cancelled_response_had_ended(client: httpx2.AsyncClient) -> None:
    """A response without `background` cannot be cancelled."""
    made = await created(client)
    reply = await client.post(f"{R}/{made['id']}/cancel")
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "Cannot cancel a synchronous response."
    assert (await client.post(f"{R}/resp_none/cancel")).status_code == 404


async def test_without_a_store_nothing_is_stored() -> None:
    """With `store="off"` a response says that it is not stored; asking for it is a 400."""
    async with adapting(Echo(context=512), store="off") as client:
        assert (await created(client))["store"] is False
        reply = await client.post(R, json={"model": "demo", "input": "x", "store": True})
        assert reply.json()["error"]["param"] == "store"
        body = {"model": "demo", "input": "x", "previous_response_id": "resp_1"}
        assert (await client.post(R, json=body)).json()["error"]["param"] == "previous_response_id"
        assert (await client.get(f"{R}/resp_1")).status_code == 404


async def test_a_response_in_a_conversation_is_continued_there(client: httpx2.AsyncClient) -> None:
    """`previous_response_id` of a response in a conversation is a 400, which names it."""
    items = [{"role": "user", "content": "My name is Bob."}]
    name = (await client.post("/v1/conversations", json={"items": items})).json()["id"]
    made = await created(client, conversation=name)
    body = {"model": "demo", "input": "x", "previous_response_id": made["id"]}
    status, message, *rest = error_of(await client.post(R, json=body))
    assert (status, rest) == (400, ["previous_response_id", "invalid_value"])
    assert f"belongs to the conversation '{name}'" in message


@pytest.mark.parametrize("background", [False, True])
async def test_a_conversation_gets_items_of_a_response_that_is_not_stored(
    client: httpx2.AsyncClient, background: bool
) -> None:
    """With `store: false` the response is not retrieved later, and its items are appended."""
    name = (await client.post("/v1/conversations", json={})).json()["id"]
    more = {"conversation": name, "store": False, "background": background}
    made = await created(client, "My name is Bob.", **more)
    assert made["store"] is False
    path = f"/v1/conversations/{name}/items?order=asc"
    async with asyncio.timeout(10):
        while len(items := (await client.get(path)).json()["data"]) < 2:
            assert background
    assert [item["role"] for item in items] == ["user", "assistant"]
    assert items[0]["content"] == [{"type": "input_text", "text": "My name is Bob."}]
    if not background:
        assert (await client.get(f"{R}/{made['id']}")).status_code == 404
    again = await created(client, "x", conversation=name)
    alone = await created(client, "x")
    assert again["usage"]["input_tokens"] > alone["usage"]["input_tokens"] + 8


async def test_a_conversation_is_not_in_the_way_of_chat(client: httpx2.AsyncClient) -> None:
    """Fields of Responses in a chat request are unknown, and store nothing."""
    async with adapting(Echo("Paris.", context=512), store="off") as other:
        body = {"model": "demo", "messages": [{"role": "user", "content": "x"}],
                "background": True, "conversation": "conv_1", "max_tokens": 4}  # fmt: skip
        reply = await other.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-latimer-ignored"] == "background, conversation"


async def test_errors_of_earlier_items_name_them(client: httpx2.AsyncClient) -> None:
    """An item of a conversation that nothing here can read is named by its id."""
    part = {"type": "input_file", "file_url": "https://example.com/x.pdf"}
    items = [{"role": "user", "content": [part], "id": "msg_x"}]
    name = (await client.post("/v1/conversations", json={"items": items})).json()["id"]
    body = {"model": "demo", "input": "x", "conversation": name}
    _, _, param, _ = error_of(await client.post(R, json=body))
    assert param == "conversation[msg_x].content[0].file_url"


async def test_reasoning_that_is_not_stored_is_listed(client: httpx2.AsyncClient) -> None:
    """A reasoning item with an unknown id is named in `x-latimer-ignored`."""
    thought = {"type": "reasoning", "id": "rs_none", "summary": []}
    body = {"model": "demo", "input": [thought, {"role": "user", "content": "x"}]}
    reply = await client.post(R, json={**body, "max_output_tokens": 16})
    assert reply.headers["x-latimer-ignored"] == "input[0]"


async def test_repeated_ids_lose_nothing(client: httpx2.AsyncClient) -> None:
    """Items of one input with the same id are all in the conversation."""
    name = (await client.post("/v1/conversations", json={})).json()["id"]
    call = {"type": "function_call", "id": "x", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "id": "x", "call_id": "c", "output": "42"}
    given = [{"role": "user", "content": "a?"}, call, output]
    first = await created(client, given, conversation=name)
    listed = (await client.get(f"/v1/conversations/{name}/items?order=asc")).json()["data"]
    assert [item["type"] for item in listed] == [
        "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    second = await created(client, "more", conversation=name)
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.parametrize("kind", ["function", "custom"])
async def test_a_cut_call_ends_no_conversation(kind: str) -> None:
    """A call that the limit cut is not in the prompt, in every way of continuing it."""
    async with adapting(LlamaCpp(context=2048)) as client:
        tool = {"type": kind, "name": "patch"}
        if kind == "function":
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
            tool["parameters"] = {**schema, "required": ["text"]}  # type: ignore[assignment]
        name = (await client.post("/v1/conversations", json={})).json()["id"]
        more = {"tools": [tool], "tool_choice": {"type": kind, "name": "patch"}}
        cut = await created(client, "use it", max_output_tokens=16, **more)
        assert cut["status"] == "incomplete"
        await created(client, "use it", max_output_tokens=16, conversation=name, **more)
        replayed = [{"role": "user", "content": "use it"}, *cut["output"]]
        found = [
            await created(client, "go on", previous_response_id=cut["id"]),
            await created(client, [*replayed, {"role": "user", "content": "go on"}]),
            await created(client, "go on", conversation=name),
        ]
        assert len({one["usage"]["input_tokens"] for one in found}) == 1


async def test_only_references_are_replaced(client: httpx2.AsyncClient) -> None:
    """An item with the id of a stored one is stored as the client sent it."""
    first = await created(client)
    name = first["output"][0]["id"]
    part = {"type": "output_text", "text": "EDITED"}
    edited = {"type": "message", "role": "assistant", "id": name, "content": [part]}
    question = {"role": "user", "content": ASK}
    made = await created(
        client, [question, edited, {"type": "item_reference", "id": name}, question]
    )
    listed = (await client.get(f"{R}/{made['id']}/input_items?order=asc")).json()["data"]
    texts = [item["content"][0]["text"] for item in listed[1:3]]
    assert texts == ["EDITED", first["output"][0]["content"][0]["text"]]


async def test_a_reference_with_null_members(client: httpx2.AsyncClient) -> None:
    """An item with an id and a null role is a reference; a response is stored with what it names.

    The rest of the conversation has it, and it is listed.
    """
    first = await created(client)
    reference = {"id": first["output"][0]["id"], "role": None}
    second = await created(client, [reference, {"role": "user", "content": "x"}])
    listed = (await client.get(f"{R}/{second['id']}/input_items?order=asc")).json()["data"]
    assert listed[0] == first["output"][0]
    third = await created(client, "y", previous_response_id=second["id"])
    whole = [*listed, *second["output"], {"role": "user", "content": "y"}]
    assert third["usage"]["input_tokens"] == (await created(client, whole))["usage"]["input_tokens"]


async def test_reasoning_with_the_id_of_a_message(client: httpx2.AsyncClient) -> None:
    """Reasoning that names another item is not read, and the next turn does not read that item."""
    first = await created(client)
    thought = {"type": "reasoning", "id": first["output"][0]["id"], "summary": []}
    second = await created(client, [thought, {"role": "user", "content": "x"}])
    third = await created(client, "y", previous_response_id=second["id"])
    said = [{"role": "user", "content": "x"}, *second["output"], {"role": "user", "content": "y"}]
    assert third["usage"]["input_tokens"] == (await created(client, said))["usage"]["input_tokens"]


async def test_a_reference_to_tools(client: httpx2.AsyncClient) -> None:
    """A reference to a stored item with tools adds them, as the item itself does."""
    tools = {"type": "additional_tools", "tools": [{"type": "function", "name": "weather"}]}
    question = {"role": "user", "content": ASK}
    first = await created(client, [tools, question])
    listed = (await client.get(f"{R}/{first['id']}/input_items?order=asc")).json()["data"]
    second = await created(client, [{"type": "item_reference", "id": listed[0]["id"]}, question])
    assert second["usage"]["input_tokens"] == first["usage"]["input_tokens"]


async def test_errors_of_earlier_tools_name_them(client: httpx2.AsyncClient) -> None:
    """A tool of a stored item that is at odds with one of the request is named by its item."""
    tools = {"type": "additional_tools", "id": "t", "tools": [{"type": "custom", "name": "f"}]}
    given = [tools, {"role": "user", "content": "x"}]
    name = (await client.post("/v1/conversations", json={"items": given})).json()["id"]
    made = await created(client, given)
    other = {"model": "demo", "input": "y", "tools": [{"type": "function", "name": "f"}]}
    for context, value in (("conversation", name), ("previous_response_id", made["id"])):
        _, message, param, _ = error_of(await client.post(R, json={**other, context: value}))
        assert (param, "another tool" in message) == (f"{context}[t].tools[0].name", True)


async def test_an_empty_text_is_no_item(client: httpx2.AsyncClient) -> None:
    """A response that continues another one without a new text adds no message of the user."""
    first = await created(client)
    second = await created(client, "", previous_response_id=first["id"])
    assert (await client.get(f"{R}/{second['id']}/input_items")).json()["data"] == []
    third = await created(client, "y", previous_response_id=second["id"])
    user = [{"role": "user", "content": text} for text in (ASK, "y")]
    whole = [user[0], *first["output"], *second["output"], user[1]]
    assert third["usage"]["input_tokens"] == (await created(client, whole))["usage"]["input_tokens"]


async def test_a_replay_has_its_own_numbers(client: httpx2.AsyncClient) -> None:
    """An event beyond those of a stored stream is a 400, and not an empty stream."""
    made = await created(client)
    path = f"{R}/{made['id']}?stream=true&starting_after="
    assert "response.completed" in (await client.get(f"{path}7")).text
    status, message, *rest = error_of(await client.get(f"{path}8"))
    assert (status, rest) == (400, ["starting_after", "invalid_value"])
    assert "has no event after 8" in message


async def test_a_limit_beyond_the_context_is_named(client: httpx2.AsyncClient) -> None:
    """If only the limit is too large, the error is about `max_output_tokens`."""
    body = {"model": "demo", "input": ASK, "max_output_tokens": 100_000}
    _, message, *rest = error_of(await client.post(R, json=body))
    assert rest == ["max_output_tokens", "context_length_exceeded"]
    assert "100000 in 'max_output_tokens'" in message


async def test_an_item_is_in_a_conversation_once(client: httpx2.AsyncClient) -> None:
    """An input that repeats an item of its conversation, or refers to it, is a 400."""
    name = (await client.post("/v1/conversations", json={})).json()["id"]
    (said,) = (await created(client, conversation=name))["output"]
    for item in (said, {"type": "item_reference", "id": said["id"]}):
        body = {"model": "demo", "input": [item], "conversation": name}
        status, message, *rest = error_of(await client.post(R, json=body))
        assert (status, rest) == (400, ["input", None])
        assert message.startswith(f"Duplicate item found with id {said['id']}.")
    listed = (await client.get(f"/v1/conversations/{name}/items")).json()["data"]
    assert len(listed) == 2


async def test_large_inputs_are_read_in_threads(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sealed reasoning is opened, and items get ids, in a thread if the input is large."""
    threads: set[threading.Thread] = set()

    def noted(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def noting(*arguments: Any, **named: Any) -> Any:
            threads.add(threading.current_thread())
            return call(*arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    noted(sealed.Seal, "unseal")
    noted(items, "normalized")
    name = (await client.post("/v1/conversations", json={})).json()["id"]
    foreign = f"{sealed.PREFIX}{'x' * 40_000}"
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": foreign}
    await created(client, [thought, {"role": "user", "content": "x"}], conversation=name)
    assert threads
    assert threading.main_thread() not in threads
