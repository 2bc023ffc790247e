"""A request: its body within limits, its query, and the response with the common headers."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import orjson

from ..backends import offload
from ..backends.errors import LatimerError, RequestError
from ..schemas import limits
from .dialects import Draft
from .errors import Header, InvalidRequest, as_ascii, error_event, render, with_names

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

T = TypeVar("T")

MAX_NESTING = limits.NESTING.most
# Seconds of work before the server begins to watch for a disconnect.
WATCH_AFTER = 0.02

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

_NOT_JSON = (
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using "
    "your HTTP library correctly. The OpenAI API expects a JSON payload, but what was sent was not "
    "valid JSON.) "
)


# A string that is never closed matches to the end of the body, so that no part is scanned twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


# `name[key]` in a query.
_PAIR = re.compile(r"([^\[]+)\[(.*)\]", re.DOTALL)


class Disconnected(Exception):
    """A disconnect of the client while its request was read."""


class Exchange:
    """An HTTP request and its response."""

    __slots__ = (
        "_body", "_receive", "_send", "_started_at", "draft", "end_user", "fault", "headers",
        "key", "owner", "request_id", "scope", "size", "started", "streams", "to_store",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._started_at = time.perf_counter()
        self.request_id = f"req_{random.getrandbits(128):032x}"
        self.headers: list[Header] = []
        self.started = False
        # True if the response is a stream of events.
        self.streams = False
        # Formats an error that ends the stream.
        self.fault: Callable[[LatimerError], bytes] = error_event
        # The digest of the API key; empty if no key is needed.
        self.key = ""
        # The owner of the request's prefixes in prompt caches; empty if all share them.
        self.owner = ""
        # The end user that the request names, or an empty text; logs show its hash (`end_user.py`).
        self.end_user = ""
        # The replaced fields of other servers, if the request has any.
        self.draft: Draft | None = None
        # The body of a request that is stored or runs in the background, as the client sent it.
        self.to_store: Mapping[str, Any] | None = None
        self._body: list[bytes] = []
        # The size of the request body in bytes, as far as it has been read.
        self.size = 0

    def detached(self, send: Send) -> Exchange:
        """Return an exchange for work that outlives this one; it streams to `send`."""
        found = Exchange(self.scope, self._receive, send)
        found.request_id = self.request_id
        found.key, found.owner, found.end_user = self.key, self.owner, self.end_user
        found.draft, found.to_store, found.size = self.draft, self.to_store, self.size
        found.started = found.streams = True
        return found

    def header(self, name: bytes) -> str | None:
        """Return a header of the request, or None if it is missing."""
        value = self.raw_header(name)
        return None if value is None else value.decode("latin-1")

    def raw_header(self, name: bytes) -> bytes | None:
        """Return the raw bytes of a request header, or None if it is missing."""
        for key, value in self.scope["headers"]:
            if key == name:
                return value  # type: ignore[no-any-return]
        return None

    async def receive(self, limit: int) -> None:
        """Read the body.

        Raises:
            InvalidRequest: the content type is not JSON; 413 for more than `limit` bytes.
            Disconnected: the client disconnected before the end of the body.
        """
        for key, value in self.scope["headers"]:
            if key == b"content-type":
                if value != JSON:
                    _check_type(value)
            elif key == b"content-length" and value.isdigit() and int(value[:20]) > limit:
                raise _too_large(limit)
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            part: bytes = message.get("body", b"")
            self._body.append(part)
            self.size += len(part)
            if self.size > limit:
                raise _too_large(limit)
            more = message.get("more_body", False)

    async def json(self, read: Callable[[dict[str, Any]], T]) -> T:
        """Parse the body as a JSON object and return the result of `read` for it.

        Large bodies are parsed in a thread. Numbers must be finite, text must be valid UTF-8, and
        the nesting is limited.

        Raises:
            InvalidRequest: the body is invalid (contract 1.2).
        """
        parts, self._body = self._body, []
        if self.size <= offload.SMALL:
            return _read(parts, read)
        return await offload.run(self.size, _read, parts, read)

    async def until_disconnect(self) -> None:
        """Return when the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON,
        headers: Iterable[Header] = (),
    ) -> None:
        """Send a complete response."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, content_type, [length, *headers])
        if self.scope.get("method") == "HEAD":
            body = b""
        await self._send({"type": "http.response.body", "body": body})

    async def reply_in_parts(self, parts: Sequence[bytes]) -> None:
        """Send a complete response of JSON with one send for each part of its body."""
        length = str(sum(map(len, parts))).encode()
        await self.start(200, JSON, [(b"content-length", length)])
        for part in parts if self.scope.get("method") != "HEAD" else ():
            await self.chunk(part)
        await self.chunk(b"", more=False)

    async def error(self, error: LatimerError) -> None:
        """Send an error as a complete response."""
        if self.draft is not None and isinstance(error, RequestError):
            error = with_names(error, self.draft.names)
        status, body, headers = render(error)
        await self.reply(status, orjson.dumps(body), headers=headers)

    async def start(self, status: int, content_type: bytes, headers: Iterable[Header] = ()) -> None:
        """Send the status and the headers of a response; chunks follow."""
        self.started = True
        milliseconds = int((time.perf_counter() - self._started_at) * 1000)
        head = [
            (b"content-type", content_type),
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", str(milliseconds).encode()),
            (b"openai-version", b"2020-10-01"),
            *self.headers,
            *headers,
        ]
        self.streams = content_type.startswith(b"text/event-stream")
        if content_type == EVENT_STREAM:
            head += [
                (b"cache-control", b"no-cache, must-revalidate"),
                (b"x-accel-buffering", b"no"),
            ]
        await self._send({"type": "http.response.start", "status": status, "headers": head})

    def chunk(self, data: bytes, more: bool = True) -> Awaitable[None]:
        """Send a part of the body.

        Every token takes this path, so it saves a coroutine and returns that of `send`.
        """
        return self._send({"type": "http.response.body", "body": data, "more_body": more})


async def unless_disconnected(exchange: Exchange, work: Awaitable[None]) -> None:
    """Await the work, and cancel it if the client disconnects first."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task(loop)
    assert task is not None
    watch = _Watch(exchange, task)
    watches = _watches.get(loop)
    if watches is None:
        watches = _watches[loop] = []
        loop.call_later(WATCH_AFTER, _start_watches, loop)
    watches.append(watch)
    try:
        await work
    except asyncio.CancelledError:
        # A cancellation from outside is raised again; the one by the watch ends here.
        if not watch.gone or task.uncancel() > 0:
            raise
    finally:
        watch.done = True
        watcher, watch.watcher = watch.watcher, None
        if watcher is not None:
            # The watcher's traceback refers to the watch. A reference back would make a cycle that
            # keeps the whole request until the garbage collector runs.
            watcher.cancel()


class _Watch:
    """A watch that cancels a request if its client disconnects.

    A task that waits for the disconnect costs as much as a short request. It therefore starts only
    after `WATCH_AFTER`, and one timer of the event loop starts the tasks of several requests.
    """

    __slots__ = ("_exchange", "_task", "done", "gone", "watcher")

    def __init__(self, exchange: Exchange, task: asyncio.Task[Any]) -> None:
        self._exchange = exchange
        self._task = task
        self.watcher: asyncio.Task[None] | None = None
        self.gone = False
        self.done = False

    async def wait(self) -> None:
        await self._exchange.until_disconnect()
        self.gone = True
        self._task.cancel()


# The watches that the next timer of each event loop starts.
_watches: dict[asyncio.AbstractEventLoop, list[_Watch]] = {}


def _start_watches(loop: asyncio.AbstractEventLoop) -> None:
    for watch in _watches.pop(loop, ()):
        if not watch.done:
            watch.watcher = loop.create_task(watch.wait())


def _check_type(content_type: bytes) -> None:
    """Reject a content type other than JSON."""
    media = content_type.decode("latin-1").partition(";")[0].strip().lower()
    if media and media != "application/json":
        media = as_ascii(media)
        raise InvalidRequest(
            f"Unsupported content type: '{media}'. This API method only accepts "
            "'application/json' requests, but you specified the header 'Content-Type: "
            f"{media}'. Please try again with a supported content type.",
            code="unsupported_content_type",
        )


def _read(parts: list[bytes], read: Callable[[dict[str, Any]], T]) -> T:
    return read(_object(parts))


def _object(parts: list[bytes]) -> dict[str, Any]:
    """Return the JSON object in a body."""
    body = b"".join(parts) if len(parts) > 1 else parts[0]
    if len(body) > limits.CONTAINERS.most:
        _check_count(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(_NOT_JSON + f"The parser reports: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest(_NOT_JSON + "The body must be an object.")
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and _depth(value) > MAX_NESTING:
        raise InvalidRequest(_NOT_JSON + f"The body is nested deeper than {MAX_NESTING} levels.")
    return value


def _check_count(body: bytes) -> None:
    """Reject a body with more values than any request needs, before it is parsed.

    Text in strings does not count. Most bodies are small enough without removing the strings.
    """
    if _values(body) <= limits.CONTAINERS.most:
        return
    bare = _STRING.sub(b"", body)
    containers = bare.count(b"[") + bare.count(b"{")
    for count, limit in ((containers, limits.CONTAINERS), (_values(bare), limits.VALUES)):
        if count > limit.most:
            raise InvalidRequest(
                f"Invalid request body: it has {count} {limit.unit}; at most {limit.most} are "
                "allowed."
            )


def _values(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(
        f"The request body is too large. This server accepts at most {limit} bytes.",
        code="request_too_large",
        status=413,
    )


def _depth(value: Any) -> int:
    """Return the nesting depth of arrays and objects; the count stops just above the limit."""
    level, here = 0, [value]
    while here and level <= MAX_NESTING:
        level += 1
        here = [
            inner
            for outer in here
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return level


def parameters(query: bytes) -> dict[str, Any]:
    """Return the parameters of a query; of repeated ones, the last.

    `name[key]=value` is the pair of an object, percent-encoded in any way or not.

    Raises:
        InvalidRequest: the query is not UTF-8.
    """
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequest(
            "Invalid query string: it is not UTF-8. Encode it as UTF-8, and then percent-encode "
            "it.",
            code="invalid_value",
        ) from None
    found: dict[str, Any] = {}
    for name, value in pairs:
        match = _PAIR.fullmatch(name)
        if match is None:
            found[name] = value
            continue
        inner = found.get(match[1])
        if not isinstance(inner, dict):
            inner = found[match[1]] = {}
        inner[match[2]] = value
    return found
