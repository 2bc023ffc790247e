"""Tests of the items of stored responses."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.responses.items import (
    history,
    input_items,
    items_of,
    named,
    new_response_id,
    place_of,
    turn_items,
)
from latimer.adapter.store.records import Stored


def stored(given: Any, *output: dict[str, Any]) -> Stored:
    """Return a stored response with an input and output items."""
    name, created_at = new_response_id()
    reply = {"id": name, "output": [*output]}
    return Stored(name, "response", "", created_at, "m", "req_0", {}, {"input": given}, reply)


CASES = [
    ("Hi", {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}),
    (
        {"role": "assistant", "content": "Ho"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Ho", "annotations": [], "logprobs": []}],
        },
    ),
    (
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:x", "detail": "auto"}],
        },
    ),
    (
        {"type": "function_call_output", "call_id": "call_1", "output": "3", "status": None},
        {"type": "function_call_output", "call_id": "call_1", "output": "3"},
    ),
]


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_an_item_is_listed_with_id_status_and_parts(given: Any, expected: dict[str, Any]) -> None:
    """An item that a client sent in a short form is listed in the long one."""
    response = stored(given if isinstance(given, str) else [given])
    (found,) = input_items(response)
    place = place_of(found.pop("id"))
    assert place is not None
    assert (place.response, place.index, place.is_input) == (response.id, 0, True)
    assert found.pop("status") == "completed"
    assert found == expected


def test_an_item_keeps_its_own_id_and_status() -> None:
    """Ids and statuses of replayed items stay."""
    item = {"type": "function_call", "id": "fc_9", "status": "incomplete", "call_id": "call_1",
            "name": "f", "arguments": "{}"}  # fmt: skip
    assert input_items(stored([item])) == [item]


@pytest.mark.parametrize("wrong", [None, "", 5, "x" * 65, {"a": "b"}])
def test_an_id_that_no_client_could_read_is_replaced(wrong: Any) -> None:
    """An item without an id, or with one that is not a short text, is listed with a new one."""
    (found,) = input_items(stored([{"role": "user", "content": "Hi", "id": wrong}]))
    assert place_of(found["id"]) is not None


def test_items_of_a_conversation_have_ids_of_their_own() -> None:
    """Two equal items have different ids, with the prefixes of their types."""
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    ids = [one["id"] for one in named([call, call, {"role": "user", "content": "Hi"}])]
    assert len({*ids}) == 3
    assert [one.partition("_")[0] for one in ids] == ["fc", "fc", "msg"]
    assert {len(one.partition("_")[2]) for one in ids} == {48}


def test_a_turn_has_the_items_of_its_input_and_output() -> None:
    """A response adds its input in the form of lists, and its output as it is."""
    answer = {"type": "message", "id": "msg_1", "role": "assistant"}
    response = stored("Hi", answer)
    assert turn_items(response.id, "Hi", [answer]) == [*input_items(response), answer]


def test_reasoning_has_a_summary_and_no_status() -> None:
    """A replayed thought without a summary gets an empty one, which clients require."""
    (found,) = input_items(stored([{"type": "reasoning", "content": []}]))
    assert found["summary"] == []
    assert "status" not in found


def test_a_history_has_input_and_output_of_each_response() -> None:
    """The items of a chain are in the order of the conversation."""
    answers = [{"type": "message", "id": f"msg_{i}", "role": "assistant"} for i in range(2)]
    chain = [stored("a", answers[0]), stored([{"role": "user", "content": "b"}], answers[1])]
    assert history(chain) == [
        *items_of("a"), answers[0], {"role": "user", "content": "b"}, answers[1],
    ]  # fmt: skip
