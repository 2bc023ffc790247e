"""Tests of the spans and metrics for OpenTelemetry, with its real SDK."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter, observers, traces
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.request_log import RequestLog
from latimer.adapter.traces import INSTRUMENTS, Traces
from latimer.backends.errors import EngineError, EngineUnavailable
from latimer.backends.llama_server import LlamaServer
from opentelemetry import context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.clients import client_of
from support.collector import PARENT, SAMPLED, TRACE
from support.engines.echo import Echo
from support.engines.fleet import Engine, pool_of
from support.servers import serving

SOURCE = Path(traces.__file__)
OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
CHAT = {
    "model": "gpt-4o",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}
# Phases of waits of a millisecond and more: for the facts of the model, and for a place.
WAITS = ("load", "queue")


class Kept:
    """An SDK that keeps spans and metrics in memory."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self.reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        """The spans that have ended."""
        return self.exporter.get_finished_spans()

    @property
    def requests(self) -> list[ReadableSpan]:
        """The spans of requests, without their phases."""
        return [one for one in self.spans if "url.path" in (one.attributes or {})]

    def phases(self, span: ReadableSpan) -> list[ReadableSpan]:
        """Return the spans below a span."""
        return [one for one in self.spans if one.parent == span.context]

    def points(self) -> dict[str, list[HistogramDataPoint]]:
        """Return the points of each metric."""
        data = self.reader.get_metrics_data()
        found: dict[str, list[Any]] = {}
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    found[metric.name] = [*metric.data.data_points]
        return found


@pytest.fixture
def kept() -> Iterator[Kept]:
    """Return an SDK."""
    found = Kept()
    yield found
    found.tracers.shutdown()
    found.meters.shutdown()


@asynccontextmanager
async def traced(backend: Any, kept: Kept, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an app; the spans are there when it has ended."""
    observers = [Traces(kept.tracers, kept.meters), *options.pop("observers", ())]
    options.setdefault("any_model", not isinstance(backend, list))
    app = OpenAIAdapter(backend, observers=observers, **options)
    async with client_of(app) as client:
        yield client
    await app.aclose()


def facts(span: ReadableSpan) -> dict[str, Any]:
    """Return the attributes of a span."""
    return dict(span.attributes or {})


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_request_is_a_span(make_backend: Any, engine: str, kept: Kept) -> None:
    """A span below the client's has the model, the tokens of the usage, and the finish reason."""
    async with traced(make_backend(engine), kept) as client:
        plain = await client.post("/v1/chat/completions", json=CHAT, headers=SAMPLED)
        stream = {**CHAT, "stream": True, "n": 2, "seed": 3}
        await client.post("/v1/chat/completions", json=stream, headers=SAMPLED)
    usage = plain.json()["usage"]
    one, two = kept.requests
    for span in (one, two):
        assert span.context is not None
        assert span.parent is not None
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
        assert span.parent.is_remote
        assert span.kind is SpanKind.SERVER
        assert re.fullmatch(r"chat demo(\.gguf)?", span.name)
        assert span.status.status_code is StatusCode.UNSET
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "latimer"
    found = facts(one)
    assert found.pop("latimer.request_id") == plain.headers["x-request-id"]
    assert found.pop("gen_ai.response.model").removesuffix(".gguf") == "demo"
    assert 0 <= found.pop("gen_ai.usage.cache_read.input_tokens") < usage["prompt_tokens"]
    assert found == {
        "client.address": "127.0.0.1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "latimer",
        "gen_ai.request.model": "gpt-4o",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.reasoning.output_tokens": 0,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "latimer.engine": engine,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
    }
    streamed = facts(two)
    assert streamed["gen_ai.request.stream"] is True
    assert streamed["gen_ai.request.choice.count"] == 2
    assert streamed["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert 0 < streamed["gen_ai.response.time_to_first_chunk"] < 60


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_phases_follow_each_other(make_backend: Any, engine: str, kept: Kept) -> None:
    """The phases of a stream are within its span, and each begins where the last one ended."""
    async with traced(make_backend(engine), kept) as client:
        await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        await client.post("/v1/embeddings", json={"model": "m", "input": "Paris"})
        await client.post("/v1/completions", json={"model": "m", "prompt": "1, 2, "})
    stream, *others = kept.requests
    phases = [one for one in kept.phases(stream) if one.name not in WAITS]
    assert [one.name for one in phases] == ["prefill", "decode"]
    assert phases[0].end_time == phases[1].start_time
    for span in kept.requests:
        for phase in kept.phases(span):
            assert phase.kind is SpanKind.INTERNAL
            assert span.start_time is not None
            assert phase.start_time is not None
            assert phase.end_time is not None
            assert span.end_time is not None
            assert span.start_time <= phase.start_time <= phase.end_time <= span.end_time
    assert others[-1].name.startswith("text_completion ")
    assert [one.name for one in kept.phases(others[-1]) if one.name not in WAITS] == ["inference"]


async def test_a_wait_is_a_phase(kept: Kept) -> None:
    """A request that waits for a place on an engine has a span of that wait."""
    engine = Engine("one", places=1)
    engine.gate.clear()
    entries = [ModelEntry(await pool_of(engine), ("m",))]
    async with traced(entries, kept) as client:
        sending = [
            asyncio.create_task(
                client.post("/v1/completions", json={"model": "m", "prompt": "a", "stream": True})
            )
            for _ in range(2)
        ]
        async with asyncio.timeout(10):
            while not engine.runs:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        engine.gate.set()
        for reply in await asyncio.gather(*sending):
            assert reply.status_code == 200, reply.text
    _, second = kept.requests
    assert facts(second)["latimer.engine"] == "one"
    names = [one.name for one in kept.phases(second)]
    assert names == ["queue", "prefill", "decode"]
    queue = kept.phases(second)[0]
    assert queue.end_time is not None
    assert queue.start_time is not None
    assert queue.end_time - queue.start_time > 4e7


async def test_an_attempt_has_its_engine(kept: Kept) -> None:
    """Each engine that has not served a request has a span, and the phases begin after the last."""
    one, two, three = (Engine(name) for name in ("one", "two", "three"))
    one.fails, two.fails = EngineError("It failed."), EngineUnavailable("It is gone.")
    entries = [ModelEntry(await pool_of(one, two, three), ("m",))]
    body = {"model": "m", "prompt": "a", "stream": True}
    async with traced(entries, kept) as client:
        while not (one.jobs and two.jobs):
            assert (await client.post("/v1/completions", json=body)).status_code == 200
    spans = [(span, each) for span in kept.requests for each in kept.phases(span)]
    tried = [(span, each) for span, each in spans if each.name == "attempt"]
    reasons = {"one": "error", "two": "unavailable"}
    for span, attempt in tried:
        found = facts(attempt)
        assert found["error.type"] == reasons[found["latimer.engine"]]
        assert attempt.status.status_code is StatusCode.ERROR
        assert span.status.status_code is StatusCode.UNSET
        prefill = next(each for each in kept.phases(span) if each.name == "prefill")
        ends = span.start_time, attempt.start_time, attempt.end_time, prefill.start_time
        # A float has not all digits of a nanosecond.
        for before, after in pairwise(ends):
            assert int(after or 0) - int(before or 0) > -1_000
    assert {facts(attempt)["latimer.engine"] for _, attempt in tried} == {"one", "two"}


async def test_a_repeated_parent_does_not_count(make_backend: Any, kept: Kept) -> None:
    """Of two parents none is used, and lines of the trace's state are one list."""
    backend = make_backend("llama_server")
    heads = spied(backend)
    parent, state = ("traceparent", SAMPLED["traceparent"]), [("tracestate", "a=1")]
    async with traced(backend, kept) as client:
        for headers in ([parent, parent, *state], [parent, *state, ("tracestate", "b=2")]):
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    one, two = kept.requests
    assert one.parent is None
    assert two.parent is not None
    assert b"tracestate" not in heads[0]
    assert b"tracestate: a=1,b=2\r\n" in heads[1]


def spied(backend: Any) -> list[bytes]:
    """Return the growing list of the heads of requests to an engine."""
    heads: list[bytes] = []
    send = backend.server.client._client.handle_async_request

    def spy(request: tuple[bytes, bytes]) -> Any:
        if b"/completion " in request[0]:
            heads.append(request[0])
        return send(request)

    backend.server.client._client.handle_async_request = spy
    return heads


async def test_an_engine_is_below_the_span(make_backend: Any, kept: Kept) -> None:
    """The engine gets the id of the span as its parent, and the client's state of the trace."""
    backend = make_backend("llama_server")
    heads, lines = spied(backend), bytearray()
    log = RequestLog(lines.extend)
    headers = {**SAMPLED, "tracestate": "vendor=one", "x-client-request-id": "mine"}
    async with traced(backend, kept, observers=[log]) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        await client.post("/v1/chat/completions", json=CHAT)
    for span, head, line in zip(kept.requests, heads, bytes(lines).splitlines(), strict=True):
        assert span.context is not None
        own = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"
        assert head.count(b"traceparent") == 1
        assert f"traceparent: {own}".encode() in head
        assert json.loads(line)["trace_id"] == f"{span.context.trace_id:032x}"
    assert b"tracestate: vendor=one\r\n" in heads[0]
    assert b"x-client-request-id: mine\r\n" in heads[0]
    assert b"tracestate" not in heads[1]
    assert kept.requests[1].parent is None


async def test_a_client_decides_that_nothing_is_kept(make_backend: Any, kept: Kept) -> None:
    """A parent that is not sampled has no span below it, and the engine gets to know that."""
    backend = make_backend("llama_server")
    heads = spied(backend)
    async with traced(backend, kept) as client:
        for flags in ("00", "01"):
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
            await client.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert len(kept.requests) == 1
    found = re.findall(rb"traceparent: 00-(\w+)-\w+-(\w\w)\r\n", b"".join(heads))
    assert [(one.decode(), int(two, 16) & 1) for one, two in found] == [(TRACE, 0), (TRACE, 1)]
    (point,) = kept.points()["gen_ai.server.request.duration"]
    assert point.count == 2


ERRORS: list[tuple[Any, dict[str, Any], StatusCode, int, str]] = [
    ("down", CHAT, StatusCode.ERROR, 503, "engine_unavailable"),
    ("up", {"model": "m"}, StatusCode.UNSET, 400, "missing_required_parameter"),
    ("breaks", {**CHAT, "model": "m", "stream": True}, StatusCode.ERROR, 200, "engine_error"),
]


@pytest.mark.parametrize(("engine", "body", "status", "code", "kind"), ERRORS)
async def test_an_error_has_its_type(
    make_backend: Any,
    kept: Kept,
    engine: str,
    body: dict[str, Any],
    status: StatusCode,
    code: int,
    kind: str,
) -> None:
    """A failure here or on an engine has the status of an error, and all errors have their type."""
    backend: Any = LlamaServer("http://127.0.0.1:9") if engine == "down" else None
    if engine == "breaks":
        one = Engine("one")
        one.breaks = EngineError("It broke.")
        backend = [ModelEntry(await pool_of(one), ("m",))]
    async with traced(backend or make_backend("llama_cpp"), kept) as client:
        reply = await client.post("/v1/chat/completions", json=body)
    (span,) = kept.requests
    assert span.status.status_code is status
    assert (facts(span)["http.response.status_code"], reply.status_code) == (code, code)
    assert facts(span)["error.type"] == kind
    assert not span.status.description
    assert "gen_ai.usage.input_tokens" not in facts(span)


def test_a_client_that_leaves(llama_server_url: str, kept: Kept) -> None:
    """A client that disconnects is not an error of the server; the span has it as its type."""
    observers = [Traces(kept.tracers, kept.meters)]
    body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 1500, "ignore_eos": True}

    def app() -> OpenAIAdapter:
        return OpenAIAdapter(LlamaServer(llama_server_url), any_model=True, observers=observers)

    with serving(app) as address, httpx2.Client(base_url=address) as client:
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
            next(reply.iter_bytes())
        for _ in range(500):
            if kept.requests:
                break
            client.get("/health")
    (span,) = kept.requests
    assert span.status.status_code is StatusCode.UNSET
    assert facts(span)["error.type"] == "client_gone"
    assert [one.name for one in kept.phases(span) if one.name not in WAITS] == ["prefill", "decode"]
    (point,) = kept.points()["gen_ai.server.request.duration"]
    assert (point.attributes or {})["error.type"] == "client_gone"


async def test_no_attribute_has_content(make_backend: Any, kept: Kept) -> None:
    """Prompts, answers, keys and users are in no attribute, no name and no status."""
    keys = {"team": {"digest": digest_of("sk-of-team")}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", {**CHAT, "user": "somebody", "metadata": {"a": "private"}}),
        ("chat/completions", {**CHAT, "stream": True, "store": True}),
        ("responses", {"model": "m", "input": "What is the capital of France?"}),
        ("chat/completions", {**CHAT, "temperature": "What is"}),
        ("chat/completions", {**CHAT, "messages": [{"role": "Paris"}]}),
    ]
    async with traced(make_backend("llama_cpp"), kept, keys=keys) as client:
        for path, body in bodies:
            for key in ("sk-of-team", "sk-unknown"):
                url, headers = f"/v1/{path}?secret=sk-query", {"authorization": f"Bearer {key}"}
                await client.post(url, json=body, headers={**headers, "cookie": "session"})
    text = "\n".join(one.to_json() for one in kept.spans)
    for word in ("What is", "Paris", "France", "sk-", "somebody", "private", "session", "secret"):
        assert word not in text
    assert len(kept.requests) == 2 * len(bodies)
    assert facts(kept.requests[0])["latimer.key"] == "team"


async def test_metrics_equal_the_usage(make_backend: Any, kept: Kept) -> None:
    """The histograms have the names and buckets of the convention, and the tokens of the usage."""
    body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 8, "ignore_eos": True}
    async with traced(make_backend("llama_cpp"), kept) as client:
        plain = (await client.post("/v1/completions", json=body)).json()["usage"]
        await client.post("/v1/completions", json={**body, "stream": True})
        await client.post("/v1/completions", json={**body, "temperature": "hot"})
        await client.get("/v1/models")
    points = kept.points()
    assert points.keys() == {row.name for row in INSTRUMENTS}
    for row in INSTRUMENTS:
        assert all(tuple(one.explicit_bounds) == row.buckets for one in points[row.name])
    (duration,) = points["gen_ai.server.request.duration"]
    attributes = dict(duration.attributes or {})
    assert attributes.pop("gen_ai.response.model") == attributes["gen_ai.request.model"]
    assert str(attributes.pop("gen_ai.request.model")).removesuffix(".gguf") == "demo"
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "latimer",
        "latimer.engine": "llama_cpp",
    }
    assert duration.count == 2
    tokens = {
        (one.attributes or {})["gen_ai.token.type"]: one.sum
        for one in points["gen_ai.client.token.usage"]
    }
    assert tokens == {"input": 2 * plain["prompt_tokens"], "output": 2 * 8}
    (first,) = points["gen_ai.server.time_to_first_token"]
    (between,) = points["gen_ai.server.time_per_output_token"]
    assert first.count == between.count == 1
    assert first.sum + 7 * between.sum <= duration.sum
    assert duration.exemplars[0].trace_id in {one.context.trace_id for one in kept.requests}


async def test_other_paths_have_spans_too(make_backend: Any, kept: Kept) -> None:
    """A request without a model is named by its route, not by its path; probes have no span."""
    async with traced(make_backend("llama_cpp"), kept) as client:
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/nowhere/at/all"):
            await client.get(path)
        await client.request("MADE", "/v1/models/gone")
        await client.post("/v1/chat/completions", content=b"{")
    assert [(one.name, facts(one).get("http.route")) for one in kept.requests] == [
        ("GET /v1/models", "/v1/models"),
        ("GET", None),
        ("HTTP /v1/models/{name:path}", "/v1/models/{name:path}"),
        ("chat other", "/v1/chat/completions"),
    ]
    assert facts(kept.requests[2])["http.request.method"] == "_OTHER"
    assert "gen_ai.request.model" not in facts(kept.requests[3])


async def test_work_in_the_background_is_below_its_request(make_backend: Any, kept: Kept) -> None:
    """A response in the background has a span of its own, which ends after that of its request."""
    async with traced(make_backend("llama_cpp"), kept) as client:
        body = {"model": "m", "input": "What is the capital of France?", "background": True}
        reply = (await client.post("/v1/responses", json=body, headers=SAMPLED)).json()
        while reply["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            reply = (await client.get(f"/v1/responses/{reply['id']}")).json()
    request, work = (one for one in kept.requests if facts(one)["http.request.method"] == "POST")
    if work.kind is SpanKind.SERVER:
        request, work = work, request
    assert (request.kind, work.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert work.parent == request.context
    output = reply["usage"]["output_tokens"]
    assert facts(work)["gen_ai.usage.output_tokens"] == output
    assert "gen_ai.usage.output_tokens" not in facts(request)


async def test_an_app_around_the_adapter_has_the_parent(make_backend: Any, kept: Kept) -> None:
    """The span of a host that is instrumented is the parent, although the client names one."""
    adapter = OpenAIAdapter(
        make_backend("llama_cpp"), any_model=True, observers=[Traces(kept.tracers, kept.meters)]
    )
    tracer = kept.tracers.get_tracer("host")

    async def host(scope: Any, receive: Any, send: Any) -> None:
        with tracer.start_as_current_span("host", kind=SpanKind.SERVER):
            await adapter(scope, receive, send)

    async with client_of(host) as client:
        await client.post("/v1/chat/completions", json=CHAT, headers=SAMPLED)
    await adapter.aclose()
    (around,) = (one for one in kept.spans if one.name == "host")
    (span,) = kept.phases(around)
    assert span.kind is SpanKind.INTERNAL
    assert facts(span)["gen_ai.operation.name"] == "chat"


async def test_an_sdk_that_is_set_up_later(
    make_backend: Any, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an SDK there are no spans; one that the app sets up afterwards is found."""
    monkeypatch.setattr(traces, "_AGAIN", 0.0)
    observer = Traces()
    app = OpenAIAdapter(make_backend("llama_cpp"), any_model=True, observers=[observer])
    async with client_of(app) as client:
        await client.get("/v1/models")
        app.service.observers.flush()
        assert not observer.follows
        monkeypatch.setattr(trace, "get_tracer_provider", lambda: kept.tracers)
        await client.get("/v1/models")
        app.service.observers.flush()
        assert observer.follows
        await client.get("/v1/models")
    await app.aclose()
    assert len(kept.requests) == 1


async def test_many_spans_take_several_turns(make_backend: Any, kept: Kept) -> None:
    """The spans of many requests that end together do not hold the event loop."""
    observer = Traces(kept.tracers, kept.meters)
    app = OpenAIAdapter(make_backend("llama_cpp"), observers=[observer])
    async with client_of(app) as client:
        for _ in range(21):
            await client.get("/v1/models")
        kept.exporter.clear()
        app.service.observers.flush()
        counts = [len(kept.requests)]
        while counts[-1] < 21 and len(counts) < 20:
            await asyncio.sleep(0)
            counts.append(len(kept.requests))
    await app.aclose()
    steps = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert len(kept.requests) == 21
    assert max(steps) <= 4
    assert context.get_current() == context.Context()


class Once(SpanProcessor):
    """A processor that fails at its first span."""

    has_failed = False

    def on_end(self, span: ReadableSpan) -> None:
        """Fail once."""
        if not self.has_failed:
            self.has_failed = True
            raise ValueError("It is full.")


async def test_a_processor_that_fails_ends_no_other_spans(kept: Kept) -> None:
    """An error of a processor of spans costs one span."""
    processor = Once()
    kept.tracers.add_span_processor(processor)
    app = OpenAIAdapter(Echo(), observers=[Traces(kept.tracers, kept.meters)])
    async with client_of(app) as client:
        for _ in range(20):
            await client.get("/v1/models")
    app.service.observers.flush()
    async with asyncio.timeout(5):
        while len(kept.requests) < 20:
            await asyncio.sleep(0.01)
    assert processor.has_failed
    await app.aclose()


def test_spans_outlive_an_event_loop(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop that ends before it has ended all spans leaves them to the next one."""
    monkeypatch.setattr(observers, "OBSERVED_AFTER", 60)
    app = OpenAIAdapter(Echo(), observers=[Traces(kept.tracers, kept.meters)])

    async def ask(count: int) -> None:
        async with client_of(app) as client:
            for _ in range(count):
                await client.get("/v1/models")
        app.service.observers.flush()

    async def ask_once() -> None:
        await ask(1)
        async with asyncio.timeout(5):
            while len(kept.requests) < 101:
                await asyncio.sleep(0.01)
        await app.aclose()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(ask(100))
    loop.close()
    assert len(kept.requests) < 100
    asyncio.run(ask_once())


def test_nothing_is_imported_without_it() -> None:
    """A server whose settings ask for no spans has no module of OpenTelemetry."""
    script = """
import sys
from latimer.adapter.cli import otel, serve
from latimer.adapter.settings import Settings
from latimer.backends.llama_server import LlamaServer

assert otel.start(Settings()) is None
serve.adapter_of(Settings(), LlamaServer("http://127.0.0.1:9"))
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_documentation_has_every_name() -> None:
    """docs/operations.md has each attribute and each metric."""
    names = re.findall(r'"((?:client|error|gen_ai|http|latimer|url)\.[\w.]+)"', SOURCE.read_text())
    page = OPERATIONS.read_text()
    assert len(names) > 25
    assert [name for name in names if f"`{name}`" not in page] == []
