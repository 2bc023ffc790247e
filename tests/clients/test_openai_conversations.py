"""Tests of conversations with the official `openai` client, on each kind of database."""

from __future__ import annotations

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.conversations import Message
from openai.types.responses import ResponseFunctionToolCall, ResponseInputItemParam

ITEMS: list[ResponseInputItemParam] = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "21 degrees"},
    {"role": "assistant", "content": "It is warm."},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "run", "input": "ls"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "a.txt"},
]


def test_a_conversation(stored_sdk: OpenAI) -> None:
    """A conversation is created, retrieved, updated and deleted."""
    made = stored_sdk.conversations.create(metadata={"a": "b"}, items=ITEMS[:1])
    assert stored_sdk.conversations.retrieve(made.id) == made
    changed = stored_sdk.conversations.update(made.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"}
    assert stored_sdk.conversations.retrieve(made.id) == changed
    assert stored_sdk.conversations.delete(made.id).deleted
    for call in (stored_sdk.conversations.retrieve, stored_sdk.conversations.delete):
        with pytest.raises(NotFoundError, match=f"Conversation with id '{made.id}' not found"):
            call(made.id)


def test_items_of_a_conversation(stored_sdk: OpenAI) -> None:
    """Items of every type are added, listed in both orders and by pages, and deleted."""
    name = stored_sdk.conversations.create().id
    items = stored_sdk.conversations.items
    added = items.create(name, items=ITEMS)
    assert [one.type for one in added.data] == [one.get("type", "message") for one in ITEMS]
    assert [*items.list(name, order="asc", limit=2)] == added.data
    assert [*items.list(name)] == added.data[::-1]
    call = added.data[2]
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.id is not None
    assert items.retrieve(call.id, conversation_id=name) == call
    assert items.delete(call.id, conversation_id=name).id == name
    with pytest.raises(NotFoundError, match=f"Item with id '{call.id}' not found"):
        items.retrieve(call.id, conversation_id=name)
    assert len([*items.list(name)]) == len(ITEMS) - 1


def test_what_is_listed_can_be_added_to_another_conversation(stored_sdk: OpenAI) -> None:
    """A conversation is copied by the items that a list returns, once."""
    first, second = (stored_sdk.conversations.create(items=some).id for some in (ITEMS, []))
    items = stored_sdk.conversations.items
    copied: list[ResponseInputItemParam] = [
        one.model_dump()  # type: ignore[misc]
        for one in items.list(first, order="asc")
    ]
    assert items.create(second, items=copied).data == [*items.list(first, order="asc")]
    with pytest.raises(BadRequestError, match="Duplicate item found with id"):
        items.create(second, items=copied[:1])


def test_a_client_may_delete_what_it_lists(stored_sdk: OpenAI) -> None:
    """Pages continue at the right place after their last item was deleted."""
    name = stored_sdk.conversations.create(items=[{"role": "user", "content": "Hi"}] * 7).id
    items = stored_sdk.conversations.items
    count = 0
    for one in items.list(name, limit=2):
        assert isinstance(one, Message)
        items.delete(one.id, conversation_id=name)
        count += 1
    assert count == 7
    assert [*items.list(name)] == []


@pytest.mark.parametrize("name", ["conv_0660e9ffc1636faff6bf09c7", "none", "conv_\0"])
def test_a_response_needs_a_conversation_that_exists(stored_sdk: OpenAI, name: str) -> None:
    """A response in an unknown conversation is a 404, also with an id that no database takes."""
    with pytest.raises(NotFoundError, match="Conversation with id"):
        stored_sdk.responses.create(model="demo", input="Hi", conversation=name)
