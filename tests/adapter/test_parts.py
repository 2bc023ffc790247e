"""Tests of JSON in parts."""

from __future__ import annotations

import threading
import time
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from latimer.adapter import parts as module
from latimer.adapter.parts import LEVELS, PART, Nested, Parts, count_values, most_values, parse

LONG = 'aé"\\\n😀\u2028' * 100_000
VALUES: list[Any] = [
    None, True, 1.5, "", "text", {}, [], {"a": {}}, [[], {}], {"": [None, {"b": "\0"}]},
    {"a": [1, 2, {"b": [3, {"c": {"d": {"e": [{"f": [4]}, 5]}}}]}], "g": -0.0}, LONG, [LONG, LONG],
]  # fmt: skip


@pytest.mark.parametrize("levels", [0, 1, LEVELS])
def test_parts_are_the_json_of_a_value(levels: int) -> None:
    """The parts of a value are the bytes that orjson makes of it at once."""
    for value in VALUES:
        parts = Parts()
        parts.add_value(value, levels)
        assert b"".join(parts.end()) == orjson.dumps(value)


def test_parts_have_a_size() -> None:
    """A long text and a long list have several parts, of a bounded size each."""
    for value in ("x" * (5 * PART), ["x" * 1_000] * 5_000):
        parts = Parts()
        parts.add_value(value)
        sizes = list(map(len, parts.end()))
        assert len(sizes) > 5
        assert max(sizes) < 3 * PART


NAMES = st.sampled_from(["", "a", "b", 'é"', "\\\\", "x" * 600, "k,[]{}:"])
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | NAMES
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=40
)


def same(text: bytes) -> None:
    """Check that a text is parsed in parts as orjson parses it at once."""
    try:
        expected = orjson.dumps(orjson.loads(text))
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            parse(text, 128)
    else:
        assert orjson.dumps(parse(text, 128)) == expected


@given(JSON, st.booleans(), st.integers(1, 130))
def test_parsing_in_parts_is_parsing(value: Any, indent: bool, count: int) -> None:
    """JSON is parsed in parts as at once, with any whitespace, and also in long lists."""
    option = orjson.OPT_INDENT_2 if indent else 0
    for whole in (value, [value] * count, {str(number): value for number in range(count)}):
        same(orjson.dumps(whole, option=option))


@given(JSON, st.data())
def test_invalid_json_is_invalid_in_parts(value: Any, data: st.DataObject) -> None:
    """A text with a character more, less or other is JSON in parts if it is JSON at once."""
    text = orjson.dumps([value, {"a": value, "b": value}, value])
    at = data.draw(st.integers(0, len(text)))
    new = data.draw(
        st.sampled_from([b"", b",", b'"', b"[", b"]", b"{", b"}", b":", b"\\", b"\xc3"])
    )
    for end in (at, at + 1, len(text)):
        same(text[:at] + new + text[end:])


def test_the_place_of_an_error() -> None:
    """An error far behind names its line and its column."""
    for text in (b'{"a":1,\n' * 1 + b'"b":[1, 2,\n' + b"1,\n" * 500 + b"x]}", b"[" + b"1," * 5_000):
        with pytest.raises(orjson.JSONDecodeError) as expected:
            orjson.loads(text)
        with pytest.raises(orjson.JSONDecodeError) as found:
            parse(text, 128)
        assert (
            str(found.value).rpartition(": line")[2] == str(expected.value).rpartition(": line")[2]
        )


def test_nesting_has_a_limit() -> None:
    """A text is rejected where it is nested too deep."""
    with pytest.raises(Nested):
        parse(b"[" * 10_000, 128)


@given(JSON)
def test_values_are_counted_without_strings(value: Any) -> None:
    """Arrays and objects are counted exactly, and marks in strings do not count."""
    text = orjson.dumps([value] * 3)
    containers, values = count_values(text)
    bare = text
    for name in ("k,[]{}:",):
        bare = bare.replace(orjson.dumps(name), b"")
    assert containers == bare.count(b"[") + bare.count(b"{")
    assert values == containers + bare.count(b",") <= most_values(text)


@pytest.mark.parametrize(
    "body",
    [
        b"{" + b'"a":1,' * 1_000_000 + b'"a":2}',
        b'{"a":[' + b"1," * 1_000_000 + b"2]}",
        b'{"a":[' + b'{"b":[1]},' * 100_000 + b"2]}",
    ],
    ids=["keys", "numbers", "objects"],
)
def test_no_part_is_large(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """orjson, which holds the interpreter lock, gets a few kilobytes at a time."""
    sizes: list[int] = []

    class Counted:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(data: bytes) -> Any:
            sizes.append(len(data))
            return orjson.loads(data)

    monkeypatch.setattr(module, "orjson", Counted)
    assert orjson.dumps(parse(body, 128)) == orjson.dumps(orjson.loads(body))
    assert max(sizes) < 5_000


@pytest.mark.timed
def test_encoding_does_not_hold_the_interpreter() -> None:
    """While a text of 100 MB is encoded in a thread, other threads run every few milliseconds."""
    value = {"url": "A" * 100_000_000}

    def silence(work: Any) -> float:
        worker = threading.Thread(target=work)
        longest, last = 0.0, time.perf_counter()
        worker.start()
        while worker.is_alive():
            time.sleep(0.0002)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        return longest

    parts = min(silence(lambda: Parts().add_value(value)) for _ in range(3))
    at_once = min(silence(lambda: orjson.dumps(value)) for _ in range(3))
    assert parts < at_once / 3
