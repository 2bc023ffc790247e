"""A request: its body within limits, its query, and the response with the common headers."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import unquote_to_bytes

import orjson
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from ..backends import offload
from ..backends.errors import LatimerError, RequestError
from ..backends.http import FORWARDED
from ..backends.queue import Ticket
from ..schemas import limits
from .arrivals import AT_ONCE, OTHERS, Arrivals
from .dialects import Draft
from .errors import Header, InvalidRequest, as_ascii, error_event, with_names
from .limits.leases import Grant, Lease
from .messages.errors import render_as
from .parts import count_values, most_values
from .record import Record, Trace

T = TypeVar("T")

MAX_NESTING = limits.NESTING.maximum
# Seconds of work before the server begins to watch for a disconnect.
WATCH_AFTER = 0.02

# Bytes of a body that is not JSON which are handled in one turn of the event loop.
PIECE = 65_536
# The longest time before a stream says that it waits for an engine, in seconds.
NOTE_AFTER = 3.0

# The name of the exchange in the scope of its request.
EXCHANGE = "latimer.exchange"
# The frame of a WebSocket in the scope of its request, which has no other body
# (`responses.lanes.Create`).
FRAME = "latimer.frame"
# The id of the request in its scope, if a server in front of the adapter chose it. That server
# sends the header, too.
REQUEST_ID = "latimer.request_id"
# The message that is a whole response: its status, its headers and its body; and the extension of a
# server that takes such messages, which saves it the work of a second one.
WHOLE = "latimer.whole"
# The extension of a server that can send a part of a body at once, without a step of the app's
# task. It puts a function into the message that starts a response (`Exchange.push`).
PUSH = "latimer.push"
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

# Headers of all responses, and of streams.
_VERSION: Header = (b"openai-version", b"2020-10-01")
_OF_STREAMS: Sequence[Header] = (
    (b"cache-control", b"no-cache, must-revalidate"),
    (b"x-accel-buffering", b"no"),
)

_NOT_JSON = (
    "We could not parse the JSON body of your request. (HINT: This likely means you aren't using "
    "your HTTP library correctly. The OpenAI API expects a JSON payload, but what was sent was not "
    "valid JSON.) "
)


# The headers that trace a request over several servers: W3C's parent, whose ids are not zero, and
# which only later versions may continue; and the text of the others, of which OpenAI and W3C allow
# 512 characters.
_PARENT = re.compile(
    rb"(?!ff)(?:00|((?!00)[0-9a-f]{2}))-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})"
    rb"(?(1)(?:-.*)?)"
)
_ASCII = re.compile(rb"[ -~]{1,512}")
TRACE_PARENT = b"traceparent"

# `name[key]` in a query.
_PAIR = re.compile(r"([^\[]+)\[(.*)\]", re.DOTALL)


# The `recent` requests of one whose body was not read.
_ALONE: dict[Exchange, asyncio.Task[Any] | None] = {}


class NotJson(InvalidRequest):
    """The error for a body that JSON does not allow, that has no object, or that is too deep."""

    log_code = "invalid_json"

    def __init__(self, reason: str) -> None:
        super().__init__(_NOT_JSON + reason)


class Disconnected(Exception):
    """A disconnect of the client while its request was read."""


class Exchange(Request):
    """An HTTP request and its response.

    Attributes:
        named: the headers by their names; of repeated ones, the last.
        request_id: the id of the request, which its response names.
        begun_at: the time at which the request arrived (`time.perf_counter`).
        status: the status of the response; 0 if it has not started.
        record: what is measured of the request; None if nobody observes it.
        trace: the span of the request; None if there is none.
        asked: the model that the body names; empty if it names none, and None if no body with a
            model has been read. A client can send anything here.
        model: the name of the request's model in metrics; empty if it has none.
        is_detached: True for work that outlives its request.
        forwarded: the headers that its calls of engines have too, by their fields in logs.
        is_named: True if a server in front of the adapter names the request in the response.
        response_headers: headers of the response that are known before it starts.
        started: True if the response has started.
        streams: True if the response is a stream of events.
        fault: formats an error that ends the stream.
        key: the digest of the API key; empty if no key is needed, or none that is known was sent.
        owner: the owner of the request's prefixes in prompt caches; empty if all share them.
        cache_key: the conversation that the request belongs to, as far as its body names it.
        end_user: the end user that the request names, or an empty text; logs show its hash.
        draft: the replaced fields of other servers, if the request has any.
        to_store: the body of a request that is stored or runs in the background, as it was sent.
        size: the size of the request body in bytes, as far as it has been read.
        arrivals: the bodies that arrive, with the largest size of one.
        keeps_body: True if the body may be read once more.
        hides_cache: True if other API keys may have prompts in the engine's prompt cache.
        is_once: True for a body that is read as it arrives, which cannot be read once more.
        defaults: adds a model's own defaults to a body; None if no model has any.
        is_left: True if the work was cancelled because the client disconnected.
        grant: the permissions of the API key; None if it has no table.
        lease: what the request has of the limits of its key; None if there are no limits.
        wants_stream: True if the request asks for a stream.
        keepalive: seconds between the comments of a stream that waits for an engine; 0 sends none.
        has_waited: True if the head of the response was sent because the request waits.
        names_engine: False if the head is sent before the engine has answered, so that another one
            may serve the request.
        ticket: the request as the queue of its model knows it, which learns the engine; None for a
            model without such a queue.
        write: sends a part of the body as `chunk` does, but without a message, for a frame of a
            WebSocket whose response passes through no middleware; None for other requests.
        sends_whole: True if a response may be one message (`WHOLE`), because the server takes it,
            and no middleware is between.
        recent: this request, and others of the event loop whose bodies were read in the same
            `WATCH_AFTER`. It gives way to them (`offload.give_way`).
        pushes: True if `push` is there as soon as the response has started, for the same reasons.
        push: sends a part of the body at once. It returns False if the client reads too slowly:
            this part is sent, but `chunk` or `write` must send the next one, as they wait. None if
            only they can send.
    """

    # Most requests leave these values as they are.
    grant: Grant | None = None
    lease: Lease | None = None
    ticket: Ticket | None = None
    record: Record | None = None
    trace: Trace | None = None
    write: Callable[..., Awaitable[None]] | None = None
    push: Callable[[bytes], bool] | None = None
    started = streams = is_left = wants_stream = has_waited = keeps_body = is_detached = False
    is_once = is_named = sends_whole = pushes = hides_cache = False
    fault: Callable[[LatimerError], bytes] = staticmethod(error_event)
    key = owner = end_user = cache_key = model = ""
    asked: object = None
    status = 0
    forwarded: Mapping[str, str] | None = None
    draft: Draft | None = None
    to_store: Mapping[str, Any] | None = None
    size = 0
    keepalive = 0.0
    names_engine = True
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    # What Starlette's constructor sets; its methods that read a body are not used.
    _stream_consumed = _is_disconnected = False
    _form = None
    _parts: list[bytes] | None = None
    recent: dict[Exchange, asyncio.Task[Any] | None] = _ALONE
    _watcher: asyncio.Task[None] | None = None

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, arrivals: Arrivals = OTHERS
    ) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.begun_at = time.perf_counter()
        self.named: Mapping[bytes, bytes] = dict(scope["headers"])
        if REQUEST_ID in scope:
            self.request_id, self.is_named = scope[REQUEST_ID], True
        else:
            # 0.47 µs; `random` takes 0.30 µs, but 156 of its values tell all that follow.
            self.request_id = f"req_{os.urandom(16).hex()}"
        self.response_headers: list[Header] = []
        self._arrivals = arrivals

    @property
    def place(self) -> str:
        """The method and the path, as errors name them."""
        return f"{self.method} {self.scope['path']}"

    def through(self, receive: Receive, send: Send) -> None:
        """Exchange messages through a middleware from now on."""
        self._receive, self._send = receive, send
        self.write, self.sends_whole, self.pushes = None, False, False
        # The middleware may have changed them.
        self.named = dict(self.scope["headers"])

    def detached(self, send: Send) -> Exchange:
        """Return an exchange for work that outlives this one; it streams to `send`.

        The work has the lease from then on.
        """
        found = Exchange(self.scope, self._receive, send)
        found.request_id = self.request_id
        found.key, found.owner, found.end_user = self.key, self.owner, self.end_user
        found.draft, found.to_store, found.size = self.draft, self.to_store, self.size
        found.cache_key, found.hides_cache = self.cache_key, self.hides_cache
        found.streams = found.is_detached = True
        found.status, found.model, found.forwarded = 200, self.model, self.forwarded
        found.wants_stream = self.wants_stream
        found.trace = self.trace
        found.grant = self.grant
        found.lease, self.lease = self.lease, None
        return found

    async def read_body(self) -> list[bytes]:
        """Return the parts of the body; watch for a disconnect from then on.

        Raises:
            InvalidRequest: the content type is not JSON; 413 for more than `arrivals.most` bytes.
            Disconnected: the client disconnected before the end of the body.
        """
        if self._parts is not None:
            return self._parts
        headers, found = self.scope["headers"], self.named
        if len(found) < len(headers) or found.get(b"content-type") != JSON:
            for key, value in headers:
                if key == b"content-type":
                    _check_type(value)
        length = found.get(b"content-length", b"")
        declared = int(length[:20]) if length.isdigit() else 0
        if declared > self._arrivals.most:
            raise _too_large(self._arrivals.most)
        if declared > AT_ONCE:
            self._arrivals.check(self.key, declared)
        if TRACE_PARENT in found or b"x-client-request-id" in found or self.trace is not None:
            self._forward(headers)
        parts: list[bytes] = []
        # A frame has arrived already.
        size, more = 0, FRAME not in self.scope
        counted = 0
        try:
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                part: bytes = message.get("body", b"")
                parts.append(part)
                size += len(part)
                self.size = size
                if size > self._arrivals.most:
                    raise _too_large(self._arrivals.most)
                more = message.get("more_body", False)
                if more and part:
                    self._arrivals.add(self.key, self.grant, len(part), not counted)
                    counted += len(part)
        finally:
            if counted:
                self._arrivals.remove(self.key, counted)
        self._parts = parts
        self.watch()
        return parts

    async def arriving(self) -> AsyncGenerator[bytes, None]:
        """Yield a body that is not JSON as it arrives; at its end, watch for a disconnect.

        Raises:
            InvalidRequest: 413 for more than `arrivals.most` bytes.
            Disconnected: the client disconnected before the end of the body.
        """
        self.is_once = True
        headers, found = self.scope["headers"], self.named
        length = found.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._arrivals.most:
            raise _too_large(self._arrivals.most)
        if TRACE_PARENT in found or b"x-client-request-id" in found or self.trace is not None:
            self._forward(headers)
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            data: bytes = message.get("body", b"")
            size += len(data)
            if size > self._arrivals.most:
                raise _too_large(self._arrivals.most)
            for start in range(0, len(data), PIECE):
                yield data[start : start + PIECE]
                if len(data) > PIECE:
                    # A server may pass a large body in one message.
                    await asyncio.sleep(0)
            more = message.get("more_body", False)
        self.watch()

    def _forward(self, headers: Sequence[Header]) -> None:
        """Let the calls of engines have the headers that trace the request, if they are valid."""
        self.forwarded, lines = self._traced(headers)
        if self.record is not None:
            self.record.forwarded = self.forwarded
        FORWARDED.set(lines)

    def note_trace(self, record: Record) -> None:
        """Let a record have the headers that trace the request, if its body was not read."""
        if self.forwarded is None:
            record.forwarded = self._traced(self.scope["headers"])[0]

    def _traced(self, headers: Sequence[Header]) -> tuple[dict[str, str], bytes]:
        """Return the valid headers that trace the request, by their fields in logs, and as lines.

        The parent is sent as version 00 of W3C's format, the highest that is known here, and then
        with no other flag than that of sampling.
        """
        joined = joined_headers(headers)
        found: dict[str, str] = {}
        lines = b""
        if self.trace is not None:
            found["trace_id"], lines = self.trace.trace_id, self.trace.headers
        elif parent := _PARENT.fullmatch(joined.get(TRACE_PARENT, b"")):
            found["trace_id"] = parent[2].decode()
            flags = b"%02x" % (int(parent[4], 16) & 1) if parent[1] else parent[4]
            lines = b"traceparent: 00-%b-%b-%b\r\n" % (parent[2], parent[3], flags)
            if state := _ASCII.fullmatch(joined.get(b"tracestate", b"")):
                lines += b"tracestate: %b\r\n" % state[0]
        if own := _ASCII.fullmatch(joined.get(b"x-client-request-id", b"")):
            found["client_request_id"] = own[0].decode()
            lines += b"x-client-request-id: %b\r\n" % own[0]
        return found, lines

    async def read_json(self, read: Callable[[dict[str, Any]], T]) -> T:
        """Parse the body as a JSON object and return the result of `read` for it.

        Large bodies are parsed in a thread. Numbers must be finite, text must be valid UTF-8, and
        the nesting is limited.

        Raises:
            InvalidRequest: the body is invalid (contract 1.2).
        """
        parts = await self.read_body()
        if FRAME in self.scope:
            frame = self.scope[FRAME]
            self.size = frame.size
            if self.size <= offload.SMALL:
                return read(frame.body)
            return await offload.run(self.size, read, frame.body)
        if not self.keeps_body:
            # Only the value is kept.
            self._parts = []
        try:
            if self.size <= offload.SMALL:
                if len(self.recent) > 1:
                    await offload.wait_for_others()
                return read(object_of(parts))
            return await offload.run(self.size, _read, parts, read)
        except NotJson:
            check_coding(self.named.get(b"content-encoding", b""), "body")
            raise

    def watch(self) -> None:
        """Cancel the current task if the client disconnects before `unwatch`; the body is read.

        A task that waits for the disconnect costs as much as a short request. It therefore starts
        only after `WATCH_AFTER`, and one timer of the event loop starts the tasks of several
        requests.
        """
        loop = asyncio.get_running_loop()
        watched = _watched.get(loop)
        if watched is None:
            _forget_closed()
            watched = _watched[loop] = {}
            loop.call_later(WATCH_AFTER, _start_watchers, loop)
        self.recent = watched
        watched[self] = asyncio.current_task(loop)

    def unwatch(self) -> None:
        """Stop watching."""
        recent, self.recent = self.recent, _ALONE
        # Until the timer, it would keep all that the request has made. The next requests would then
        # find no memory that is in the processor's cache.
        recent.pop(self, None)
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            # The watcher's traceback refers to this object. A reference back would make a cycle
            # that keeps the whole request until the garbage collector runs.
            # Its event loop may be closed before this task ends.
            with suppress(RuntimeError):
                watcher.cancel()

    def start_watcher(self, task: asyncio.Task[Any]) -> None:
        """Start the task that waits for a disconnect, and then cancels the one of the work."""
        self._watcher = task.get_loop().create_task(self._wait(task))

    async def _wait(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.is_left = True
        task.cancel()

    async def wait(
        self, ready: asyncio.Future[Any], note: Callable[[], str], most: float | None
    ) -> bool:
        """Wait for an engine that is loaded; a stream gets comments meanwhile.

        The first comment sends the head of the response. After that, errors are events.
        """
        since = time.perf_counter()
        try:
            return await self._wait_for(ready, note, most)
        finally:
            if self.record is not None:
                self.record.note_wait(since)

    async def _wait_for(
        self, ready: asyncio.Future[Any], note: Callable[[], str], most: float | None
    ) -> bool:
        if not self.wants_stream or not self.keepalive:
            await asyncio.wait([ready], timeout=most)
            return ready.done()
        seconds = min(self.keepalive, NOTE_AFTER)
        while not ready.done():
            await asyncio.wait([ready], timeout=seconds)
            if ready.done():
                break
            if not self.started:
                self.names_engine = False
                await self.start(200, EVENT_STREAM)
                self.has_waited = True
            await self.chunk(b": %s\n\n" % as_ascii(note()).encode())
        return True

    async def reply(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON,
        headers: Iterable[Header] = (),
    ) -> None:
        """Send a complete response."""
        length = (b"content-length", b"%d" % len(body))
        is_head = self.scope["method"] == "HEAD"
        if self.sends_whole and not (is_head or self.has_waited):
            await self.start(status, content_type, (length, *headers), body)
            return
        await self.start(status, content_type, (length, *headers))
        if is_head:
            body = b""
        await self._send({"type": "http.response.body", "body": body})

    async def reply_in_parts(self, parts: Sequence[bytes]) -> None:
        """Send a complete response of JSON with one send for each part of its body."""
        length = str(sum(map(len, parts))).encode()
        await self.start(200, JSON, [(b"content-length", length)])
        for part in parts if self.scope["method"] != "HEAD" else ():
            await self.chunk(part)
        await self.chunk(b"", more=False)

    async def error(self, error: LatimerError) -> None:
        """Send an error as a complete response, or as the end of a stream that has waited."""
        if self.has_waited:
            await self.end(error)
            return
        if self.draft is not None and isinstance(error, RequestError):
            error = with_names(error, self.draft.names)
        await self.refuse(*render_as(self.scope, error, self.request_id))

    def end(self, error: LatimerError) -> Awaitable[None]:
        """Send an error as the end of a stream."""
        return (self.write or self.chunk)(self.fault(error), False)

    async def refuse(self, status: int, body: Any, headers: Iterable[Header]) -> None:
        """Send the object of an error; headers that the response has already are not repeated."""
        new = [header for header in headers if header not in self.response_headers]
        await self.reply(status, orjson.dumps(body), headers=new)

    async def start(
        self,
        status: int,
        content_type: bytes,
        headers: Iterable[Header] = (),
        whole: bytes | None = None,
    ) -> None:
        """Send the status and the headers of a response; chunks follow.

        Args:
            whole: the body, if all of the response is sent at once.
        """
        if self.has_waited:
            return
        self.started, self.status = True, status
        head = [
            (b"content-type", content_type),
            (b"x-request-id", self.request_id.encode()),
            (b"openai-processing-ms", b"%d" % ((time.perf_counter() - self.begun_at) * 1000)),
            _VERSION,
            *self.response_headers,
            *headers,
        ]
        if self.is_named:
            del head[1]
        ticket = self.ticket
        if ticket is not None and ticket.engine and self.names_engine:
            head += _engine_headers(ticket.engine, ticket.affinity)
        if content_type is not JSON:
            self.streams = content_type.startswith(b"text/event-stream")
            if content_type == EVENT_STREAM:
                head += _OF_STREAMS
        if whole is None:
            message = {"type": "http.response.start", "status": status, "headers": head}
            try:
                await self._send(message)
            except asyncio.CancelledError:
                # The client has left before middleware took the message. It waits for one still.
                self.started = False
                raise
            if self.pushes and self.push is None:
                self.push = message.get(PUSH)  # type: ignore[assignment]
        else:
            await self._send({"type": WHOLE, "status": status, "headers": head, "body": whole})

    def named_by(self, send: Send) -> Send:
        """Return a `send` that adds the id of the request to a response without one.

        Routes of users send their responses themselves. An error after the start of one cannot be
        a response.
        """

        async def send_named(message: Message) -> None:
            is_start = message["type"] == "http.response.start"
            if is_start and not self.is_named:
                headers = list(message.get("headers") or ())
                if all(name.lower() != b"x-request-id" for name, _ in headers):
                    headers.append((b"x-request-id", self.request_id.encode()))
                message = {**message, "headers": headers}
            await send(message)
            if is_start:
                self.started = True

        return send_named

    def chunk(self, data: bytes, more: bool = True) -> Awaitable[None]:
        """Send a part of the body.

        Every token takes this path, so it saves a coroutine and returns that of `send`.
        """
        return self._send({"type": "http.response.body", "body": data, "more_body": more})


def joined_headers(headers: Iterable[Header]) -> dict[bytes, bytes]:
    """Return headers by their names; those with the same name are one list (RFC 9110, 5.3).

    A repeated `traceparent` is omitted: which one counts is unknown (W3C).
    """
    found: dict[bytes, bytes] = {}
    repeats = False
    for name, value in headers:
        if name in found:
            repeats |= name == TRACE_PARENT
            value = b"%b,%b" % (found[name], value)
        found[name] = value
    if repeats:
        del found[TRACE_PARENT]
    return found


def header_value(text: str) -> bytes:
    """Return a text as the value of a header."""
    return text.encode("ascii", "backslashreplace")


@lru_cache
def _engine_headers(engine: str, affinity: str) -> tuple[Header, ...]:
    """Return the headers that name the engine of a response, and what it had of the prompt."""
    return ((b"x-latimer-engine", header_value(engine)), (b"x-latimer-affinity", affinity.encode()))


# The exchanges that the next timer of each event loop starts to watch, and the tasks of their work.
_watched: dict[asyncio.AbstractEventLoop, dict[Exchange, asyncio.Task[Any] | None]] = {}


def _forget_closed() -> None:
    """Forget event loops that were closed before their timer, with all that their requests made."""
    for loop in [*_watched]:
        if loop.is_closed():
            _watched.pop(loop, None)


def _start_watchers(loop: asyncio.AbstractEventLoop) -> None:
    # The work of most has ended.
    for exchange, task in _watched.pop(loop, {}).items():
        if task is not None:
            exchange.start_watcher(task)


def _check_type(content_type: bytes) -> None:
    media = content_type.decode("latin-1").partition(";")[0].strip().lower()
    if media and media != "application/json":
        media = as_ascii(media)
        raise InvalidRequest(
            f"Unsupported content type: '{media}'. This API method only accepts "
            "'application/json' requests, but you specified the header 'Content-Type: "
            f"{media}'. Please try again with a supported content type.",
            code="unsupported_content_type",
        )


def check_coding(value: bytes, part: str) -> None:
    """Check the header `Content-Encoding`; `part` names the body in the error.

    Raises:
        InvalidRequest: the body is compressed.
    """
    coding = value.decode("latin-1").strip().lower()
    if coding not in ("", "identity"):
        raise InvalidRequest(
            f"Unsupported content encoding: '{as_ascii(coding)}'. Send the {part} without "
            "'Content-Encoding', uncompressed.",
            code="unsupported_content_type",
        )


def _read(parts: list[bytes], read: Callable[[dict[str, Any]], T]) -> T:
    return read(object_of(parts))


def object_of(parts: list[bytes]) -> dict[str, Any]:
    """Return the JSON object that a body is; a large one is for a thread.

    Raises:
        InvalidRequest: it is invalid (contract 1.2).
    """
    body = b"".join(parts) if len(parts) > 1 else parts[0]
    if len(body) > limits.CONTAINERS.maximum < most_values(body):
        _check_count(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise NotJson(f"The parser reports: {error}.") from None
    if not isinstance(value, dict):
        raise NotJson("The body must be an object.")
    if body.count(b"[") + body.count(b"{") > MAX_NESTING and _depth(value) > MAX_NESTING:
        raise NotJson(f"The body is nested deeper than {MAX_NESTING} levels.")
    return value


def _check_count(body: bytes) -> None:
    """Reject a body with more values than any request needs, before it is parsed."""
    most = (limits.CONTAINERS, limits.FIELDS, limits.VALUES)
    for count, limit in zip(count_values(body), most, strict=True):
        if count > limit.maximum:
            raise InvalidRequest(
                f"Invalid request body: it has {count} {limit.unit}; at most {limit.maximum} are "
                "allowed."
            )


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
        # Starlette replaces bytes that are not UTF-8.
        unquote_to_bytes(query).decode()
        pairs = QueryParams(query.decode()).multi_items()
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
