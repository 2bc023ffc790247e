"""Tests of the request log: its fields, what it omits, and headers that trace a request."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.record import Record
from latimer.adapter.request import Exchange
from latimer.adapter.request_log import (
    MOST_WAITING,
    JsonFormatter,
    RequestLog,
    Writer,
    json_line,
    parts,
)
from latimer.backends.errors import Busy, ContextFull, EngineError, EngineSilent, EngineUnavailable
from latimer.backends.http import FORWARDED
from latimer.backends.llama_server import LlamaServer
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from support.clients import client_of
from support.engines.echo import Echo, Slow
from support.engines.fleet import Engine, pool_of
from support.prometheus import scrape
from support.servers import command

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Lines(list[bytes]):
    """Written lines."""

    def write(self, data: bytes) -> None:
        """Add lines."""
        self.extend(data.splitlines())

    def events(self) -> list[dict[str, Any]]:
        """Return lines of JSON."""
        return [json.loads(line) for line in self]


@asynccontextmanager
async def logged(backend: Any, form: Any = "json", **options: Any) -> AsyncIterator[Any]:
    """Yield a client of an app, its service, and its log."""
    lines = Lines()
    settings = {name: options.pop(name) for name in ("level", "content") if name in options}
    log = RequestLog(lines.write, form, **settings)
    app = OpenAIAdapter(backend, observers=[log], **{"any_model": True, **options})
    async with client_of(app) as client:
        yield client, app.service, lines
    await app.aclose()


class Batches:
    """An observer that counts the requests which it gets at once."""

    follows = False

    def __init__(self, keeps: bool) -> None:
        self.keeps = keeps
        self.sizes: list[int] = []

    def take(self, ended: Sequence[Record]) -> None:
        """Count what has ended."""
        self.sizes.append(len(ended))

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(("keeps", "sizes"), [(True, [8, 8]), (False, [])])
async def test_few_responses_wait_for_the_log(
    monkeypatch: pytest.MonkeyPatch, keeps: bool, sizes: list[int]
) -> None:
    """An observer of responses gets eight requests at once, since these can be large."""
    monkeypatch.setattr("latimer.adapter.observers.OBSERVED_AFTER", 1000.0)
    notes: Any = Batches(keeps)
    app = OpenAIAdapter(Echo("Hello."), any_model=True, observers=[notes])
    async with client_of(app) as client:
        for _ in range(20):
            await client.post("/v1/chat/completions", json=CHAT)
    assert notes.sizes == sizes
    app.service.observers.flush()
    assert sum(notes.sizes) == 20
    await app.aclose()


async def test_the_times_of_many_tokens_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams wait for their observers only until these have work for a millisecond."""
    monkeypatch.setattr("latimer.adapter.observers.OBSERVED_AFTER", 1000.0)
    monkeypatch.setattr("latimer.adapter.observers._MOST_TIMES", 1)
    notes: Any = Batches(False)
    app = OpenAIAdapter(Echo("Hello."), any_model=True, observers=[notes])
    async with client_of(app) as client:
        for stream in (False, False, True, True):
            await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
    assert notes.sizes == [3, 1]
    await app.aclose()


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_line_has_the_facts_of_a_request(make_backend: Any, engine: str) -> None:
    """A stream and a plain request have their usage, their times and their ids."""
    async with logged(make_backend(engine)) as (client, service, lines):
        plain = await client.post("/v1/chat/completions", json=CHAT)
        stream = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        service.observers.flush()
    one, two = lines.events()
    usage = plain.json()["usage"]
    for event, reply in ((one, plain), (two, stream)):
        assert event["request_id"] == reply.headers["x-request-id"]
        assert (event["event"], event["level"], event["status"]) == ("request", "info", 200)
        assert (event["method"], event["path"]) == ("POST", "/v1/chat/completions")
        assert (event["model"].removesuffix(".gguf"), event["engine"]) == ("demo", engine)
        assert event["prompt_tokens"] == usage["prompt_tokens"]
        assert event["completion_tokens"] == usage["completion_tokens"]
        assert event["finish_reason"] == "stop"
        assert 0 < event.get("queue_ms", 0) + event["overhead_ms"] < event["duration_ms"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", event["time"])
    assert (one["stream"], two["stream"]) == (False, True)
    assert "ttft_ms" not in one
    assert 0 < two["ttft_ms"] < two["duration_ms"]


async def test_a_line_for_people(make_backend: Any) -> None:
    """The text has what a person asks for first, on one line."""
    async with logged(make_backend("llama_cpp"), "text") as (client, service, lines):
        await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await client.post("/v1/chat/completions", json={"model": "m"})
        service.observers.flush()
    one, two = (line.decode() for line in lines)
    number = r"\d+\.\d+"
    assert re.fullmatch(
        rf"\d\d:\d\d:\d\d POST /v1/chat/completions 200 demo 15\+7 tok {number} tok/s "
        rf"ttft {number} s {number} s stop req_[0-9a-f]{{32}}",
        one,
    )
    assert re.search(rf"POST /v1/chat/completions 400 demo {number} s \S+ messages req_", two)


async def test_a_log_has_no_content(make_backend: Any) -> None:
    """Neither prompt, answer, key nor user is in a line, unless content is asked for."""
    secret, keys = "sk-secret-of-a-client", {"team": {"digest": digest_of("sk-of-team")}}
    body = {**CHAT, "user": "somebody", "metadata": {"a": "private"}, "store": True}
    for content in (False, True):
        options: Any = {"content": content, "api_keys": [secret], "keys": keys}
        async with logged(make_backend("llama_cpp"), **options) as (client, service, lines):
            for key in (secret, "sk-of-team", "sk-unknown"):
                headers = {"authorization": f"Bearer {key}"}
                await client.post("/v1/chat/completions", json=body, headers=headers)
            service.observers.flush()
        text = b"\n".join(lines).decode()
        for word in (secret, "sk-", "somebody", "What is"):
            assert word not in text
        assert ("Paris" in text) is content
        first, second, third = lines.events()
        assert re.fullmatch("[0-9a-f]{12}", first["key"])
        assert second["key"] == "team"
        assert "key" not in third
        assert (third["status"], third["error_code"]) == (401, "invalid_api_key")
        assert first["user"] == second["user"] != "somebody"


async def test_probes_are_not_logged(make_backend: Any) -> None:
    """Health, readiness and metrics are polled, so they are not in the log."""
    async with logged(make_backend("llama_cpp")) as (client, service, lines):
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/nowhere"):
            await client.get(path)
        service.observers.flush()
    assert [(one["path"], one["status"]) for one in lines.events()] == [
        ("/v1/models", 200),
        ("/nowhere", 404),
    ]


async def test_a_level_leaves_failures(make_backend: Any) -> None:
    """With the level `warning` only requests that failed here or on an engine are logged."""
    gone = LlamaServer("http://127.0.0.1:9")
    async with logged(gone, level="warning") as (client, service, lines):
        await client.post("/v1/chat/completions", json=CHAT)
        await client.get("/nowhere")
        service.observers.flush()
    (event,) = lines.events()
    assert (event["level"], event["status"]) == ("error", 503)
    assert event["error_code"] == "engine_unavailable"


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 429), ("/v1/messages", 529)])
async def test_a_full_queue_is_not_a_failure(path: str, status: int) -> None:
    """A full queue is not logged with the level `error`, whichever API its client uses."""
    busy = Echo(error=Busy("The queue is full.", 1.5))
    async with logged(busy, level="error") as (client, service, lines):
        reply = await client.post(path, json={**CHAT, "max_tokens": 1})
        service.observers.flush()
    assert (reply.status_code, lines.events()) == (status, [])


@pytest.mark.parametrize(("path", "status"), [("/v1/chat/completions", 503), ("/v1/messages", 529)])
async def test_a_full_context_is_a_failure_and_no_limit(path: str, status: int) -> None:
    """A request that a full context ends is an error of the log, and counts for no limit."""
    full = Echo(error=ContextFull("llama-server", "Wait.", 512))
    async with logged(full, level="error") as (client, service, lines):
        reply = await client.post(path, json={**CHAT, "max_tokens": 1})
        service.observers.flush()
    (event,) = lines.events()
    assert (reply.status_code, event["status"]) == (status, status)
    assert event["error_code"] == "engine_overloaded"
    assert "limit" not in event


async def test_ids_of_other_servers_are_passed_on(make_backend: Any) -> None:
    """The headers that trace a request are logged, and reach the engine; wrong ones do neither."""
    backend = make_backend("llama_server")
    heads: list[bytes] = []
    send = backend.server.client._client.handle_async_request

    def spy(request: tuple[bytes, bytes]) -> Any:
        heads.append(request[0])
        return send(request)

    backend.server.client._client.handle_async_request = spy
    good = {"traceparent": PARENT, "x-client-request-id": "my-id 7"}
    wrong = {"traceparent": "00-xyz", "x-client-request-id": "a" * 513}
    async with logged(backend) as (client, service, lines):
        for headers in ({}, good, {}, wrong):
            heads.clear()
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
            head = b"".join(one for one in heads if b"/completion " in one)
            assert (f"traceparent: {PARENT}\r\n".encode() in head) is (headers is good)
            assert (b"x-client-request-id: my-id 7\r\n" in head) is (headers is good)
            assert b"xyz" not in head
        service.observers.flush()
    plain, traced, *others = lines.events()
    assert traced["trace_id"] == PARENT.split("-")[1]
    assert traced["client_request_id"] == "my-id 7"
    for event in (plain, *others):
        assert not {"trace_id", "client_request_id"} & event.keys()


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
AS_SENT: list[tuple[list[str], str]] = [
    ([f"00-{TRACE}-{SPAN}-03"], f"00-{TRACE}-{SPAN}-03"),
    ([f"00-{TRACE}-{SPAN}-01-more"], ""),
    ([f"00-{TRACE}-{SPAN}-01-"], ""),
    ([f"cc-{TRACE}-{SPAN}-03"], f"00-{TRACE}-{SPAN}-01"),
    ([f"01-{TRACE}-{SPAN}-02-what-will-be"], f"00-{TRACE}-{SPAN}-00"),
    ([f"01-{TRACE}-{SPAN}-01.more"], ""),
    ([f"ff-{TRACE}-{SPAN}-01"], ""),
    ([f"01-{'0' * 32}-{SPAN}-01"], ""),
    ([f"00-{TRACE}-{'0' * 16}-01"], ""),
    ([f"00-{TRACE.upper()}-{SPAN}-01"], ""),
    ([PARENT, PARENT], ""),
    ([f"01-{TRACE}-{SPAN}-01-a", PARENT], ""),
]


@pytest.mark.parametrize(("parents", "sent"), AS_SENT)
def test_a_parent_is_read_as_w3c_says(parents: list[str], sent: str) -> None:
    """Later versions are read as version 00 is, and a repeated parent is as good as none.

    The lines of the trace's state are one list.
    """
    headers = [(b"traceparent", one.encode()) for one in parents]
    headers += [(b"tracestate", b"a=1,b=2"), (b"x-other", b"1"), (b"tracestate", b"c=3")]
    exchange = Exchange({"type": "http", "headers": headers}, None, None)  # type: ignore[arg-type]
    context = copy_context()
    context.run(exchange._forward, headers)
    lines = f"traceparent: {sent}\r\ntracestate: a=1,b=2,c=3\r\n" if sent else ""
    assert context.get(FORWARDED) == lines.encode()
    assert (exchange.forwarded or {}) == ({"trace_id": TRACE} if sent else {})


async def test_a_stream_that_fails_is_a_stream() -> None:
    """A stream that fails before its first event is logged as a stream, a plain request not."""
    engine = Engine("one")
    async with logged([ModelEntry(await pool_of(engine), ("m",))]) as (client, service, lines):
        engine.fails = EngineError("It fails.")
        for stream in (True, False):
            reply = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert reply.status_code == 502
        service.observers.flush()
    assert [one["stream"] for one in lines.events()] == [True, False]


async def test_a_line_has_the_engines_that_were_tried() -> None:
    """A request that another engine served has one line, with each engine and why it did not."""
    one, two, three = (Engine(name) for name in ("one", "two", "three"))
    one.fails, two.fails = EngineError("It failed on secret."), EngineUnavailable("It is gone.")
    pool = await pool_of(one, two, three)
    async with logged([ModelEntry(pool, ("m",))]) as (client, service, lines):
        for _ in range(3):
            await client.post("/v1/chat/completions", json=CHAT)
        three.fails = EngineSilent("It is silent.")
        await client.post("/v1/chat/completions", json=CHAT)
        service.observers.flush()
        metrics = await scrape(client)
    first, *others, last = lines.events()
    reasons = {"one": "error", "two": "unavailable"}
    assert first["engine"] == "three"
    assert first["attempts"] == 3
    assert {(o["engine"], o["reason"]) for o in first["tried"]} == {*reasons.items()}
    assert all(one["attempts"] == len(one["tried"]) + 1 for one in others if "tried" in one)
    assert last["status"] == 503
    assert "secret" not in b"".join(lines).decode()
    for engine, reason in reasons.items():
        count = metrics.sum(
            "latimer_engine_retries_total", model_name="m", engine=engine, reason=reason
        )
        tried = [o for event in lines.events() for o in event.get("tried", ())]
        assert count == tried.count({"engine": engine, "reason": reason}) > 0


async def test_a_refused_request_has_its_reason(make_backend: Any) -> None:
    """The line of a 4xx has the field, without a client's own names, and that of a 429 a limit."""
    bodies: list[tuple[dict[str, Any], str | None]] = [
        ({**CHAT, "temperature": "secret"}, "temperature"),
        ({**CHAT, "messages": [{"role": "user", "content": [{"type": "secret"}]}]}, None),
        ({**CHAT, "guided_json": 7}, "guided_json"),
        ({**CHAT, "secret": 1}, "…"),
        ({**CHAT, "stream_options": {"secret": True}, "stream": True}, "stream_options.…"),
    ]
    keys = {"team": {"digest": digest_of("k"), "requests_per_minute": len(bodies)}}
    options: Any = {"keys": keys, "strict": True}
    headers = {"authorization": "Bearer k"}
    async with logged(make_backend("llama_cpp"), **options) as (client, service, lines):
        for body, _ in bodies:
            await client.post("/v1/chat/completions", json=body, headers=headers)
        for _ in range(len(bodies) + 1):
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        service.observers.flush()
    refused, limited = lines.events()[: len(bodies)], lines.events()[-1]
    for (_, param), event in zip(bodies, refused, strict=True):
        assert event["status"] == 400
        assert event["param"].startswith(param or "messages[0].content[0]")
    assert (limited["status"], limited["limit"]) == (429, "requests")
    assert "secret" not in b"".join(lines).decode()


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("POST", "/v1/chat/completions", b'{"a":', "invalid_json"),
        ("POST", "/v1/chat/completions", b"[]", "invalid_json"),
        ("GET", "/v1/secret", b"", "not_found"),
        ("GET", "/v1/responses/secret", b"", "not_found"),
        ("PUT", "/v1/chat/completions", b"{}", "method_not_allowed"),
    ],
)
async def test_an_error_without_a_code_has_words(
    make_backend: Any, method: str, path: str, body: bytes, code: str
) -> None:
    """The line of an error that has neither a code nor a field says what is wrong."""
    async with logged(make_backend("llama_cpp")) as (client, service, lines):
        headers = {"content-type": "application/json"}
        reply = await client.request(method, path, content=body, headers=headers)
        service.observers.flush()
    assert reply.json()["error"]["code"] is None
    assert lines.events()[-1]["error_code"] == code


class _Odd(Exception):
    """An error of other software, with attributes of its own."""

    status_code, code, param, limit, log_code = None, object(), object(), object(), object()


class _Limited(HTTPException):
    """An error of a limiter, which has the limit as an object."""

    limit = object()


@pytest.mark.parametrize(("error", "status"), [(_Odd(), 500), (_Limited(429, "Slowly."), 429)])
async def test_an_error_of_other_software_is_logged(error: Exception, status: int) -> None:
    """Attributes of an error that is not Latimer's change neither the response nor the log."""

    def failing(app: Any) -> Any:
        async def call(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"] == "/v1/models":
                raise error
            await app(scope, receive, send)

        return call

    async with logged(Echo(), middleware=[Middleware(failing)]) as (client, service, lines):
        reply = await client.get("/v1/models")
        await client.post("/v1/chat/completions", json=CHAT)
        service.observers.flush()
    assert (reply.status_code, [*reply.json()]) == (status, ["error"])
    assert [one["status"] for one in lines.events()] == [status, 200]
    assert {"param", "limit"}.isdisjoint(lines.events()[0])


async def test_a_request_that_a_shutdown_cuts_has_its_reason() -> None:
    """The line of a stream that the end of the server cuts has the code that its client got."""
    async with logged(Slow()) as (client, service, lines):
        body = {**CHAT, "stream": True}
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(0.1)
        service.has_ended = True
        task.cancel()
        reply = await task
        service.observers.flush()
        found = service.observers.all[0]._series
    assert "server_shutting_down" in reply.text
    assert lines.events()[0]["error_code"] == "server_shutting_down"
    assert [one.finished["error"] for one in found.values()] == [1]


async def test_a_request_without_a_key_has_its_reason() -> None:
    """The line of a 401 says whether a key was missing or wrong."""
    async with logged(Echo(), api_keys=["k"]) as (client, service, lines):
        await client.get("/v1/models")
        await client.get("/v1/models", headers={"authorization": "Bearer wrong"})
        service.observers.flush()
    assert [one["error_code"] for one in lines.events()] == ["unauthorized", "invalid_api_key"]


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_every_endpoint_has_its_cached_tokens(make_backend: Any, engine: str) -> None:
    """The line of a completion has its cached tokens, which its usage does not have."""
    body = {"model": "m", "prompt": "1, 2, " * 40, "max_tokens": 1}
    async with logged(make_backend(engine)) as (client, service, lines):
        for _ in range(2):
            await client.post("/v1/completions", json=body)
        service.observers.flush()
    assert lines.events()[-1]["cached_tokens"] > 0


async def test_a_background_response_has_its_own_line(make_backend: Any) -> None:
    """A response in the background is a line at its end, besides that of the request."""
    async with logged(make_backend("llama_cpp")) as (client, service, lines):
        body = {"model": "m", "input": "What is the capital of France?", "background": True}
        reply = (await client.post("/v1/responses", json=body)).json()
        while reply["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            reply = (await client.get(f"/v1/responses/{reply['id']}")).json()
        service.observers.flush()
    events = [one for one in lines.events() if one["method"] == "POST"]
    assert {one["event"] for one in events} == {"request", "background"}
    work = next(one for one in events if one["event"] == "background")
    assert work["completion_tokens"] == reply["usage"]["output_tokens"]
    assert work["stream"] is False
    assert "ttft_ms" not in work


def test_a_server_writes_json_to_a_pipe() -> None:
    """All lines of `latimer serve` are JSON if no terminal reads them, also at its start."""
    import httpx2

    with command(LATIMER_LOG_REQUESTS="true") as (process, address):
        for _ in range(3):
            httpx2.post(f"{address}/v1/chat/completions", json={**CHAT, "model": "demo"})
        process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
    events = [json.loads(line) for line in log.splitlines()]
    requests = [one for one in events if one["event"] == "request"]
    assert [one["path"] for one in requests] == ["/v1/chat/completions"] * 3
    assert all(one["client"] == "127.0.0.1" for one in requests)
    first, *_ = events
    assert (first["event"], first["level"]) == ("start", "info")
    assert first["message"].startswith("Latimer serves demo")
    assert {"time", "message"} <= first.keys()


def test_a_slow_reader_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that nobody reads costs lines, but neither time nor memory without end."""
    monkeypatch.setattr("latimer.adapter.request_log._LAST", 0.05)
    read, write = os.pipe()
    writer = Writer(write)
    taken = [writer.write(b"x" * 65_535 + b"\n") for _ in range(200)]
    assert writer.waiting <= MOST_WAITING
    assert taken.count(False) > 100
    writer.close()
    os.close(read)
    os.close(write)


def test_parts_are_whole_lines() -> None:
    """A part has as many whole lines as fit into it; one that is too long is a part of its own."""
    lines = [b"%d" % number * (number % 40) + b"\n" for number in range(400)]
    lines[7] = b"x" * 500 + b"\n"
    found = [bytes(part) for part in parts(b"".join(lines) + b"end", 200)]
    assert b"".join(found) == b"".join(lines) + b"end"
    assert all(len(part) <= 200 or part == lines[7] for part in found)
    assert all(part.endswith(b"\n") for part in found[:-1])
    assert len(found) < len(lines) / 2


def test_lines_of_several_writers_are_whole() -> None:
    """Processes that write to the same pipe do not write into each other's lines."""
    read, write = os.pipe()
    writers = [Writer(write), Writer(write)]
    line = b'{"event":"request","text":"%b"}\n' % (b"x" * 400)
    found = bytearray()

    def collect() -> None:
        while data := os.read(read, 5000):
            found.extend(data)
            time.sleep(0.001)

    reader = threading.Thread(target=collect)
    reader.start()
    for _ in range(4):
        for writer in writers:
            assert writer.write(line * 256)
    while any(writer.waiting for writer in writers):
        time.sleep(0.01)
    for writer in writers:
        writer.close()
    os.close(write)
    reader.join()
    os.close(read)
    assert found == line * (256 * 8)


@contextmanager
def no_room_beyond(size: int) -> Iterator[None]:
    """Let no file grow beyond some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def settled(writer: Writer) -> None:
    """Wait until a writer has tried to write everything."""
    end = time.monotonic() + 10
    while writer.waiting:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("form", ["json", "text"])
def test_lines_that_a_full_disk_loses_are_a_line(tmp_path: Path, form: Any) -> None:
    """After a full disk, a new line says how many lines were lost, and the next one is whole."""
    file = tmp_path / "log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = Writer(descriptor, form)
    with no_room_beyond(25):
        # The second line is there in part, and nothing of the others.
        writer.write(b'{"number": 1}\n{"number": 2}\n')
        writer.write(b'{"number": 3}\n')
        writer.write(b'{"number": 4}\n{"number": 5}\n')
        settled(writer)
    writer.write(b'{"number": 6}\n')
    writer.write(b'{"number": 7}\n')
    writer.close()
    os.close(descriptor)
    first, cut, lost, *rest = file.read_bytes().splitlines()
    assert (first, cut) == (b'{"number": 1}', b'{"number": ')
    assert rest == [b'{"number": 6}', b'{"number": 7}']
    words = "4 lines of requests are missing, because the log could not be written: File too large."
    if form == "text":
        assert lost == words.encode()
    else:
        found = json.loads(lost)
        assert (found["event"], found["lines"], found["message"]) == ("log_lost", 4, words)


def test_a_line_about_lost_ones_that_is_lost_is_written_later(tmp_path: Path) -> None:
    """The number grows while the disk is full, and is written without another request."""
    file = tmp_path / "log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = Writer(descriptor)
    writer.write(b"{}\n")
    settled(writer)
    for size in (3, 20):
        # The second time, the line about lost ones is there in part.
        with no_room_beyond(size):
            writer.write(b"{}\n{}\n")
            settled(writer)
    writer.close()
    os.close(descriptor)
    _, cut, lost = file.read_bytes().splitlines()
    assert len(cut) == 17
    assert json.loads(lost)["lines"] == 4


def test_lost_lines_are_reported_while_no_request_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server without requests says what a full disk has lost, some seconds after it has room."""
    monkeypatch.setattr("latimer.adapter.request_log._AGAIN", 0.05)
    file = tmp_path / "log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = Writer(descriptor)
    with no_room_beyond(1):
        writer.write(b"{}\n")
        settled(writer)
    end = time.monotonic() + 10
    while b"log_lost" not in file.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.01)
    writer.close()
    os.close(descriptor)


@pytest.mark.parametrize("form", ["json", "text"])
async def test_lost_lines_are_a_line(form: Any) -> None:
    """The first line after a time without room says how many are missing."""
    lines, has_room = Lines(), False

    def write(data: bytes) -> bool:
        if has_room:
            lines.write(data)
        return has_room

    log = RequestLog(write, form)
    app = OpenAIAdapter(Echo("Hello."), any_model=True, observers=[log])
    async with client_of(app) as client:
        for _ in range(3):
            await client.post("/v1/chat/completions", json=CHAT)
            app.service.observers.flush()
        has_room = True
        await client.post("/v1/chat/completions", json=CHAT)
        app.service.observers.flush()
    await app.aclose()
    assert len(lines) == 2
    assert b"3 lines of requests are missing" in lines[0]
    if form == "json":
        assert (lines.events()[0]["event"], lines.events()[0]["lines"]) == ("log_lost", 3)


async def test_a_very_large_response_is_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line whose response is too large for the log has the size, and all its other fields."""
    monkeypatch.setattr("latimer.adapter.request_log._MOST_SHOWN", 3000)
    async with logged(Echo("Hello."), content=True) as (client, service, lines):
        for count in (1, 40):
            await client.post("/v1/chat/completions", json={**CHAT, "n": count})
        service.observers.flush()
    small, large = lines.events()
    assert small["response"]["choices"]
    assert "response" not in large
    assert large["response_bytes"] > 3000
    assert large["finish_reason"]


async def test_a_text_log_has_no_response() -> None:
    """Lines for people stay lines for people, also if responses are kept."""
    async with logged(Echo("Hello."), "text", content=True) as (client, service, lines):
        await client.post("/v1/chat/completions", json=CHAT)
        service.observers.flush()
    (line,) = lines
    assert b" POST /v1/chat/completions 200 " in line


async def test_a_cancelled_background_response_is_marked() -> None:
    """The line of work that its client has cancelled says so, and the metrics count it as such."""
    async with logged(Slow(), store="memory", metrics=True) as (client, _, lines):
        body = {"model": "m", "input": "Hello", "background": True}
        reply = (await client.post("/v1/responses", json=body)).json()
        await client.post(f"/v1/responses/{reply['id']}/cancel")
        found = await scrape(client)
    (work,) = [one for one in lines.events() if one["event"] == "background"]
    assert (work["error_code"], work["status"]) == ("cancelled", 200)
    assert found.sum("latimer_request_success_total", finished_reason="abort") == 1


@pytest.mark.parametrize("path", ["/v1/models", "/v1/nothing"])
async def test_a_request_without_a_body_is_traced(path: str) -> None:
    """The line of a request whose body was not read has the ids that its client gave it."""
    async with logged(Echo(), api_keys=["k"]) as (client, service, lines):
        headers = {"traceparent": PARENT, "x-client-request-id": "mine"}
        await client.get(path, headers=headers)
        await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        service.observers.flush()
    for event in lines.events():
        assert event["client_request_id"] == "mine"
        assert event["trace_id"] == PARENT.split("-")[1]
    assert len(lines) == 2
    assert FORWARDED.get() == b""


def test_other_lines_are_json_too() -> None:
    """With `--log-format json` a warning is an object on one line, with its traceback."""
    try:
        raise ValueError("wrong\nvalue")
    except ValueError:
        record = logging.getLogger("latimer").makeRecord(
            "latimer", logging.WARNING, "file", 1, "engine %s", ("one",), sys.exc_info()
        )
    line = JsonFormatter(worker=2).format(record)
    assert json.loads(line)["worker"] == 2
    assert re.fullmatch(r".{19}\.\d{3}Z", json.loads(line)["time"])
    assert "\n" not in line
    event = json.loads(line)
    assert (event["level"], event["event"], event["logger"]) == ("warning", "log", "latimer")
    assert event["message"].startswith("engine one\nTraceback")


def test_a_line_can_name_a_path_that_is_not_utf_8() -> None:
    """A line with the bytes of a path that is not UTF-8 is JSON, in ASCII."""
    line = json_line("no file at /gr\udcf6\xdf", "error", "server", {})
    assert line.isascii()
    assert json.loads(line)["message"] == "no file at /gr\udcf6\xdf"


def test_an_event_loop_that_has_ended_does_not_hold_lines_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of an event loop that has ended are logged with those of the next one."""
    monkeypatch.setattr("latimer.adapter.observers.OBSERVED_AFTER", 0.01)
    lines: list[bytes] = []
    app = OpenAIAdapter(Echo(), observers=[RequestLog(lines.append)])

    async def ask(waits: bool) -> None:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            await client.get("/v1/models")
        for _ in range(500 if waits else 0):
            if lines:
                break
            await asyncio.sleep(0.01)

    asyncio.run(ask(waits=False))
    assert not lines
    asyncio.run(ask(waits=True))
    assert len(b"".join(lines).splitlines()) == 2
