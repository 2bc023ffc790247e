"""Faults of an engine: ways to spoil a valid response, in its transfer or in its events.

A name is a word, or a word and its arguments: `reset/headers`, `set/last/stop_type/null`,
`status/500/html`.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from support.engines.wire import Answer, Send, Wire, finish, framed, head, plainly

MIB = 2**20

# Values that replace a field's own.
VALUES = {
    "null": b"null", "string": b'"x"', "list": b"[]", "object": b"{}", "true": b"true",
    "negative": b"-5", "float": b"1.5", "huge": b"1" + b"0" * 30, "digits": b"9" * 5000,
    "infinite": b"1e999", "nan": b"NaN", "deep": b"[" * 600 + b"]" * 600,
    "text": b'"' + b"y" * 300_000 + b'"', "zero": b"0", "surrogate": b'"\\ud800"',
}  # fmt: skip

# Error bodies of unusual shapes.
BODIES = {
    "right": b'{"error":{"code":500,"message":"it broke","type":"server_error"}}',
    "loading": b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}',
    "empty": b"", "html": b"<html><body>Bad Gateway</body></html>", "null": b"null",
    "list": b"[]", "number": b"5", "string": b'"no"', "text": b'{"error":"it broke"}',
    "error-null": b'{"error":null}', "error-list": b'{"error":[]}',
    "message-null": b'{"error":{"message":null,"type":null}}',
    "type-list": b'{"error":{"message":"m","type":["a"]}}',
    "type-object": b'{"error":{"message":{"a":1},"type":{"b":2}}}',
    "exceed": b'{"error":{"message":"m","type":"exceed_context_size_error"}}',
    "exceed-null": b'{"error":{"message":"m","type":"exceed_context_size_error",'
    b'"n_ctx":null,"n_prompt_tokens":"x"}}',
    "deep": b'{"error":' + b"[" * 2000 + b"]" * 2000 + b"}",
    "utf8": b'{"error":{"message":"\xff"}}',
    "detail": b'{"detail":{"error":"busy","type":"service_unavailable"}}',
    "control": b'{"error":{"message":"\\u001b[2J\\r\\nX: y","type":"server_error"}}',
}  # fmt: skip


async def _parts(answer: Answer) -> list[bytes]:
    return [part async for part in answer.parts]


async def _begin(wire: Wire, answer: Answer, stage: str) -> None:
    """Send a response up to a stage."""
    if stage == "request":
        return
    if stage == "status":
        await wire.send(b"HTTP/1.1 2")
        return
    if stage == "line":
        await wire.send(b"HTTP/1.1 200 OK\r\nContent-")
        return
    parts = await _parts(answer)
    size = None if answer.streamed else sum(map(len, parts))
    await wire.send(head(answer, size))
    if stage == "headers":
        return
    # For an unstreamed response the later stages are the same: its only part is cut.
    half = parts[0][: len(parts[0]) // 2]
    if not answer.streamed:
        await wire.send(half)
    elif stage == "event":
        await wire.send(framed(answer, parts[0]) + framed(answer, half))
    elif stage == "between":
        await wire.send(b"".join(framed(answer, part) for part in parts[:2]))
    elif stage == "last":
        await wire.send(b"".join(framed(answer, part) for part in parts[:-1]))
    elif stage == "end":
        # Omit only the end of the framing.
        await wire.send(b"".join(framed(answer, part) for part in parts))


STAGES = ("request", "status", "line", "headers", "event", "between", "last")


def _reset(stage: str) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        await _begin(wire, answer, stage)
        # Let the sent bytes arrive before the reset.
        await asyncio.sleep(0.02)
        wire.reset()

    return send


def _close(stage: str) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        await _begin(wire, answer, stage)
        wire.end()

    return send


def _silence(stage: str) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        await _begin(wire, answer, stage)
        await asyncio.sleep(3600)

    return send


def _informational(what: str) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        line = b"HTTP/1.1 %d Info\r\nX-Info: 1\r\n\r\n"
        if what == "many":
            await wire.send(line % 102 * 1000)
        elif what == "apart":
            for _ in range(3):
                await wire.send(line % 103)
                await asyncio.sleep(0.05)
        elif what == "length":
            await wire.send(b"HTTP/1.1 102 Info\r\nContent-Length: 5\r\n\r\n")
        else:
            await wire.send(line % int(what))
        await plainly(wire, answer)

    return send


_OTHER = b'{"content":"ANOTHER","stop":true,"tokens":[],"results":[{"text":"ANOTHER"}]}'
_SECOND = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_OTHER) + _OTHER


def _behind(what: str) -> Send:
    """Return a fault that sends bytes after the end of a response."""
    data = {
        "bytes": b"garbage", "reply": _SECOND, "event": b"data: {}\n\n", "late": _SECOND,
        "long": b"x" * MIB, "half": _SECOND[:40], "line": b"\r\n", "endless": _SECOND * 1000,
    }[what]  # fmt: skip

    async def send(wire: Wire, answer: Answer) -> None:
        # Send them together with the end of the response, except for `late`.
        parts = await _parts(answer)
        if answer.streamed:
            body = head(answer) + b"".join(framed(answer, part) for part in parts)
            body += b"0\r\n\r\n" * answer.chunked
        else:
            body = head(answer, sum(map(len, parts))) + b"".join(parts)
        if what == "late":
            await wire.send(body)
            await asyncio.sleep(0.05)
            await wire.send(data)
        else:
            await wire.send(body + data)
        if answer.streamed and not answer.chunked:
            wire.end()

    return send


def _length(what: str) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        body = b"".join(await _parts(answer))
        size = len(body)
        values = {
            "short": b"%d" % (size // 2), "long": b"%d" % (size + 10), "negative": b"-5",
            "text": b"abc", "huge": b"9" * 30, "twice": b"%d\r\nContent-Length: 5" % size,
            "both": b"%d\r\nTransfer-Encoding: chunked" % size, "zero": b"0",
        }  # fmt: skip
        start = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: " % answer.kind
        await wire.send(start + values[what] + b"\r\n\r\n" + body)
        if what in ("long", "huge"):
            wire.end()

    return send


def _chunk(what: str) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        start = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
        parts = await _parts(answer)
        good = b"%x\r\n%s\r\n" % (len(parts[0]), parts[0])
        bad = {
            "garbage": b"zz\r\nhello\r\n", "huge": b"f" * 16 + b"\r\n", "negative": b"-5\r\nhello",
            "short": b"2\r\nhello\r\n", "line": b"5" * 100_000, "extension": b"1;" + b"e" * 2 * MIB,
        }[what]  # fmt: skip
        await wire.send(start % answer.kind + good + bad)
        await asyncio.sleep(0.02)
        wire.end()

    return send


def _head(what: str) -> Send:
    """Return a fault that sends 40 MB of headers."""
    line = {
        "lines": b"X-A: " + b"a" * 1000 + b"\r\n", "line": b"a" * 1024, "names": b"X: y\r\n" * 200,
        "status": b"b" * 1024,
    }[what]  # fmt: skip

    async def send(wire: Wire, answer: Answer) -> None:
        await wire.send(b"HTTP/1.1 200 " if what == "status" else b"HTTP/1.1 200 OK\r\nX-B: ")
        for _ in range(640):
            await wire.send(line * (2**16 // len(line)))
        wire.end()

    return send


def _status(number: str, body: str) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        if body == "large":
            await wire.send(head(replace(answer, status=int(number), chunked=True)))
            piece = framed(replace(answer, chunked=True), b"e" * 2**16)
            for _ in range(150 * 16):
                await wire.send(piece)
            await finish(wire, replace(answer, chunked=True))
            return
        data = BODIES[body]
        spoilt = replace(answer, status=int(number), kind=b"application/json")
        await wire.send(head(spoilt, len(data), b"Retry-After: soon\r\n") + data)

    return send


def _raw(data: bytes, ends: bool = True) -> Send:
    async def send(wire: Wire, answer: Answer) -> None:
        await wire.send(data)
        if ends:
            wire.end()

    return send


def _flood(event: bytes, most: int, start: bytes = b"") -> Send:
    """Return a fault that starts a valid response and then repeats one event."""

    async def send(wire: Wire, answer: Answer) -> None:
        first = await anext(answer.parts)
        await wire.send(head(answer) + framed(answer, first) + framed(answer, start or b":\n\n"))
        piece = framed(answer, event * max(1, 2**16 // len(event)))
        for _ in range(max(1, most // len(piece))):
            await wire.send(piece)
        wire.end()

    return send


async def _drip(wire: Wire, answer: Answer) -> None:
    """Send a valid response in pieces of 16 bytes."""
    parts = await _parts(answer)
    data = head(answer, None if answer.streamed else sum(map(len, parts)))
    data += b"".join(framed(answer, part) if answer.streamed else part for part in parts)
    # The body takes long, but its pauses stay below the time limit.
    for at in range(0, len(data), 16):
        await wire.send(data[at : at + 16])
        await asyncio.sleep(0.002)
    if answer.streamed:
        await finish(wire, answer)


async def _compressed(wire: Wire, answer: Answer) -> None:
    body = gzip.compress(b"".join(await _parts(answer)))
    await wire.send(head(answer, len(body), b"Content-Encoding: gzip\r\n") + body)


SENDS: dict[str, Send] = {
    "drip": _drip,
    "gzip": _compressed,
    "redirect": _raw(
        b"HTTP/1.1 302 F\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    ),
    "no-content": _raw(b"HTTP/1.1 204 No Content\r\n\r\n", ends=False),
    "not-modified": _raw(b"HTTP/1.1 304 Not Modified\r\n\r\n", ends=False),
    "switching": _raw(b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc"),
    "no-http": _raw(b"hello\r\n\r\n"),
    "binary": _raw(bytes(range(256)) * 100),
    "http2": _raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "http09": _raw(b"data: {}\n\n"),
    "empty": _raw(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ends=False),
    "no-colon": _raw(b"HTTP/1.1 200 OK\r\nabc\r\nContent-Length: 2\r\n\r\n{}"),
    "nul": _raw(b"HTTP/1.1 200 OK\r\nX: \x00\x00\r\nContent-Length: 2\r\n\r\n{}"),
    "version": _raw(b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}"),
    "status-zero": _raw(b"HTTP/1.1 000 X\r\nContent-Length: 2\r\n\r\n{}"),
    "status-999": _raw(b"HTTP/1.1 999 X\r\nContent-Length: 2\r\n\r\n{}"),
    "status-long": _raw(b"HTTP/1.1 20000000000000000000 X\r\nContent-Length: 2\r\n\r\n{}"),
    "large-event": _flood(b"x" * 2**16, 100 * MIB, b'data: {"content":"'),
    "no-line": _flood(b"x" * 2**16, 600 * MIB),
    "comments": _flood(b":\n\n", 20 * MIB),
    "empty-events": _flood(b"data: \n\n", 20 * MIB),
    "line-ends": _flood(b"\n", 20 * MIB),
    "data-lines": _flood(b"data: a\n", 100 * MIB),
}


# A change to a part of a response. It gets the part, and if that is the first or the last.
Spoil = Callable[[bytes, bool, bool], bytes]


def _json(part: bytes, change: Callable[[dict[str, object]], bytes]) -> bytes:
    start, mark, data = part.rpartition(b"data: ")
    return start + mark + change(json.loads(data)) + b"\n\n" * bool(mark)


def _set(which: str, path: str, value: str) -> Spoil:
    def change(event: dict[str, object]) -> bytes:
        here: Any = event
        *outer, last = path.split(".")
        for step in outer:
            here = here[int(step) if isinstance(here, list) else step]
        if isinstance(here, list):
            here[int(last)] = "SPOILT"
        elif isinstance(here, dict):
            here[last] = "SPOILT"
        return json.dumps(event).encode().replace(b'"SPOILT"', VALUES[value])

    def spoil(part: bytes, first: bool, last: bool) -> bytes:
        return _json(part, change) if _is(which, first, last) else part

    return spoil


def _drop(which: str, name: str) -> Spoil:
    def change(event: dict[str, object]) -> bytes:
        event.pop(name, None)
        return json.dumps(event).encode()

    def spoil(part: bytes, first: bool, last: bool) -> bytes:
        return _json(part, change) if _is(which, first, last) else part

    return spoil


def _is(which: str, first: bool, last: bool) -> bool:
    return {"first": first and not last, "last": last, "only": True}[which]


def _event(which: str, what: str) -> Spoil:
    """Return a change that replaces a complete event."""

    def spoil(part: bytes, first: bool, last: bool) -> bytes:
        if not _is(which, first, last):
            return part
        start, mark, data = part.rpartition(b"data: ")
        data = data.rstrip()
        changed = {
            "half": data[: len(data) // 2], "notjson": b"not json", "null": b"null",
            "list": b"[]", "number": b"5", "string": b'"x"', "empty": b"", "object": b"{}",
            "utf8": data.replace(b'": "', b'": "\xff\xfe', 1), "nul": data + b"\x00",
            "twice": data + b",\n" + data, "deep": b"[" * 5000 + b"]" * 5000,
            "error": b'{"error":{"code":500,"message":"it broke","type":"server_error"}}',
            "error-null": b'{"error":null}', "error-list": b'{"error":[1]}',
            "error-string": b'{"error":"it broke"}', "bom": b"\xef\xbb\xbf" + data,
            "missing": b"", "again": data,
        }[what]  # fmt: skip
        if what == "missing":
            return b""
        if what == "again":
            return part * 2
        return start + mark + changed + b"\n\n" * bool(mark)

    return spoil


def _larger(part: bytes, first: bool, last: bool) -> bytes:
    """Replace an event's text by one of 64 KB."""
    return part if last else part.replace(b': "x"', b': "' + b"x" * 2**16 + b'"', 1)


def _many(part: bytes, first: bool, last: bool) -> bytes:
    """Repeat an event, for more tokens than were requested."""
    return part if last else part * 400


async def _spoilt(answer: Answer, spoil: Spoil) -> AsyncGenerator[bytes, None]:
    async with aclosing(answer.parts) as parts:
        previous: bytes | None = None
        first = True
        async for part in parts:
            if previous is not None:
                yield spoil(previous, first, False)
                first = False
            previous = part
        if previous is not None:
            yield spoil(previous, first, True)


def fault(name: str, answer: Answer) -> tuple[Send, Answer]:
    """Return how a fault sends a response, and the response that it makes of the valid one."""
    word, *arguments = name.split("/")
    if name in SENDS:
        return SENDS[name], answer
    if word in _SENDING:
        return _SENDING[word](*arguments), answer
    whole = {"many": _many, "large-text": _larger}.get(word)
    spoil = whole or _SPOILING[word](*arguments)
    spoilt = _spoilt(answer, spoil)
    if not answer.streamed:
        return plainly, replace(answer, parts=spoilt)
    return _nonempty, replace(answer, parts=spoilt)


async def _nonempty(wire: Wire, answer: Answer) -> None:
    """Send a stream without its empty parts, which would end it when chunked."""
    await wire.send(head(answer))
    async for part in answer.parts:
        if part:
            await wire.send(framed(answer, part))
    await finish(wire, answer)


_SENDING: dict[str, Callable[..., Send]] = {
    "reset": _reset, "close": _close, "silence": _silence, "informational": _informational,
    "behind": _behind, "length": _length, "chunk": _chunk, "head": _head, "status": _status,
}  # fmt: skip
_SPOILING: dict[str, Callable[..., Spoil]] = {"set": _set, "drop": _drop, "event": _event}


# Edits as data, so that a finding can be read and run again. Places are fractions: of the lines
# with JSON in a response, of the places in a value, of the bytes.

# A mark in keys and strings that `written` removes, for values that Python cannot hold and keys
# that an object has twice; JSON always escapes this character.
MARK = "\x1d"


def written(value: Any, ascii_only: bool = True) -> bytes:
    """Return the JSON text of a value, with its raw numbers and duplicate keys."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    text = re.sub(r'"\\u001d([^"\\]*)\\u001d"', r"\1", text).replace("\\u001d", "")
    return text.encode("utf-8", "surrogatepass")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the container and key of every place in a value, only some for long arrays."""
    if isinstance(value, dict | list):
        pairs = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, inner in pairs if len(pairs) < 40 else [*pairs[:20], *pairs[-5:]]:
            yield value, key
            yield from places(inner)


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
            holder[key + MARK] = one["value"]
        else:
            holder[key] = one["value"]
    lines[number] = lines[number][:start] + written(value)
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
