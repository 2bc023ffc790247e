"""A small server that keeps every promise, with hooks where a fault can break one.

It is written from the contract alone, independently of the checks that judge it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote

from suite import audio, embeddings, messages, model, rules
from suite.responses.routes import CONVERSATIONS, TOKENS, Routes
from suite.responses.socket import Socket, refuse
from suite.rules import Refused, check_body, parse
from suite.stored import Store
from suite.work import CHAT, work_of

Send = Callable[[dict[str, Any]], Awaitable[None]]
COMPLETIONS, EMBEDDINGS, RESPONSES = "/completions", "/embeddings", "/responses"
POSTED = {COMPLETIONS, CHAT, EMBEDDINGS, RESPONSES, TOKENS, messages.M, messages.COUNT,
          audio.SPEECH, *audio.FORMS}  # fmt: skip
# The number of requests that are rejected after the engine died.
DOWN = 2
# The number of long streams that the engine runs concurrently.
SLOTS = 8
# The tokens of a long prompt, and the twentieths of a second that its evaluation takes.
LONG, EVALUATION = 7000, 52
GONE = {"message": "The engine is gone.", "type": "server_error", "param": None, "code": None}


class Fault:
    """The hooks and flags of the correct server. A fault overrides those that it breaks.

    The server reads a flag only where nothing else decides. A check that never reaches that place
    does not run with the fault.

    Args:
        own: the hooks and flags to override.
    """

    # The seconds for which a stream occupies the engine after its client has disconnected.
    stays: float = 0
    # The connection stays open after a stream; a long stream is sent only when it is complete.
    lingers: bool = False
    buffers: bool = False
    # The status of requests after three streams whose clients have disconnected, up to the first
    # one that does not stream; 0 serves them.
    after_cancelled: int = 0
    # The status of a request while more than 20 run; 0 serves it.
    crowded: int = 0
    # The bytes that a stream sends while a long prompt is evaluated.
    comment: bytes = b": keep-alive\n\n"
    # Of two concurrent requests, one gets the other's answer.
    mixes: bool = False
    # The last event of a stream whose engine died, and the status of requests after that.
    on_break: Any = staticmethod(lambda chunk: {"error": GONE})
    down: int = 503
    # The status of a request with a wrong key.
    wrong_key: int = 401
    # A streamed response is stored so many seconds after its last event; 0: before it.
    late: float = 0
    # A response is stored even if its client disconnects.
    keeps_aborted: bool = False
    # A response that has ended cannot be cancelled.
    refuses_cancel: bool = True
    # The status of a compaction.
    no_compact: int = 404
    # The statuses of a handshake, and of one with a wrong key; its error has an object.
    socket: int = 101
    socket_key: int = 401
    # The frames of a WebSocket are binary; a connection closes after an error.
    binary: bool = False
    closes: bool = False
    # The lanes of a connection, whose responses follow one another.
    lanes: int = 32
    in_order: bool = True
    # A connection keeps the latest response of each lane for itself, unless it fails there.
    keeps: bool = True
    keeps_older: bool = False
    shares: bool = False
    evicts: bool = True
    evicts_forks: bool = False
    # A warm-up generates nothing; the notice of a client gets no answer; steering fails.
    warms_up: bool = True
    tells_processed: bool = False
    steered: str = "response.steer.failed"

    def __init__(self, **own: Any) -> None:
        unknown = [name for name in own if not hasattr(Fault, name)]
        assert not unknown, unknown
        vars(self).update(own)

    def head(self, method: str, path: str, headers: dict[str, str]) -> None:
        """Inspect a request before its body is read; may raise `Refused`."""

    def raw(self, body: bytes) -> bytes:
        """Return the body of a request, before parsing."""
        return body

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request, before validation."""
        return body

    def valid(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a request, after validation."""
        return body

    def reply(self, path: str, body: dict[str, Any], sent: Mapping[str, Any]) -> Any:
        """Return the body of a plain reply."""
        return body

    def chunks(self, path: str, chunks: list[Any], sent: Mapping[str, Any]) -> list[Any]:
        """Return the chunks of a stream."""
        return chunks

    def events(self, events: list[Any]) -> list[Any]:
        """Return the events of a streamed response."""
        return events

    def message_events(self, events: list[Any]) -> list[Any]:
        """Return the events of a streamed message."""
        return events

    def on_failure(self, events: list[Any]) -> list[Any]:
        """Return the last events of a streamed response whose engine died."""
        return events

    def replay(self, events: list[Any]) -> list[Any]:
        """Return the events of a stored response."""
        return events

    def frame(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Return the frame of a client."""
        return frame

    def frames(self, frames: list[Any], sent: Mapping[str, Any]) -> list[Any]:
        """Return the frames of a response, before their lane is added."""
        return frames

    def lane(self, frames: list[Any]) -> list[Any]:
        """Return the frames of a response with their lane."""
        return frames

    def refusal(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Return the frame of an error; an empty one is not sent."""
        return frame

    def chain(self, items: list[Any], parent: dict[str, Any]) -> list[Any]:
        """Return the items before a request; `parent` is the previous response's request."""
        return items

    def event(self, data: bytes) -> bytes:
        """Return the bytes of one event of a stream."""
        return data

    def audio_events(self, path: str, events: list[Any], sent: Mapping[str, Any]) -> list[Any]:
        """Return the events of streamed speech, or of a streamed transcription."""
        return events

    def sound(self, data: bytes, sent: Mapping[str, Any]) -> bytes:
        """Return spoken audio."""
        return data

    def query(self, query: dict[str, str]) -> dict[str, str]:
        """Return the query of a request for stored completions."""
        return query

    def error(self, status: int, error: dict[str, Any], sent: Mapping[str, Any]) -> tuple[int, Any]:
        """Return the status and the body of a rejection."""
        return status, {"error": error}

    def headers(self, status: int, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers of a reply."""
        return headers


class Server:
    """The ASGI app."""

    def __init__(self, fault: Fault | None = None, clock: Callable[[], float] = time.time) -> None:
        self.fault = fault or Fault()
        self.clock = clock
        self._numbers = itertools.count(1)
        self._turns: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(SLOTS)
        self._running = self._cancelled = 0
        self._last: Any = None
        self._ended = 0.0
        self._down = 0
        self.store = Store()
        self._routes = Routes(self)
        self._audio = audio.Audio(self)

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._open(scope, receive, send)
        if scope["type"] != "http":
            return
        headers = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        sent: dict[str, Any] = {}
        try:
            await self._route(scope, headers, sent, receive, send)
        except Refused as refused:
            error = {
                "message": refused.message,
                "type": "invalid_request_error",
                "param": refused.param,
                "code": refused.code,
            }
            status, value = self.fault.error(refused.status, error, sent)
            more = {"allow": "POST"} if refused.status == 405 else {}
            if b"/messages" in scope["raw_path"] and CHAT.encode() not in scope["raw_path"]:
                name = f"req_{next(self._numbers):032x}"
                value = messages.error(status, refused.message, name)
                value = self.fault.reply("message error", value, sent)
                more = {**more, "request-id": name}
            await self.reply(send, status, value, more)

    async def _open(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer a handshake."""
        headers = dict(scope["headers"])
        wrong = headers.get(b"authorization") == b"Bearer sk-wrong"
        status = self.fault.socket_key if wrong else self.fault.socket
        if status != 101:
            await refuse(send, status, {"message": "Refused."})
            return
        await Socket(self, self._routes, receive, send).run()

    async def _route(
        self, scope: Any, headers: dict[str, str], sent: dict[str, Any], receive: Any, send: Send
    ) -> None:
        """Answer a request, and copy its body into `sent` even if the request is rejected."""
        method = scope["method"]
        path = scope["raw_path"].decode().split("?")[0].removeprefix("/v1")
        self.fault.head(method, path, headers)
        if headers.get("authorization") == "Bearer sk-wrong":
            raise Refused("Incorrect API key provided.", code="invalid_api_key",
                          status=self.fault.wrong_key)  # fmt: skip
        if path == "/break":
            self._ended, self._down = time.monotonic(), DOWN
            await self.reply(send, 200, {})
            return
        if path.startswith("/models"):
            await self._models(method, path, send, "anthropic-version" in headers)
            return
        query = dict(parse_qsl(scope["query_string"].decode()))
        if path.startswith(f"{CHAT}/") or (path == CHAT and method == "GET"):
            await self._stored(method, path, query, receive, send)
            return
        if path.startswith(RESPONSES) and (path not in POSTED or method == "GET"):
            await self._routes.responses(method, path, query, send)
            return
        if path.startswith(CONVERSATIONS):
            await self._routes.conversations(method, path, query, await _read(receive), send)
            return
        if path not in POSTED:
            raise Refused(f"Invalid URL ({method} {path})", status=404)
        if method != "POST":
            raise Refused(f"Not allowed to {method} on {path}.", status=405)
        if path in audio.FORMS:
            kind = headers.get("content-type", "")
            await self._audio.transcribe(path, kind, await _read(receive), send, sent)
            return
        if "json" not in headers.get("content-type", "application/json"):
            raise Refused("Unsupported content type.", code="unsupported_content_type")
        sent |= self.fault.request(path, parse(self.fault.raw(await _read(receive))))
        if path == EMBEDDINGS:
            await self._embed(sent, send)
            return
        if path == audio.SPEECH:
            await self._audio.speak(sent, send, receive)
            return
        if path.startswith(messages.M):
            if "refused" in self.fault.query(query):
                raise Refused("Unknown query.")
            await self._message(path, sent, send, receive)
            return
        if path in (RESPONSES, TOKENS):
            await self._routes.create(path, sent, send, receive)
            return
        sent |= audio.resolve(sent, self._audio.known)
        check_body(path, sent)
        if path == CHAT:
            audio.check_chat(sent)
            rules.check_forms(sent)
        await self._answer(path, self.fault.valid(path, sent), send, receive)

    async def _stored(
        self, method: str, path: str, query: dict[str, str], receive: Any, send: Send
    ) -> None:
        name, _, what = path.removeprefix(CHAT).removeprefix("/").partition("/")
        query = self.fault.query(query)
        if not name:
            found, kind = self.store.list(query), "list"
        elif what == "messages":
            found, kind = self.store.messages(name, query), "messages"
        elif method == "DELETE":
            found, kind = self.store.delete(name), "deleted"
        elif method == "POST":
            found, kind = self.store.update(name, parse(await _read(receive))), "updated"
        else:
            found, kind = self.store.one(name), "one"
        await self.reply(send, 200, self.fault.reply(f"stored {kind}", found, query))

    async def _embed(self, sent: dict[str, Any], send: Send) -> None:
        given = embeddings.check(sent)
        sent = self.fault.valid(EMBEDDINGS, sent)
        if sent.get("input") is not None:
            given = embeddings.check(sent)
        reply = embeddings.answer(sent, given)
        await self.reply(send, 200, self.fault.reply(EMBEDDINGS, reply, sent))

    async def reply(
        self, send: Send, status: int, body: Any, more: Mapping[str, str] | None = None
    ) -> None:
        headers = self._head("application/json", more or {})
        await _start(send, status, self.fault.headers(status, headers))
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await send({"type": "http.response.body", "body": data})

    def _head(self, kind: str, more: Mapping[str, str]) -> dict[str, str]:
        return {
            "content-type": kind,
            "x-request-id": f"req_{next(self._numbers):032x}",
            "openai-processing-ms": "1",
            "openai-version": "2020-10-01",
            "access-control-allow-origin": "*",
            **more,
        }

    async def _message(self, path: str, sent: dict[str, Any], send: Send, receive: Any) -> None:
        messages.check(sent, path == messages.COUNT)
        sent = self.fault.valid(path, sent)
        await self.ready()
        whole = messages.answer({"max_tokens": 1, **sent}, self.turn(sent))
        more = {"request-id": f"req_{next(self._numbers):032x}"}
        if path == messages.COUNT:
            count = {"input_tokens": whole["usage"]["input_tokens"]}
            await self.reply(send, 200, self.fault.reply(path, count, sent), more)
            return
        whole = self.fault.reply(path, whole, sent)
        if not sent.get("stream"):
            await self.reply(send, 200, whole, more)
            return
        await self.begin_stream(send, more)
        for event in self.fault.message_events(messages.events(whole)):
            data = f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()
            await send({"type": "http.response.body", "body": self.fault.event(data),
                        "more_body": True})  # fmt: skip
        await send({"type": "http.response.body", "body": b""})

    async def _models(self, method: str, path: str, send: Send, anthropic: bool) -> None:
        one = {"id": "org/toy", "object": "model", "created": 1_700_000_000, "owned_by": "suite",
               "context_length": model.CONTEXT,
               "architecture": {"input_modalities": ["text", "audio"],
                                "output_modalities": ["text", "audio"]}}  # fmt: skip
        if path == "/models" and anthropic:
            reply = self.fault.reply("message models", messages.models(one), {})
            await self.reply(send, 200, reply)
            return
        if path == "/models":
            listed = {"object": "list", "data": [one]}
            await self.reply(send, 200, self.fault.reply(path, listed, {}))
            return
        if unquote(path.removeprefix("/models/")) != one["id"]:
            raise Refused("The model does not exist.", code="model_not_found", status=404)
        if method == "DELETE":
            raise Refused("This model cannot be deleted.", status=403)
        await self.reply(send, 200, self.fault.reply("/models/", one, {}))

    async def _answer(self, path: str, sent: dict[str, Any], send: Send, receive: Any) -> None:
        crowded = self.fault.crowded
        self._running += 1
        try:
            if crowded:
                await asyncio.sleep(0.005)
            after_cancelled = self.fault.after_cancelled
            if after_cancelled and self._cancelled >= 3:
                crowded = after_cancelled
                if not sent.get("stream"):
                    self._cancelled = 0
            elif self._running <= 20:
                crowded = 0
            if crowded:
                error = {"message": "Busy.", "type": "server_error", "param": None, "code": None}
                await self.reply(send, crowded, {"error": error})
                return
            await self._serve(path, sent, send, receive)
        finally:
            self._running -= 1

    async def _serve(self, path: str, sent: dict[str, Any], send: Send, receive: Any) -> None:
        series = re.fullmatch(r"\d, \d+, \d+,", str(sent.get("prompt")))
        if series and sent.get("max_tokens") in (0, 6) and self.fault.mixes:
            # Two concurrent requests get the later one's answer.
            self._last = sent
            await asyncio.sleep(0.005)
            sent = self._last if self._last.get("stream") == sent.get("stream") else sent
        await self.ready()
        work = work_of(path, sent, self.turn(sent))
        work.check_context()
        chat = path == CHAT
        name = f"chatcmpl-{next(self._numbers)}" if chat else f"cmpl-{next(self._numbers)}"
        head = {"id": name, "created": int(self.clock()), "model": sent["model"],
                "system_fingerprint": "fp_0"}  # fmt: skip
        slow = (sent.get("max_tokens") or 0) * (sent.get("n") or 1) >= 200
        if not sent.get("stream"):
            body = {"object": "chat.completion" if chat else "text_completion", **head,
                    **work.whole()}  # fmt: skip
            if sent.get("service_tier"):
                body["service_tier"] = "default"
            if audio.wants(sent):
                body = audio.spoken(body, sent, self._audio.known)
            if sent.get("store"):
                self.store.keep(body, sent)
            if slow and work.calls is None and work.prompts[0][0].count(ord("0")) > 2:
                await self._unless_ended(0.3 if work.turn == 1 else 5.0)
            await self.reply(send, 200, self.fault.reply(path, body, sent))
            return
        await self.begin_stream(send)
        if len(work.prompts[0][0]) > LONG:
            await self._evaluate(send)
        kind = "chat.completion.chunk" if chat else "text_completion"
        chunks = [{"object": kind, **head, **chunk} for chunk in work.chunks()]
        if sent.get("store"):
            whole = {"object": "chat.completion", **head, **work.whole()}
            self.store.keep(self.fault.reply("stored stream", whole, sent), sent)
        if audio.wants(sent):
            chunks = audio.spoken_chunks(chunks, self._audio.known)
        chunks = self.fault.chunks(path, chunks, sent)
        if slow and self.fault.buffers:
            await asyncio.sleep(1.2)
            slow = False
        async for chunk, died in self.paced(chunks, slow, receive):
            told = self.fault.on_break(chunk) if died else chunk
            if told is not None:
                await self.data(send, json.dumps(told))
        await self.data(send, "[DONE]")
        if sent.get("max_tokens") == 12 and self.fault.lingers:
            await asyncio.sleep(6)
        await send({"type": "http.response.body", "body": b""})

    async def data(self, send: Send, data: str) -> None:
        """Send one event of a stream."""
        body = self.fault.event(f"data: {data}\n\n".encode())
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def begin(self, send: Send, kind: str) -> None:
        """Send the head of a reply with a content type."""
        await _start(send, 200, self.fault.headers(200, self._head(kind, {})))

    async def begin_stream(self, send: Send, more: Mapping[str, str] | None = None) -> None:
        """Send the head of a stream of events."""
        head = {"cache-control": "no-cache", **(more or {})}
        headers = self._head("text/event-stream; charset=utf-8", head)
        await _start(send, 200, self.fault.headers(200, headers))

    async def ready(self) -> None:
        """Wait until the engine has a slot; raise `Refused` while it is down."""
        if self._down:
            self._down -= 1
            raise Refused("The engine is gone.", status=self.fault.down)
        async with self._slots:
            pass

    async def _evaluate(self, send: Send) -> None:
        """Send comments for as long as the evaluation of a long prompt takes."""
        for _ in range(EVALUATION):
            await asyncio.sleep(0.05)
            if self.fault.comment:
                await send({"type": "http.response.body", "body": self.fault.comment,
                            "more_body": True})  # fmt: skip

    def turn(self, sent: dict[str, Any]) -> int:
        """Count the repetitions of a request: without a seed, each one samples other tokens."""
        asked = json.dumps(sent)
        self._turns[asked] += 1
        return self._turns[asked]

    async def _unless_ended(self, seconds: float) -> None:
        """Wait as long as a long answer takes; reject the request if the engine dies meanwhile.

        A repeated request takes long enough to be interrupted on a busy machine, too.
        """
        start = time.monotonic()
        while time.monotonic() < start + seconds:
            await asyncio.sleep(0.01)
            if self._ended > start:
                raise Refused("The engine is gone.", status=self.fault.down)

    async def paced(
        self, chunks: list[Any], slow: bool, receive: Any
    ) -> AsyncIterator[tuple[Any, bool]]:
        """Yield the chunks of a stream; at the engine's death, the next one with True.

        A long stream takes time, and occupies the engine until it ends or its client disconnects.
        """
        gone = asyncio.ensure_future(receive())
        start = time.monotonic()
        try:
            async with self._slots if slow else contextlib.nullcontext():
                for chunk in chunks:
                    if slow:
                        await asyncio.sleep(0.003)
                    if gone.done() and gone.result()["type"] == "http.disconnect":
                        self._cancelled += 1
                        await asyncio.sleep(self.fault.stays)
                        return
                    yield chunk, self._ended > start
                    if self._ended > start:
                        return
        finally:
            gone.cancel()


async def _read(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
