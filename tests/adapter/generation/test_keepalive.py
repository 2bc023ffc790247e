"""Tests of the comments in a silent stream: when they begin, and what happens after them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any

import httpx2
import openai
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.generation.frames import COMMENT, ChunkEncoder
from latimer.adapter.generation.keepalive import TICKS, KeepAlive
from latimer.adapter.generation.sinks import Answer, StreamSink
from latimer.adapter.model_entry import Policy, ServedModel
from latimer.adapter.request import Exchange
from latimer.backends.base import Backend, Batch, Finish, Generation, Model, Piece
from latimer.backends.errors import Busy, ContextExceeded, EngineUnavailable, LatimerError
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_server import LlamaServer
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from support.engines.echo import Echo
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.llama_server import FakeLlamaServer
from support.response_events import HEAD, TEXT, events_in, order_of
from support.servers import serving

USER = [{"role": "user", "content": "hi"}]
SHORT = 0.02
# Longer than two intervals.
SILENCE = 0.09
COMMENTED = ": keep-alive\n\n"


class Silent(Echo):
    """An engine that is silent before its first event and between its events.

    Args:
        error: raised instead of the events.
        admits: True if it accepts the request before the silence.
        silence: the seconds of silence.
        is_healthy: False if it is not available during the silence.
    """

    def __init__(
        self,
        error: LatimerError | None = None,
        admits: bool = True,
        silence: float = SILENCE,
        is_healthy: bool = True,
    ) -> None:
        super().__init__(error=error, template=None)
        self.admits = admits
        self.silence = silence
        self.is_healthy = is_healthy

    async def health(self) -> None:
        """Raise an error if the engine is not available."""
        if not self.is_healthy:
            raise EngineUnavailable("gone")

    async def admit(self, job: Generation) -> None:
        """Admit the job, and wait."""
        if self.admits and job.ticket is not None:
            job.ticket.admitted = True
        await asyncio.sleep(self.silence)
        if self.error is not None:
            raise self.error

    async def batches(self, job: Generation) -> AsyncIterator[Batch]:
        """Yield two pieces with another wait between them."""
        yield [Piece(0, b"one")]
        await asyncio.sleep(self.silence)
        yield [Piece(0, b" two"), Finish(0, "end", None, 1, 2)]


def app_of(engine: Backend, keepalive: float = SHORT) -> OpenAIAdapter:
    """Return an adapter over an engine, with a short interval."""
    return OpenAIAdapter(engine, any_model=True, keepalive=keepalive)


async def streamed(client_of: Any, engine: Backend, keepalive: float = SHORT) -> httpx2.Response:
    """Return the whole response to a streamed chat."""
    async with client_of(app_of(engine, keepalive)) as client:
        body = {"model": "m", "messages": USER, "stream": True}
        reply: httpx2.Response = await client.post("/v1/chat/completions", json=body)
    return reply


def text_of(reply: httpx2.Response) -> str:
    """Return the text of a stream, with its events parsed as a client parses them."""
    text = ""
    for event in reply.text.split("\n\n"):
        if event and not event.startswith(":") and event != "data: [DONE]":
            delta = json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
            text += delta.get("content") or ""
    return text


async def test_silence_is_filled_with_comments(client_of: Any) -> None:
    """Complete comments precede the first frame, and occur between frames."""
    reply = await streamed(client_of, Silent())
    before, _, after = reply.text.partition("data: ")
    assert before.count(COMMENTED) >= 2
    assert before.replace(COMMENTED, "") == ""
    between = after.partition('"one"')[2].partition('" two"')[0]
    assert between.count(COMMENTED) >= 2
    assert text_of(reply) == "one two"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["cache-control"] == "no-cache, must-revalidate"


async def test_openai_python_ignores_comments(client_of: Any) -> None:
    """OpenAI's SDK reads a stream with comments as if it had none."""
    async with client_of(app_of(Silent())) as client:
        sdk = openai.AsyncOpenAI(base_url="http://latimer/v1", api_key="x", http_client=client)
        stream = await sdk.completions.create(model="m", prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two"


@pytest.mark.parametrize("keepalive", [0, 60])
async def test_no_comment_without_need(client_of: Any, keepalive: float) -> None:
    """A stream has no comments if they are off, or if it is never silent for that long."""
    reply = await streamed(client_of, Silent(), keepalive)
    assert ":" not in {event[:1] for event in reply.text.split("\n\n")}
    assert text_of(reply) == "one two"


@pytest.mark.parametrize(("keepalive", "names"), [(0, True), (SHORT, False)])
async def test_a_head_before_the_first_event_names_no_engine(
    client_of: Any, keepalive: float, names: bool
) -> None:
    """A comment sends the head while another engine may still serve the request, so the head does
    not name the engine."""
    pool = Pool("demo", [Replica(name, Silent()) for name in ("one", "two")])
    await pool.ask_all()
    reply = await streamed(client_of, pool, keepalive)
    assert text_of(reply) == "one two"
    assert ("x-latimer-engine" in reply.headers) is names
    assert ("x-latimer-affinity" in reply.headers) is names
    await pool.aclose()


async def test_plain_responses_have_no_comments(client_of: Any) -> None:
    """A response that is not a stream is JSON without comments."""
    async with client_of(app_of(Silent())) as client:
        reply = await client.post("/v1/chat/completions", json={"model": "m", "messages": USER})
    assert reply.json()["choices"][0]["message"]["content"] == "one two"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ContextExceeded(1000, 2000, 0), 400),
        (Busy("full", 1.0), 429),
        (EngineUnavailable("gone"), 503),
    ],
)
async def test_a_request_that_is_not_accepted_keeps_its_status(
    client_of: Any, error: LatimerError, status: int
) -> None:
    """An error before the engine accepts the request keeps its status, also after a long wait."""
    reply = await streamed(client_of, Silent(error, admits=False))
    assert reply.status_code == status
    assert reply.json()["error"]["message"]


async def test_an_unavailable_engine_gets_no_head(client_of: Any) -> None:
    """No comment is sent while the engine is not available, so the error has its status."""
    reply = await streamed(client_of, Silent(EngineUnavailable("gone"), is_healthy=False))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_an_error_after_a_comment_is_an_event(client_of: Any) -> None:
    """After a comment, an error is an event with the same object, and `[DONE]`."""
    reply = await streamed(client_of, Silent(EngineUnavailable("gone")))
    *comments, error, done, rest = reply.text.split("\n\n")
    assert reply.status_code == 200
    assert comments == [": keep-alive"] * len(comments) != []
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_unavailable"
    assert (done, rest) == ("data: [DONE]", "")


async def test_comments_wait_for_frames_and_frames_for_comments() -> None:
    """No part of the response is sent before the previous part is sent."""
    sent: list[bytes] = []
    sending = 0

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append(b"")
            body = {"model": "m", "messages": USER, "stream": True}
            return {"type": "http.request", "body": json.dumps(body).encode()}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal sending
        assert not sending
        sending += 1
        await asyncio.sleep(0.03)
        sending -= 1
        sent.append(message.get("body", b""))

    path = "/v1/chat/completions"
    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "scheme": "http",
             "query_string": b"", "raw_path": path.encode()}  # fmt: skip
    await app_of(Silent())(scope, receive, send)
    assert COMMENT in sent
    assert sent[-1].endswith(b"data: [DONE]\n\n")


async def test_a_frame_waits_for_a_comment_that_begins_right_after_another() -> None:
    """Nothing is being sent after `settle`, also if a tick comes before it has noticed an end."""
    gate, sending = asyncio.Event(), 0

    async def receive() -> dict[str, Any]:
        raise AssertionError

    async def send(_: MutableMapping[str, Any]) -> None:
        nonlocal sending
        sending += 1
        await gate.wait()
        gate.clear()
        sending -= 1

    exchange = Exchange({"type": "http", "method": "POST", "headers": []}, receive, send)
    exchange.started = True
    comments = KeepAlive(exchange, Echo(), ChunkEncoder({}, False))
    comments.idle = TICKS
    comments.tick()
    await asyncio.sleep(0)
    assert comments.writing is not None
    settling = asyncio.create_task(comments.settle())
    await asyncio.sleep(0)
    # The client was slow, so that the next comment is due.
    comments.idle = TICKS
    comments.writing.add_done_callback(lambda _: comments.tick())
    gate.set()
    await settling
    await asyncio.sleep(0)
    assert sending == 0


async def test_an_error_waits_for_a_comment_that_begins_while_it_is_stored() -> None:
    """A stream that fails sends no comment together with its error, or after it."""
    sent: list[bytes] = []
    sending = 0

    async def receive() -> dict[str, Any]:
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal sending
        assert not sending
        sending += 1
        await asyncio.sleep(0.01)
        sending -= 1
        sent.append(message["body"])

    async def store(_: Mapping[str, Any]) -> None:
        sink.comments.idle = TICKS
        sink.comments.tick()
        await asyncio.sleep(0)

    exchange = Exchange({"type": "http", "method": "POST", "headers": []}, receive, send)
    exchange.started = True
    served = ServedModel(Echo(), Model("m", 100, None, "", "", False, "f", 7), Policy())
    sink = StreamSink(exchange, served, Answer(lambda *_: {}, store=store), Failing({}, False))
    assert await sink.fail(EngineUnavailable("The engine has ended."))
    await asyncio.sleep(0.05)
    assert [one == COMMENT for one in sent] == [True, False]


class Failing(ChunkEncoder):
    """An encoder whose failed response can be stored."""

    def failed(self, error: LatimerError) -> Mapping[str, Any]:
        """Return a response."""
        return {"id": "resp_1"}


class Passing(BaseHTTPMiddleware):
    """Middleware that passes every request on, through queues of its own."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        """Return the app's own response."""
        return await call_next(request)


def mounted(engine: Silent) -> Starlette:
    """Return an app with middleware, and an adapter below a prefix."""
    app = Starlette(routes=[Mount("/ai", app_of(engine))])
    app.add_middleware(Passing)
    return app


@pytest.mark.parametrize(("make", "prefix"), [(app_of, ""), (mounted, "/ai")])
async def test_a_client_that_leaves_in_the_silence_ends_the_work(make: Any, prefix: str) -> None:
    """A disconnect after comments immediately cancels generation, also behind middleware."""
    engine = Silent(silence=3600)
    with serving(lambda: make(engine)) as address:
        async with httpx2.AsyncClient(base_url=address + prefix) as client:
            body = {"model": "m", "messages": USER, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                assert await anext(reply.aiter_raw()) == COMMENT
        for _ in range(100):
            if engine.left.is_set():
                break
            await asyncio.sleep(0.01)
    assert engine.left.is_set()


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_real_engine_is_kept_waiting_for(
    make_backend: Any, client_of: Any, engine: str
) -> None:
    """A long prompt on a real engine gets comments before the first token."""
    backend = make_backend(engine)
    app = OpenAIAdapter(backend, any_model=True, keepalive=SHORT)
    text = " ".join(map(str, range(900)))[:1_900]
    async with client_of(app) as client:
        body = {"model": "m", "prompt": text, "max_tokens": 2, "stream": True}
        reply = await client.post("/v1/completions", json=body)
        assert reply.text.startswith(COMMENTED)
    await app.aclose()


@pytest.mark.parametrize("stage", ["request", "headers"])
@pytest.mark.parametrize(
    ("make_fake", "make"), [(FakeLlamaServer, LlamaServer), (FakeKoboldcpp, KoboldCpp)]
)
async def test_a_silent_server_is_waited_for_and_left(
    make_fake: Any, make: Any, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent server causes comments, and is released when the client disconnects."""
    # koboldcpp is asked twenty times, for a second, if a call that it was sent will still begin.
    monkeypatch.setattr("latimer.backends.koboldcpp.call.ABORT_EVERY", 0.005)
    fake = make_fake()
    await fake.start()
    backend = make(fake.url)
    app = OpenAIAdapter(backend, any_model=True, keepalive=SHORT)
    try:
        with serving(lambda: app) as address:
            async with httpx2.AsyncClient(base_url=address) as client:
                body = {"model": "m", "prompt": f"FAULT:silence/{stage}", "stream": True, "n": 2}
                async with client.stream("POST", "/v1/completions", json=body) as reply:
                    assert await anext(reply.aiter_raw()) == COMMENT
            for _ in range(100):
                if not backend.server.turns.taken:
                    break
                await asyncio.sleep(0.01)
            assert not backend.server.turns.taken
    finally:
        await fake.stop()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_prompt_that_is_too_long_keeps_its_status(
    make_backend: Any, client_of: Any, path: str
) -> None:
    """The context check precedes the first comment on every engine, so its error is a 400."""
    app = OpenAIAdapter(make_backend("llama_server"), any_model=True, keepalive=0.001)
    async with client_of(app) as client:
        text = "word " * 9_000
        field = {"messages": [{"role": "user", "content": text}]}
        body = {"prompt": text} if "chat" not in path else field
        reply = await client.post(path, json={"model": "m", "stream": True, **body})
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    await app.aclose()


@pytest.mark.parametrize("error", [None, EngineUnavailable("gone")])
async def test_a_streamed_response(error: LatimerError | None) -> None:
    """Comments come before and between the events, also before those of an early error."""
    backend = Silent(error)
    app = OpenAIAdapter(backend, any_model=True, keepalive=SHORT)
    with serving(lambda: app) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            body = {"model": "m", "input": "x", "stream": True}
            text = (await client.post("/v1/responses", json=body)).text
    assert text.startswith(COMMENTED)
    names = order_of(events_in(text))
    if error is None:
        assert COMMENTED in text.partition("response.created")[2]
        assert names == [*HEAD, *TEXT, "completed"]
    else:
        assert names == [*HEAD, "error", "failed"]
