"""Edits of an engine's valid response, in its transfer or in its content.

A fault has a name, which is a word, or a word and its arguments: `reset/headers`,
`set/last/stop_type/null`, `status/500/html`. Random edits are data, so that a finding can be read
and run again; their places are fractions: of the lines with JSON in a response, of the places in a
value, of the bytes.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from support.engines.wire import Answer, Send, Wire, finish, framed, head, one, plainly

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


STAGES = ("request", "status", "line", "headers", "event", "between", "last")


# Bytes, with the seconds behind them, None without a pause.
Pause = tuple[bytes, float | None]


@dataclass(frozen=True)
class Transfer:
    """The way of sending a response; the defaults send a right one.

    Args:
        before: bytes before the response.
        head: a status line and headers; the type and the length follow if they are missing.
            `{size}`, `{half}` and `{more}` are lengths.
        until: a stage, or a fraction of the body, at which the response breaks off.
        ends: `close`, `reset`, or `hang` at the end.
        piece: the bytes of each part of a body that is not large.
        drip: True to send 16 bytes at a time, with pauses below the time limit.
        middle: a fraction of the body with a pause behind it.
        size: the size that each chunk claims.
        behind: bytes behind the response or what is sent of it.
        late: the seconds before these bytes, None to send them with the others.
        is_cut: True to leave the body without its end.
    """

    before: tuple[Pause, ...] = ()
    head: str = ""
    until: str | float | None = None
    ends: str = ""
    piece: int = 0
    drip: bool = False
    middle: float | None = None
    size: str | None = None
    behind: bytes = b""
    late: float | None = None
    is_cut: bool = False

    async def send(self, wire: Wire, answer: Answer) -> None:
        """Send a response."""
        begins = self.until not in ("request", "status", "line")
        parts = [part async for part in answer.parts] if begins else []
        # What has no pause behind it is sent together with what follows.
        waiting = b""
        behind = (b"", self.late), (self.behind, None)
        for data, seconds in (*self.before, *self._writes(answer, parts), *behind):
            waiting += data
            if seconds is not None:
                await self._write(wire, waiting)
                waiting = b""
                await asyncio.sleep(seconds)
        await self._write(wire, waiting)
        if self.ends == "reset":
            # Let the sent bytes arrive before the reset.
            await asyncio.sleep(0.02)
            wire.reset()
        elif self.ends == "hang":
            await asyncio.sleep(3600)
        elif self.ends == "close" or (answer.streamed and not answer.chunked):
            wire.end()

    async def _write(self, wire: Wire, data: bytes) -> None:
        size = 16 if self.drip else max(len(data), 1)
        for at in range(0, len(data), size):
            await wire.send(data[at : at + size])
            if self.drip:
                await asyncio.sleep(0.002)

    def _writes(self, answer: Answer, parts: list[bytes]) -> Iterator[Pause]:
        """Yield bytes with the pauses behind them."""
        if self.until in ("request", "status", "line"):
            lines = {"status": b"HTTP/1.1 2", "line": b"HTTP/1.1 200 OK\r\nContent-"}
            yield lines.get(str(self.until), b""), None
            return
        yield self._head(answer, sum(map(len, parts))), None
        for part, seconds in self._cut(answer, parts):
            if self.size is not None:
                yield self.size.encode() + b"\r\n" + part + b"\r\n", seconds
            else:
                yield framed(answer, part) if answer.streamed else part, seconds
        if answer.streamed and answer.chunked and self.until is None and not self.is_cut:
            yield b"0\r\n\r\n", None

    def _head(self, answer: Answer, size: int) -> bytes:
        if not self.head:
            return head(answer, None if answer.streamed else size)
        lines = self.head.replace("{size}", str(size)).replace("{half}", str(size // 2))
        lines = lines.replace("{more}", str(size + 10)) + "\r\n"
        if "Content-Type" not in lines:
            lines += f"Content-Type: {answer.kind.decode()}\r\n"
        if "Content-Length" not in lines and "Transfer-Encoding" not in lines:
            length = "Transfer-Encoding: chunked" if answer.streamed else f"Content-Length: {size}"
            lines += f"{length}\r\n"
        return lines.encode("latin-1", "replace") + b"\r\n"

    def _cut(self, answer: Answer, parts: list[bytes]) -> list[Pause]:
        """Return the parts of the body that are sent, with the pauses behind them."""
        if isinstance(self.until, float):
            body = b"".join(parts)
            parts = [body[: int(self.until * len(body))]]
        elif self.until is not None:
            half = parts[0][: len(parts[0]) // 2]
            stages = {
                "headers": [], "first": parts[:1], "event": [parts[0], half], "between": parts[:2],
                "last": parts[:-1], "end": parts,
            }  # fmt: skip
            # For an unstreamed response the later stages are the same: its only part is cut.
            parts = stages[self.until] if answer.streamed or self.until == "headers" else [half]
        body = b"".join(parts)
        if self.piece and len(body) < 20_000:
            size = self.piece
            return [(body[at : at + size], 0.0) for at in range(0, len(body), size)]
        if self.middle is not None:
            at = int(self.middle * len(body))
            return [(part, 0.3) for part in (body[:at], body[at:]) if part]
        return [(part, None) for part in parts if part]


_OTHER = b'{"content":"ANOTHER","stop":true,"tokens":[],"results":[{"text":"ANOTHER"}]}'
_SECOND = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(_OTHER) + _OTHER
_BEHIND = {
    "bytes": b"garbage", "reply": _SECOND, "event": b"data: {}\n\n", "late": _SECOND,
    "long": b"x" * MIB, "half": _SECOND[:40], "line": b"\r\n", "endless": _SECOND * 1000,
}  # fmt: skip
_LENGTHS = {
    "short": "{half}", "long": "{more}", "negative": "-5", "text": "abc", "huge": "9" * 30,
    "twice": "{size}\r\nContent-Length: 5", "both": "{size}\r\nTransfer-Encoding: chunked",
    "zero": "0",
}  # fmt: skip
_CHUNKS = {
    "garbage": b"zz\r\nhello\r\n", "huge": b"f" * 16 + b"\r\n", "negative": b"-5\r\nhello",
    "short": b"2\r\nhello\r\n", "line": b"5" * 100_000, "extension": b"1;" + b"e" * 2 * MIB,
}  # fmt: skip
_INFO = b"HTTP/1.1 %d Info\r\nX-Info: 1\r\n\r\n"
_INFORMATIONAL = {
    "many": ((_INFO % 102 * 1000, None),),
    "apart": ((_INFO % 103, 0.05),) * 3,
    "length": ((b"HTTP/1.1 102 Info\r\nContent-Length: 5\r\n\r\n", None),),
}


def _transfer(word: str, what: str) -> Transfer | None:
    """Return the transfer of a fault with one argument, or None for another one."""
    match word:
        case "reset" | "close":
            return Transfer(until=what, ends=word)
        case "silence":
            return Transfer(until=what, ends="hang")
        case "informational":
            return Transfer(_INFORMATIONAL.get(what) or ((_INFO % int(what), None),))
        case "behind":
            return Transfer(behind=_BEHIND[what], late=0.05 if what == "late" else None)
        case "length":
            ends = "close" if what in ("long", "huge") else ""
            return Transfer(head=f"HTTP/1.1 200 OK\r\nContent-Length: {_LENGTHS[what]}", ends=ends)
        case "chunk":
            # The wrong chunk comes behind a right one.
            return Transfer(until="first", behind=_CHUNKS[what], ends="close")
        case "drip":
            return Transfer(drip=True)
        case "gzip":
            return Transfer(head="HTTP/1.1 200 OK\r\nContent-Encoding: gzip")
    return None


async def _compressed(answer: Answer) -> AsyncGenerator[bytes, None]:
    yield gzip.compress(b"".join([part async for part in answer.parts]))


async def _joined(answer: Answer) -> AsyncGenerator[bytes, None]:
    yield b"".join([part async for part in answer.parts])


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


async def _large(wire: Wire, answer: Answer) -> None:
    """Send an endless error."""
    answer = replace(answer, chunked=True)
    await wire.send(head(answer))
    piece = framed(answer, b"e" * 2**16)
    for _ in range(150 * 16):
        await wire.send(piece)
    await finish(wire, answer)


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


SENDS: dict[str, Send] = {
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
    if word == "head":
        return _head(*arguments), answer
    if word == "status":
        status, body = arguments
        answer = replace(answer, status=int(status))
        if body == "large":
            return _large, answer
        answer = replace(answer, kind=b"application/json", parts=one(BODIES[body]), streamed=False)
        return Transfer(head=f"HTTP/1.1 {status} Reason\r\nRetry-After: soon").send, answer
    if (transfer := _transfer(word, arguments[0] if arguments else "")) is not None:
        if word in ("length", "gzip"):
            make = _compressed if word == "gzip" else _joined
            answer = replace(answer, parts=make(answer), streamed=False)
        if word == "chunk":
            answer = replace(answer, streamed=True, chunked=True)
        return transfer.send, answer
    spoil = {"many": _many, "large-text": _larger}.get(word) or _SPOILING[word](*arguments)
    spoilt = _spoilt(answer, spoil)
    send = _nonempty if answer.streamed else plainly
    return send, replace(answer, parts=spoilt)


async def _nonempty(wire: Wire, answer: Answer) -> None:
    """Send a stream without its empty parts, which would end it when chunked."""
    await wire.send(head(answer))
    async for part in answer.parts:
        if part:
            await wire.send(framed(answer, part))
    await finish(wire, answer)


_SPOILING: dict[str, Callable[..., Spoil]] = {"set": _set, "drop": _drop, "event": _event}

Edits = list[dict[str, Any]]


def edit(edits: Edits, answer: Answer) -> tuple[Send, Answer]:
    """Return how edits send a response, and the response that they make of the valid one."""
    transfer = Transfer()
    for one_edit in edits:
        change = _TRANSFERS.get(one_edit["do"])
        if change is not None:
            ends = transfer.ends
            transfer = replace(transfer, **change(one_edit))
            # The strongest end applies.
            strongest = max((ends, transfer.ends), key=("", "close", "hang", "reset").index)
            transfer = replace(transfer, ends=strongest)
    if transfer.size is not None:
        answer = replace(answer, streamed=True, chunked=True)
    return transfer.send, replace(answer, parts=_edited(answer, edits))


_TRANSFERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hang": lambda one: {"until": float(one["place"]), "ends": "hang"},
    "reset": lambda one: {"until": float(one["place"]), "ends": "reset"},
    "cut": lambda one: {"is_cut": True, "ends": "close"},
    "head": lambda one: {"head": one["value"], "ends": "close"},
    "pause": lambda one: {"middle": one["place"]},
    "sizes": lambda one: {"piece": one["value"]},
    "chunk": lambda one: {"size": one["value"]},
    "after": lambda one: {"behind": one["value"].encode()},
}


async def _edited(answer: Answer, edits: Edits) -> AsyncGenerator[bytes, None]:
    body = b"".join([part async for part in answer.parts])
    for one_edit in edits:
        change = _CHANGES.get(one_edit["do"])
        body = body if change is None else change(body, one_edit)
    yield body


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
