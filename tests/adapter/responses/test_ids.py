"""Tests of the ids of responses and their items."""

from __future__ import annotations

import pytest
from latimer.adapter.responses.items import Place, item_id, new_response_id, place_of
from latimer.adapter.store.records import time_of


@pytest.mark.parametrize("is_input", [False, True])
@pytest.mark.parametrize("index", [0, 1, 4_000])
def test_an_item_names_its_place(index: int, is_input: bool) -> None:
    """The id of an item leads to its response and its place there."""
    response, created_at = new_response_id()
    assert len(response) == len("resp_") + 48
    assert time_of(response) == created_at
    for prefix in ("msg_", "rs_", "fc_", "ctc_"):
        item = item_id(prefix, response, index, is_input)
        assert len(item) == len(prefix) + 48
        assert place_of(item) == Place(response, index, is_input)


@pytest.mark.parametrize("item", ["msg_1", "", "msg_" + "g" * 48, "resp_" + "0" * 48])
def test_other_ids_have_no_place(item: str) -> None:
    """The ids of other servers, and of responses, name no item."""
    assert place_of(item) is None
