"""Tests of the single edits of right responses, and of the page with the share that is caught."""

from __future__ import annotations

import json
from typing import Any

import pytest
from suite.mutations import (
    EDITS,
    GONE,
    HARMLESS,
    PAGE,
    Result,
    edited,
    harmless,
    page,
    places,
    table,
)

LEAST, LEAST_OF_A_GROUP = 99.0, 95.0
REPLY: dict[str, Any] = {"data": [{"id": "a", "n": 1}, {"id": "b", "n": 2}, {"id": "c"}]}


def test_the_last_value_at_a_place_is_edited() -> None:
    """Of several values at a place, the last one changes, in a copy."""
    done, found = edited(REPLY, ("data", "*", "n"), int, EDITS[int]["one more"])
    assert done
    assert found == {"data": [{"id": "a", "n": 1}, {"id": "b", "n": 3}, {"id": "c"}]}
    assert REPLY["data"][1]["n"] == 2


@pytest.mark.parametrize(
    ("place", "kind", "left"),
    [
        (("data", "*", "n"), int, [{"id": "a", "n": 1}, {"id": "b"}, {"id": "c"}]),
        (("data", "*"), dict, [{"id": "a", "n": 1}, {"id": "b", "n": 2}]),
    ],
)
def test_a_value_can_be_dropped(place: tuple[str, ...], kind: type, left: list[Any]) -> None:
    """A key, or an element of a list, is gone after the edit."""
    assert edited(REPLY, place, kind, lambda value: GONE) == (True, {"data": left})


def test_an_edit_without_effect_is_none() -> None:
    """A place that is absent, or that has another type, stays as it is."""
    for place, kind in ((("data", "*", "m"), int), (("data", "*", "n"), str)):
        assert edited(REPLY, place, kind, EDITS[int]["one more"]) == (False, REPLY)


def test_all_places_are_found() -> None:
    """Each key and each element has a place; what clients name themselves has one for all keys."""
    value = {"id": "a", "metadata": {"x": "1", "y": "2"}}
    assert {*places(value)} == {
        ((), dict), (("id",), str), (("metadata",), dict), (("metadata", "*"), str),
    }  # fmt: skip


def test_the_table_counts_by_group() -> None:
    """The share is that of the edits that break a clause, rounded down."""
    results = [Result("errors", "a.b", ""), Result("errors", "", "fine"), Result("errors", "", "")]
    assert "| errors | 3 | 1 | 2 | 1 | 50.0 % |" in table(results)
    assert "- `x`\n" in page({"x": results[2]})


def test_the_published_shares_are_high_enough() -> None:
    """Of the edits that break a clause, the checks catch at least 99 %, and 90 % of each group."""
    rows = [
        line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if " % |" in line
    ]
    shares = {row[0]: float(row[-1].removesuffix(" %")) for row in rows}
    assert len(shares) > 20
    assert shares.pop("all") >= LEAST
    assert {name: share for name, share in shares.items() if share < LEAST_OF_A_GROUP} == {}


def test_the_page_has_the_reasons() -> None:
    """The page has each reason for which an edit breaks no clause, with the number of edits."""
    text = PAGE.read_text()
    assert [why for why in harmless().values() if f"| {why} | " not in text] == []
    assert all(json.loads(HARMLESS.read_text()).values())
