"""Tests of JSON in parts."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter.parts import LEVELS, PART, ChunkedJson, count_values, most_values
from support.turns import silence

LONG = 'aé"\\\n😀\u2028' * 100_000
VALUES: list[Any] = [
    None, True, 1.5, "", "text", {}, [], {"a": {}}, [[], {}], {"": [None, {"b": "\0"}]},
    {"a": [1, 2, {"b": [3, {"c": {"d": {"e": [{"f": [4]}, 5]}}}]}], "g": -0.0}, LONG, [LONG, LONG],
]  # fmt: skip


@pytest.mark.parametrize("levels", [0, 1, LEVELS])
def test_parts_are_the_json_of_a_value(levels: int) -> None:
    """The parts of a value are the bytes that orjson makes of it at once."""
    for value in VALUES:
        parts = ChunkedJson()
        parts.add_value(value, levels)
        assert b"".join(parts.end()) == orjson.dumps(value)


def test_parts_have_a_size() -> None:
    """A long text and a long list have several parts, of a bounded size each."""
    for value in ("x" * (5 * PART), ["x" * 1_000] * 5_000):
        parts = ChunkedJson()
        parts.add_value(value)
        sizes = list(map(len, parts.end()))
        assert len(sizes) > 5
        assert max(sizes) < 3 * PART


NAMES = st.sampled_from(["", "a", "b", 'é"', "\\\\", "x" * 600, "k,[]{}:"])
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | NAMES
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=40
)


@given(JSON)
def test_values_are_counted_without_strings(value: Any) -> None:
    """Arrays and objects are counted exactly, and marks in strings do not count."""
    text = orjson.dumps([value] * 3)
    containers, fields, values = count_values(text)
    bare = text
    for name in ("k,[]{}:",):
        bare = bare.replace(orjson.dumps(name), b"")
    assert containers == bare.count(b"[") + bare.count(b"{")
    assert fields == bare.count(b":")
    assert values == containers + bare.count(b",") <= most_values(text)


@pytest.mark.timed
def test_encoding_does_not_hold_the_interpreter() -> None:
    """While a text of 100 MB is encoded in a thread, other threads run every few milliseconds."""
    value = {"url": "A" * 100_000_000}

    parts = min(silence(lambda: ChunkedJson().add_value(value)) for _ in range(3))
    at_once = min(silence(lambda: orjson.dumps(value)) for _ in range(3))
    assert parts < at_once / 3
