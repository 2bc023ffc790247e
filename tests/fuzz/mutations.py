"""JSON bodies, and mutations of a place in one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

# A mark in keys and strings that `written` removes; JSON always escapes this character.
_MARK = "\x1d"
MOST_BYTES = 2**20


def raw(text: str) -> str:
    """Return a string that is written without its quotes, for numbers that Python cannot hold."""
    return f"{_MARK}{text}{_MARK}"


def again(key: str) -> str:
    """Return a key that is written like another one, so that the object has it twice."""
    return key + _MARK


def written(value: Any, ascii_only: bool) -> bytes:
    """Return the JSON text of a value, with its raw numbers and duplicate keys."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    text = re.sub(r'"\\u001d([^"\\]*)\\u001d"', r"\1", text).replace("\\u001d", "")
    return text.encode("utf-8", "surrogatepass")


STRANGE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 127, 128, 129, 1.0, 1.5, -0.0, 0.1, 2**31 - 1, 2**31, 2**32,
    2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 1e308, -1e308, 5e-324, float("inf"), float("nan"),
    raw("1e400"), raw("-1e400"), raw("0" * 50), raw("1" + "0" * 5_000), raw("1.0e-400"), raw("-"),
    raw("00"), raw("1" * 25), raw("0." + "3" * 2_000), "", "a", "0", "\x00", "a\x00b", "\ud800",
    "\udfff\ud83d", "\ufeff", "\uffff", "\u2028", "é" * 50, "🔥", "<|im_end|>",
    "<|im_start|>system\n",
    "<think>", "</tool_call>", "null", "a" * 5_000, "a " * 200_000, "\\" * 1_000, '"', "%s%n{}", [],
    {}, [None], [[]], [[[]]], {"a": 1}, {"": None}, {"type": "text"}, {"type": "function"},
    [0], [-1], [5, "a"], [1e308], ["a", "b", "c", "d", "e"], [""], ["\x00"], [{}] * 3, "auto",
    "none",
    "required", "cl100k_base", "http://127.0.0.1:9/x", "file:///etc/hostname", "data:,",
)  # fmt: skip


def _deep(kind: str, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "array" else {"a": value}
    return value


def _many(kind: str, count: int) -> Any:
    return {
        "ids": list(range(count)), "zeros": [0] * count, "texts": ["a"] * count,
        "empty": [{}] * count, "keys": {str(n): n for n in range(count)}, "text": "ab c " * count,
        "controls": "<|im_end|>" * count, "bytes": "\x01" * count, "arrays": [[5]] * count,
    }[kind]  # fmt: skip


_KINDS = ("ids", "zeros", "texts", "empty", "keys", "text", "controls", "bytes", "arrays")
strange: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(STRANGE),
    st.sampled_from(STRANGE),
    st.sampled_from(STRANGE),
    st.builds(
        _deep, st.sampled_from(("array", "object")), st.sampled_from((5, 100, 127, 128, 400))
    ),
    st.builds(_many, st.sampled_from(_KINDS), st.sampled_from((5, 21, 129, 2_049, 50_000))),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of every place in a value, only some for long arrays."""
    if isinstance(value, dict | list):
        pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, inner in pairs if len(pairs) < 40 else [*pairs[:20], *pairs[-5:]]:
            yield value, key
            yield from places(inner)


def _nudged(value: Any, by: Any) -> Any:
    """Return a value close to the given one."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return by if isinstance(by, int | float) else -value - 1
    if isinstance(value, str):
        return value[:10_000] * (abs(by) % 50) if isinstance(by, int) else value + str(by)[:100]
    return [value]


def _copied(value: Any) -> Any:
    """Return a deep copy without shared parts, in which a change applies to one place only."""
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


@st.composite
def mutated(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> Any:
    """Draw a value with up to five places changed."""
    value = _copied(draw(values))
    other = strange.map(_copied)
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 1, 2, 3, 5)))):
        found = list(places(value))
        if not found:
            return draw(other)
        holder, key = found[draw(st.integers(0, len(found) - 1))]
        kind = draw(
            st.sampled_from(("set", "set", "set", "nudge", "delete", "again", "add", "wrap"))
        )
        if kind == "delete":
            del holder[key]
        elif kind == "wrap":
            holder[key] = [holder[key]]
        elif kind == "nudge":
            holder[key] = _nudged(holder[key], draw(other))
        elif kind == "set" or isinstance(holder, list):
            holder[key] = draw(other)
        else:
            name = (
                again(key) if kind == "again" else draw(st.sampled_from(("x", "", "\ud800", "n")))
            )
            holder[name] = draw(other)
    return value
