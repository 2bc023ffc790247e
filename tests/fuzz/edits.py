"""Edits of an engine's response: its JSON values, events, bytes, head and timing.

An edit is data, so that a finding can be read and run again. Places are fractions: of the lines
with JSON in a response, of the places in a value, of the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fuzz.mutations import places
from hypothesis import strategies as st
from support.mutants import STRANGE

_fraction = st.floats(0, 0.999)
EVENTS = (
    ": a comment\n\n", "event: x\n\n", "data: [DONE]\n\n", "data:\n\n", "data: {}\n\n", "\n\n\n",
    "data: null\n\n", "data: [1]\n\n", 'data: {"error": {"message": "x", "code": 500}}\n\n',
    'data: {"error": 5}\n\n', 'error: {"message": "x"}\n\n', "id: 1\nretry: x\n\n", "data: {",
    'data: {"content": "a"\ndata: , "stop": false}\n\n', "data: " + "x" * 300_000 + "\n\n",
    "data: " + "[" * 5_000 + "\n\n", "\ufeff", "\r\r", "x" * 2_000_000, 'data: {"stop": true}\n\n',
)  # fmt: skip
BYTES = ("", "\x00", "\n", "\r\n\r\n", "0\r\n\r\n", "data: ", "}", "HTTP/1.1 200 OK\r\n\r\n", "é")
HEADS = (
    "HTTP/1.1 500 Internal Server Error", "HTTP/1.1 503 Loading", "HTTP/1.1 404 Not Found",
    "HTTP/1.1 400 Bad", "HTTP/1.1 401 No", "HTTP/1.1 204 No Content", "HTTP/1.1 304 Same",
    "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/", "HTTP/1.1 299 OK", "HTTP/1.1 999 X",
    "HTTP/1.1 101 Switching", "HTTP/1.1 100 Continue", "HTTP/1.1 103 Hints\r\n\r\nHTTP/1.1 200 OK",
    "HTTP/1.1 000 Z", "HTTP/2 200", "HTTP/0.9 200 OK", "ICY 200 OK", "", "garbage",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", "HTTP/1.1 200 OK\r\nContent-Length: 5",
    "HTTP/1.1 200 OK\r\nContent-Length: 999999", "HTTP/1.1 200 OK\r\nContent-Length: -1",
    "HTTP/1.1 200 OK\r\nTransfer-Encoding: x", "HTTP/1.1 200 OK\r\nContent-Type: text/html",
    "HTTP/1.1 200 OK\r\nContent-Encoding: gzip", "HTTP/1.1 200 OK\r\nX: " + "x" * 300_000,
    "HTTP/1.1 200 OK\r\n" + "\r\n".join(f"X{n}: y" for n in range(5_000)),
    "HTTP/1.1 200 OK\r\nConnection: close", "HTTP/1.1 200 OK\r\nno colon",
    "HTTP/1.1 200 OK\r\nContent-Type: application/json\xff",
)  # fmt: skip

_at = st.sampled_from((None, 0, 0, 0, 1, 2, 3))
_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(STRANGE),
    st.sampled_from(("\ud800", "\x00", "a" * 100_000, -(2**63), 1e308, "<|im_end|>", [[]] * 50,
                     "\x1dNaN\x1d", "\x1d1e999\x1d", "\x1d" + "9" * 5_000 + "\x1d", 0.0, 1023,
                     1024)),
)  # fmt: skip
edit: st.SearchStrategy[dict[str, Any]] = st.one_of(
    *[st.fixed_dictionaries(
        {"do": st.just("set"), "at": _at, "line": _fraction, "place": _fraction, "value": _values}
    )] * 3,
    st.fixed_dictionaries({"do": st.just("delete"), "at": _at, "line": _fraction,
    "place": _fraction}),
    st.fixed_dictionaries({"do": st.just("again"), "at": _at, "line": _fraction, "place": _fraction,
                           "value": _values}),
    st.fixed_dictionaries({"do": st.sampled_from(("drop", "repeat", "swap")), "at": _at,
                           "line": _fraction}),
    st.fixed_dictionaries({"do": st.just("event"), "at": _at, "line": _fraction,
                           "value": st.sampled_from(EVENTS)}),
    st.fixed_dictionaries({"do": st.sampled_from(("cut", "flip", "hang", "pause", "reset")),
    "at": _at,
                           "place": _fraction}),
    st.fixed_dictionaries({"do": st.just("bytes"), "at": _at, "place": _fraction,
                           "value": st.sampled_from(BYTES)}),
    st.fixed_dictionaries({"do": st.just("after"), "at": _at, "value": st.sampled_from(
        (*BYTES, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"))}),
    st.fixed_dictionaries({"do": st.just("head"), "at": _at, "value": st.sampled_from(HEADS)}),
    st.fixed_dictionaries({"do": st.just("sizes"), "at": _at, "value": st.sampled_from((1, 2, 7))}),
    st.fixed_dictionaries({"do": st.just("chunk"), "at": _at, "value": st.sampled_from(
        ("-1", "zz", "fffffffffffffffff", "", "5;x=y", " 5", "0"))}),
)  # fmt: skip


def edited(body: bytes, edits: list[dict[str, Any]]) -> bytes:
    """Return a response's body with the edits that apply to its content."""
    for one in edits:
        change = _CHANGES.get(one["do"])
        if change is not None:
            body = change(body, one)
    return body


def _lines(body: bytes) -> tuple[list[bytes], list[int]]:
    """Return the lines of a body, and the indexes of those with JSON."""
    lines = body.split(b"\n")
    return lines, [n for n, line in enumerate(lines) if _start(line) is not None]


def _start(line: bytes) -> int | None:
    at = 6 if line.startswith(b"data: ") else 0
    return at if line[at : at + 1] in (b"{", b"[") else None


def _in_json(body: bytes, one: dict[str, Any]) -> bytes:
    lines, found = _lines(body)
    if not found:
        return body
    number = found[int(one["line"] * len(found))]
    start = _start(lines[number])
    assert start is not None
    try:
        value = json.loads(lines[number][start:])
    except (ValueError, RecursionError):
        return body
    inside = list(places(value))
    if inside:
        holder, key = inside[int(one["place"] * len(inside))]
        if one["do"] == "delete":
            del holder[key]
        elif one["do"] == "again" and isinstance(holder, dict):
            holder[key + "\x1d"] = one["value"]
        else:
            holder[key] = one["value"]
    text = (
        json.dumps(value)
        .replace('"\\u001d', "")
        .replace('\\u001d"', '"' if one["do"] == "again" else "")
    )
    lines[number] = lines[number][:start] + text.replace("\\u001d", "").encode()
    return b"\n".join(lines)


def _of_events(body: bytes, one: dict[str, Any]) -> bytes:
    events = body.split(b"\n\n")
    at = int(one["line"] * len(events))
    if one["do"] == "drop":
        del events[at]
    elif one["do"] == "repeat":
        events.insert(at, events[at])
    elif one["do"] == "swap":
        events[at], events[-2 if len(events) > 1 else -1] = (
            events[-2 if len(events) > 1 else -1],
            events[at],
        )
    else:
        start = b"\n\n".join(events[:at])
        return start + str(one["value"]).encode() + b"\n\n".join(events[at:])
    return b"\n\n".join(events)


def _of_bytes(body: bytes, one: dict[str, Any]) -> bytes:
    at = int(one["place"] * len(body))
    if one["do"] == "cut":
        return body[:at]
    if one["do"] == "flip":
        return body[:at] + bytes([body[at] ^ 0x41]) + body[at + 1 :] if body else b""
    return body[:at] + str(one["value"]).encode() + body[at:]


_CHANGES: dict[str, Callable[[bytes, dict[str, Any]], bytes]] = {
    "set": _in_json, "delete": _in_json, "again": _in_json,
    "drop": _of_events, "repeat": _of_events, "swap": _of_events, "event": _of_events,
    "cut": _of_bytes, "flip": _of_bytes, "bytes": _of_bytes,
}  # fmt: skip
