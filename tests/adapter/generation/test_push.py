"""Tests of tokens that are sent where they arrive, without a step of the request's task."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from benchmarks.calls import FRAMES, PUSH, Socket, Wire, scope_of
from benchmarks.fake_engine import LAST, STREAM_HEAD, FakeEngine, chunk, compact, final
from latimer.adapter import OpenAIAdapter
from latimer.adapter.cli.protocol import _Cycle
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.record import Record
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.llama_server import LlamaServer
from support.engines.llama_server import FakeLlamaServer
from support.engines.model import Model
from support.engines.wire import running
from support.frames import texts_in
from support.servers import serving
from typing_extensions import override
from uvicorn.protocols.http.flow_control import FlowControl

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "Hello"}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 64},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 64},
    MESSAGES: {"messages": USER, "max_tokens": 64},
    RESPONSES: {"input": "Hello", "max_output_tokens": 64},
}
# What differs between two responses to the same request.
_OWN = re.compile(
    rb"(chatcmpl-|cmpl-|resp_|msg_|req_)\w+"
    rb'|"(created|created_at|completed_at)":\d+|,"obfuscation":"\w+"'
)


class Engine(FakeEngine):
    """A llama-server that answers with a script, and closes the connection after `None`."""

    script: Sequence[bytes | float | None] = ()
    asked = 0
    left: asyncio.Event
    peer: asyncio.Protocol

    def _send(self, _parts: list[bytes], _body: bytes) -> None:
        type(self).asked += 1
        self._task = asyncio.get_running_loop().create_task(self._play())

    async def _play(self) -> None:
        for part in self.script:
            if isinstance(part, bytes):
                self._transport.write(part)
                await asyncio.sleep(0)
            elif part is None:
                self.peer.connection_lost(ConnectionResetError("reset"))
            else:
                await asyncio.sleep(part)

    def connection_lost(self, _error: Exception | None) -> None:
        """Note that the peer has closed the connection."""
        self.left.set()


class Closing(Wire):
    """A connection in memory whose engine learns its end."""

    def abort(self) -> None:
        """End the connection."""
        if not self._is_closed:
            super().abort()
            self._peer.connection_lost(None)

    close = abort


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """Return the engine that all connections of this test lead to."""
    made = type("Made", (Engine,), {"left": asyncio.Event()})

    async def connect(factory: Callable[[], Any], *_: Any, **__: Any) -> tuple[Wire, Any]:
        protocol, one = factory(), made()
        one.peer = protocol
        wire = Closing(one)
        one.connection_made(Wire(protocol))
        protocol.connection_made(wire)
        return wire, protocol

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    return made


class Client:
    """A client in memory, and the server that it is connected to.

    Args:
        offers: True if the server can send at once.
        is_fast: False if it cannot send more after what is pushed.
    """

    def __init__(self, offers: bool, is_fast: bool = True) -> None:
        self.offers, self.is_fast = offers, is_fast
        self.parts: list[bytes] = []
        self.pushed = 0
        self.gone: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._bodies: list[Any] = []

    def push(self, data: bytes) -> bool:
        """Take a part of the body at once."""
        self.pushed += 1
        self.parts.append(data)
        return self.is_fast

    async def send(self, message: Any) -> None:
        """Take a message of the app."""
        self.parts.append(message.get("body", b""))
        if self.offers:
            message[PUSH] = self.push

    async def receive(self) -> Any:
        """Return the body, and then the end of the connection, if there is one."""
        return self._bodies.pop() if self._bodies else await self.gone

    async def ask(self, app: OpenAIAdapter, path: str, **fields: Any) -> bytes:
        """Send a request for a stream; return its body, without what two responses differ in."""
        body = json.dumps({"model": "m", "stream": True, **ASKED[path], **fields}).encode()
        self._bodies = [{"type": "http.request", "body": body, "more_body": False}]
        scope = scope_of(path, (b"content-type", b"application/json"))
        scope |= {"type": "http", "method": "POST", "scheme": "http"}
        scope["extensions"] = {PUSH: {}} if self.offers else {}
        await app(scope, self.receive, self.send)
        return _OWN.sub(b"", b"".join(self.parts))


def app_over(*hosts: str, **options: Any) -> OpenAIAdapter:
    """Return an adapter over llama-server, or over a pool of several."""
    engines = [LlamaServer(f"http://{host}:9") for host in hosts or ("127.0.0.1",)]
    common: Any = {"store": "off", "metrics": False, **options}
    if not hosts:
        return OpenAIAdapter(engines[0], any_model=True, **common)
    pool = Pool("m", [Replica(host, one) for host, one in zip(hosts, engines, strict=True)])
    return OpenAIAdapter([ModelEntry(pool, ("m",))], **common)


def events_of(*texts: str, tokens: int = 1) -> bytes:
    """Return the events of an answer of some texts, from a number of tokens on."""
    return b"".join(
        b"data: "
        + compact({"content": text, "tokens": [1], "stop": False, "tokens_predicted": number,
                   "tokens_evaluated": 12})
        + b"\n\n"
        for number, text in enumerate(texts, tokens)
    )  # fmt: skip


TEXTS = ("One", " two\n\ndata: ", "", "<think>drei</think>", ' "stop":true', " \u00e4\U0001f600")
END = chunk(final(len(TEXTS))) + LAST


async def both(
    app: OpenAIAdapter, path: str, **fields: Any
) -> tuple[tuple[bytes, int], tuple[bytes, int]]:
    """Return the bodies of a stream that is not pushed and of one that is, and their pushes."""
    found = []
    for offers in (False, True):
        client = Client(offers)
        found.append((await client.ask(app, path, **fields), client.pushed))
    return found[0], found[1]


FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "usage": (CHAT, {"stream_options": {"include_usage": True}}),
    "padded": (COMPLETIONS, {"stream_options": {"include_obfuscation": True}}),
    "completion": (COMPLETIONS, {}),
    "echo": (COMPLETIONS, {"echo": True}),
    "stop": (COMPLETIONS, {"stop": ["never", "two\n\n\n"]}),
    "messages": (MESSAGES, {}),
    "responses": (RESPONSES, {}),
    "tools": (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("hosts", [(), ("127.0.0.1", "127.0.0.2")], ids=["alone", "in a pool"])
async def test_a_pushed_stream_has_the_same_bytes(
    engine: type[Engine], name: str, hosts: tuple[str, ...]
) -> None:
    """Frames that are sent where their tokens arrive are those that the task would send."""
    path, fields = FIELDS[name]
    tokens = [chunk(events_of(text, tokens=number)) for number, text in enumerate(TEXTS, 1)]
    engine.script = [STREAM_HEAD + tokens[0], *tokens[1:], END]
    app = app_over(*hosts)
    (body, none), (pushed, count) = await both(app, path, **fields)
    assert pushed == body
    assert none == 0
    if name != "tools":
        # The texts of the first event come with the head, and one event has none.
        assert count == len(TEXTS) - 2
    await app.aclose()


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_every_split_gives_the_same_bytes(engine: type[Engine], path: str) -> None:
    """Wherever the bytes of the engine are split, also in its framing, a stream is the same."""
    first, *rest, last = [events_of(text, tokens=at) for at, text in enumerate(TEXTS, 1)]
    data, app, pushes = b"".join(map(chunk, rest)), app_over(), 0
    engine.script = [STREAM_HEAD + chunk(first), data, chunk(last), END]
    body = await Client(False).ask(app, path)
    cuts = [[data[:at], data[at:]] for at in range(len(data) + 1)]
    cuts += [[data[at : at + size] for at in range(0, len(data), size)] for size in (1, 7, 64, 333)]
    for parts in cuts:
        engine.script = [STREAM_HEAD + chunk(first), *parts, 0, chunk(last), END]
        client = Client(True)
        assert await client.ask(app, path) == body, parts
        pushes += client.pushed
    # At least the last one, after what the reader has completed.
    assert pushes >= len(cuts)
    await app.aclose()


BROKEN: dict[str, bytes | None] = {
    "json": b"data: {broken\n\n",
    "no object": b"data: 5\n\n",
    "two values": b'data: {"stop":false},{"stop":false}\n\n',
    "a field": b"garbage\n\n",
    "an error": b'data: {"error":{"code":500,"message":"lost power","type":"server_error"}}\n\n',
    "no text": b'data: {"stop":false,"tokens_predicted":3}\n\n',
    "stop": b'data: {"content":"x","stop":0,"tokens_predicted":3}\n\n',
    "fewer tokens": events_of("x", tokens=0),
    "too many tokens": events_of("x", tokens=1000),
    "an end between": final(2) + events_of("x", tokens=3),
    "bytes": b"data: \xff\xfe\n\n",
    "lost": None,
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("after", ["alone", "behind a token"])
async def test_a_broken_answer_ends_with_the_same_error(
    engine: type[Engine], name: str, after: str
) -> None:
    """A mistake of an engine after pushed tokens ends the stream as it does without pushes."""
    bad = BROKEN[name]
    begun = [STREAM_HEAD + chunk(events_of("One")), chunk(events_of(" two", tokens=2))]
    if bad is None:
        engine.script = [*begun, 0, None]
    else:
        before = events_of(" more", tokens=2) if after == "behind a token" else b""
        engine.script = [*begun, chunk(before + bad), chunk(events_of(" late", tokens=4)), 0.0]
    app = app_over()
    (body, _), (pushed, count) = await both(app, CHAT)
    assert pushed == body
    assert b'"error"' in pushed
    assert count >= 1
    await app.aclose()


async def test_a_slow_client_is_waited_for(engine: type[Engine]) -> None:
    """After a push that fills the client's buffer, the next token waits for the client."""
    tokens = [chunk(events_of(f" {number}", tokens=number)) for number in range(1, 9)]
    engine.script = [STREAM_HEAD + tokens[0], *tokens[1:], chunk(final(8)) + LAST]
    app = app_over()
    body = await Client(False).ask(app, CHAT)
    slow = Client(True, is_fast=False)
    assert await slow.ask(app, CHAT) == body
    # Every second token: the others have passed the task, which waits.
    assert 3 <= slow.pushed <= 4
    await app.aclose()


async def test_a_disconnect_closes_the_engine(engine: type[Engine]) -> None:
    """A client that leaves while tokens are pushed ends the engine's work at once."""
    tokens = [chunk(events_of(f" {number}", tokens=number)) for number in range(1, 60)]
    engine.script = [STREAM_HEAD + tokens[0], *[part for one in tokens for part in (0.01, one)]]
    app, client = app_over(), Client(True)
    work = asyncio.ensure_future(client.ask(app, CHAT))
    async with asyncio.timeout(5):
        while client.pushed < 5:
            await asyncio.sleep(0.005)
        client.gone.set_result({"type": "http.disconnect"})
        await asyncio.wait_for(engine.left.wait(), 0.2)
        await work
    pushed = client.pushed
    await asyncio.sleep(0.05)
    assert client.pushed == pushed
    await app.aclose()


async def test_comments_are_between_pushed_frames(engine: type[Engine]) -> None:
    """Comments of a stream with pauses stand between whole frames, and no token is lost."""
    tokens = [chunk(events_of(f" {number}", tokens=number)) for number in range(1, 31)]
    pauses = [0.001 * (number * 7 % 40) for number in range(30)]
    script: list[bytes | float] = [STREAM_HEAD + tokens[0]]
    for pause, token in zip(pauses, tokens[1:], strict=False):
        script += (pause, token)
    engine.script = [*script, chunk(final(30)) + LAST]
    app, client = app_over(keepalive=0.02), Client(True)
    await client.ask(app, CHAT)
    frames = b"".join(client.parts).decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    comments = [one for one in frames if one == ": keep-alive"]
    deltas = [json.loads(one[6:])["choices"][0]["delta"] for one in frames[:-2] if one[0] != ":"]
    assert "".join(one.get("content", "") for one in deltas) == "".join(
        f" {number}" for number in range(1, 31)
    )
    assert len(comments) + len(deltas) + 2 == len(frames)
    assert comments
    assert client.pushed > 10
    await app.aclose()


async def test_a_fleet_tries_no_other_engine_after_a_push(engine: type[Engine]) -> None:
    """An engine that is lost while its tokens are pushed ends the stream; no other is asked."""
    tokens = [chunk(events_of(f" {number}", tokens=number)) for number in range(1, 5)]
    engine.script = [STREAM_HEAD + tokens[0], *tokens[1:], 0, None]
    app, client = app_over("127.0.0.1", "127.0.0.2"), Client(True)
    body = await client.ask(app, CHAT)
    assert client.pushed == 3
    assert b'"engine_error"' in body
    assert engine.asked == 1
    await app.aclose()


async def test_limits_count_pushed_tokens(engine: type[Engine]) -> None:
    """A stream that fails is charged for its prompt and for every token that was pushed."""
    tokens = [chunk(events_of(f" {number}", tokens=number)) for number in range(1, 21)]
    engine.script = [STREAM_HEAD + tokens[0], *tokens[1:], 0, None]
    keys: Any = {"team": {"digest": digest_of("unused"), "tokens_per_minute": 10_000}}
    used = []
    for offers in (False, True):
        app, client = app_over(keys=keys), Client(offers)
        await client.ask(app, CHAT)
        limits: Any = app.service.limits
        (account,) = limits._accounts.values()
        used.append(account.tokens.used)
        await app.aclose()
    assert used[0] == used[1] >= 20


class Notes:
    """An observer that keeps the records of requests."""

    keeps = follows = False

    def __init__(self) -> None:
        self.records: list[Record] = []

    def take(self, ended: Sequence[Record]) -> None:
        """Keep what has ended."""
        self.records += ended

    def close(self) -> None:
        """Do nothing."""


async def test_the_times_of_pushed_tokens_are_noted(engine: type[Engine]) -> None:
    """Each pushed token has the time at which it arrived, for the metrics."""
    tokens = [chunk(events_of(f" {number}", tokens=number)) for number in range(1, 8)]
    script: list[bytes | float] = [STREAM_HEAD + tokens[0]]
    for token in tokens[1:]:
        script += (0.02, token)
    engine.script = [*script, 0.02, chunk(final(7)) + LAST]
    notes: Any = Notes()
    app, client = app_over(observers=[notes]), Client(True)
    await client.ask(app, CHAT)
    app.service.observers.flush()
    (record,) = notes.records
    assert client.pushed == 6
    assert len(record.arrivals) == 7
    times = [*record.arrivals]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(0.015 < one < 0.2 for one in gaps)
    assert record.last - times[-1] > 0.015
    await app.aclose()


class Connected(Socket):
    """A WebSocket that keeps its frames."""

    frames = b""
    pushed = 0

    async def send(self, message: Any) -> None:
        """Take a message of the app."""
        self.frames += message.get(FRAMES, b"")
        await super().send(message)
        self.offer(message)

    def offer(self, message: Any) -> None:
        """Offer to take frames at once."""
        message[PUSH] = self.push

    def push(self, data: bytes) -> bool:
        """Take frames at once."""
        self.pushed += 1
        self.frames += data
        return True


class Copied(Connected):
    """A WebSocket under a wrapper that passes copies of messages."""

    @override
    def offer(self, message: Any) -> None:
        del message[PUSH]


async def framed(app: OpenAIAdapter, kind: type[Connected]) -> tuple[list[bytes], int]:
    """Return the texts of the answer to a frame, without what two answers differ in."""
    socket = kind()
    scope = {**scope_of(RESPONSES), "type": "websocket", "scheme": "ws", "subprotocols": []}
    scope["extensions"] = {FRAMES: {}}
    task = asyncio.ensure_future(app(scope, socket.receive, socket.send))
    await socket.ask(json.dumps({"type": "response.create", "model": "m", **ASKED[RESPONSES]}))
    socket.tell({"type": "websocket.disconnect", "code": 1000})
    await task
    return [_OWN.sub(b"", text) for text in texts_in(socket.frames)], socket.pushed


async def test_a_response_over_a_websocket_is_pushed(engine: type[Engine]) -> None:
    """The frames of a pushed response are those of one that is not, the first with its headers.

    A wrapper that passes copies of messages gets no function that pushes.
    """
    tokens = [chunk(events_of(f" {number}", tokens=number)) for number in range(1, 9)]
    engine.script = [STREAM_HEAD + tokens[0], *tokens[1:], chunk(final(8)) + LAST]
    app = app_over("127.0.0.1")
    plain, none = await framed(app, Copied)
    pushed, count = await framed(app, Connected)
    assert pushed == plain
    assert (none, count) == (0, 7)
    assert b'"x-latimer-engine":"127.0.0.1"' in pushed[0]
    await app.aclose()


async def test_a_client_that_reads_nothing_pauses_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a real server, pushed tokens wait in the engine for a slow client, and none is lost."""
    pushes: list[bool] = []
    push = _Cycle.push

    def noted(cycle: _Cycle, body: bytes) -> bool:
        pushes.append(push(cycle, body))
        return pushes[-1]

    waits: list[FlowControl] = []
    drain = FlowControl.drain

    async def waited(flow: FlowControl) -> None:
        waits.append(flow)
        await drain(flow)

    monkeypatch.setattr(_Cycle, "push", noted)
    monkeypatch.setattr(FlowControl, "drain", waited)
    count = 60_000
    # Linux would give a socket up to tens of megabytes, which is all of the response.
    small = httpx2.AsyncHTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)]
    )
    with running(FakeLlamaServer(model=Model(context=2 * count))) as engine:
        app = OpenAIAdapter(LlamaServer(engine.url), any_model=True, store="off")
        with serving(lambda: app) as address:
            body = {"model": "m", "prompt": f"count:{count}", "max_tokens": count, "stream": True}
            async with (
                httpx2.AsyncClient(base_url=address, timeout=60, transport=small) as client,
                client.stream("POST", COMPLETIONS, json=body) as reply,
            ):
                taken = -1
                while taken != engine.sent:
                    taken = engine.sent
                    await asyncio.sleep(0.25)
                text = (await reply.aread()).decode()
    # An event of the engine has about 130 bytes.
    assert taken < 60 * count
    assert text.count('"text":"x"') == count
    assert text.endswith("data: [DONE]\n\n")
    assert True in pushes
    # The pause begins at a push, or at what the request's own task sends between two of them.
    assert waits


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("name", ["llama_cpp", "llama_server"])
async def test_real_engines_push(apps: Callable[[str], Any], name: str, path: str) -> None:
    """A real engine's stream is the same pushed and not pushed, and most of it is pushed."""
    # The prompt of the second request is cached, so it must not change the first token.
    await Client(False).ask(apps(name), path, temperature=0, ignore_eos=True)
    (body, _), (pushed, count) = await both(apps(name), path, temperature=0, ignore_eos=True)
    assert pushed == body
    assert count > 16


@pytest.mark.parametrize(
    ("path", "fields"),
    [(CHAT, {"logprobs": True, "top_logprobs": 3}), (COMPLETIONS, {"logprobs": 3})],
    ids=["chat", "completions"],
)
async def test_log_probabilities_in_process_are_pushed(
    apps: Callable[[str], Any], path: str, fields: dict[str, Any]
) -> None:
    """A token with log-probabilities is sent where it arrives, with the bytes that it has else."""
    asked: dict[str, Any] = {"temperature": 0, "ignore_eos": True, **fields}
    await Client(False).ask(apps("llama_cpp"), path, **asked)
    (body, _), (pushed, count) = await both(apps("llama_cpp"), path, **asked)
    assert pushed == body
    assert b"top_logprobs" in body
    assert count > 16
