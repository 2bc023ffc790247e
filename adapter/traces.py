"""Spans and metrics of requests for OpenTelemetry, with the names of its GenAI conventions.

A request has one span, made when it arrives, because the engine's own spans are below it. All else
is made at its end from its `Record`: the attributes, and a span for each phase. Without an SDK,
requests have no spans and cost nothing. No attribute has text of a prompt or an answer.

The names are those of open-telemetry/semantic-conventions-genai, which are in development, and of
OpenTelemetry's stable conventions for HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import NamedTuple, TypeAlias

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator

from ..backends.queue import Try
from .observers import Observer
from .record import OTHER, PROBES, Record, Trace
from .request import Exchange, joined_headers

Attributes: TypeAlias = dict[str, str | bool | int | float | Sequence[str]]

# The value of `gen_ai.provider.name`; the convention has none for llama.cpp.
PROVIDER = "latimer"
# The value of `error.type` if the client disconnected before the end.
CLIENT_GONE = "client_gone"
# `gen_ai.operation.name`, by the end of the path of a POST; the convention has none for ranking.
OPERATIONS = {
    "/chat/completions": "chat",
    "/responses": "chat",
    "/messages": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
    "/rerank": "rerank",
}
# The methods that `http.request.method` may have; all others are `_OTHER`.
_METHODS = frozenset(
    {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"}
)


class Instrument(NamedTuple):
    """A histogram.

    Args:
        buckets: the upper bounds that the convention names.
    """

    name: str
    unit: str
    text: str
    buckets: tuple[float, ...]


INSTRUMENTS = (
    Instrument(
        "gen_ai.server.request.duration",
        "s",
        "Duration of a request that reached a model, from its arrival to its last byte.",
        tuple(0.01 * 2**power for power in range(14)),
    ),
    Instrument(
        "gen_ai.client.token.usage",
        "{token}",
        "Tokens of the prompt and of the answer of a request.",
        tuple(float(4**power) for power in range(14)),
    ),
    Instrument(
        "gen_ai.server.time_to_first_token",
        "s",
        "Time from the arrival of a streamed request to its first token.",
        (
            0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
            10.0,
        ),
    ),
    Instrument(
        "gen_ai.server.time_per_output_token",
        "s",
        "Mean time between two tokens of a streamed request.",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
)  # fmt: skip

# The requests that one turn of the event loop may end: up to a millisecond of work.
_AT_ONCE = 4
# The characters of a model's name, which a client can make up.
_LONGEST_NAME = 256
# Seconds between looks for an SDK, which the app may set up after the adapter.
_AGAIN = 1.0
# Seconds; a shorter wait has no span.
_SHORTEST = 0.001
# The API's own tracers and meters do nothing.
_NO_SDK = ("opentelemetry.trace", "opentelemetry.metrics")


@lru_cache(1024)
def operation_of(method: str, path: str) -> str:
    """Return the operation of a request; empty if it needs no model."""
    if method != "POST":
        return ""
    return next((name for end, name in OPERATIONS.items() if path.endswith(end)), "")


def error_of(record: Record) -> str:
    """Return the value of `error.type`: the code or status of an error; empty without one."""
    if record.is_left:
        return CLIENT_GONE
    return record.error_code or str(record.failed or "")


def attributes_of(record: Record) -> Attributes:
    """Return the attributes of a span that are known when its request has ended."""
    found: Attributes = {
        "http.response.status_code": record.status,
        "latimer.request_id": record.request_id,
    }
    if record.endpoint != OTHER:
        found["http.route"] = record.endpoint
    if record.client:
        found["client.address"] = record.client
    if record.key:
        found["latimer.key"] = record.key
    if error := error_of(record):
        found["error.type"] = error
    if record.model != OTHER:
        # Any name can be asked for, if there is one model.
        found["gen_ai.request.model"] = (record.asked or record.model)[:_LONGEST_NAME]
    if record.begun:
        found["gen_ai.response.model"] = record.model
        found["latimer.engine"] = record.engine
        if record.is_stream:
            found["gen_ai.request.stream"] = True
        if record.choices_per_prompt != 1:
            found["gen_ai.request.choice.count"] = record.choices_per_prompt
        if record.ticket is not None and record.ticket.affinity:
            found["latimer.affinity"] = record.ticket.affinity
        if record.arrivals:
            found["gen_ai.response.time_to_first_chunk"] = record.arrivals[0] - record.begun_at
    if record.prompt_tokens is not None:
        found["gen_ai.usage.input_tokens"] = record.prompt_tokens
        found["gen_ai.usage.output_tokens"] = record.completion_tokens
        if record.cached_tokens is not None:
            found["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
        if record.reasoning_tokens is not None:
            found["gen_ai.usage.reasoning.output_tokens"] = record.reasoning_tokens
        if record.reasons:
            found["gen_ai.response.finish_reasons"] = [one or "stop" for one in record.reasons]
    return found


def attempts_of(record: Record) -> Iterator[tuple[Try, float, float]]:
    """Yield each engine that has not served a request, with its start and end.

    The times are those of `time.perf_counter`. Where the start is not known, it is the end of the
    attempt before.
    """
    shift = time.perf_counter() - time.monotonic()
    before = record.begun_at
    for one in record.tries:
        end = one.ended + shift
        yield one, min(one.begun + shift if one.begun else before, end), end
        before = end


def phases_of(record: Record) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the start and the end of each phase, in times of `time.perf_counter`.

    The times of tokens are known for streams only; another request has one phase on its engine.
    """
    if record.loading >= _SHORTEST:
        yield "load", record.loads_at, record.loads_at + record.loading
    end = record.arrivals[0] if record.arrivals else record.last
    if not record.begun or not end:
        return
    waited = 0.0 if record.ticket is None else record.ticket.waited
    placed = record.begun
    if waited >= _SHORTEST:
        # Of several calls, another one may have waited until later.
        placed = min(record.begun + waited, end)
        yield "queue", record.begun, placed
    if record.tries:
        # The attempts before have spans of their own.
        failed = record.tries[-1].ended + time.perf_counter() - time.monotonic()
        placed = min(max(placed, failed), end)
    if record.arrivals:
        yield "prefill", placed, end
        yield "decode", end, record.arrivals[-1]
    else:
        yield "inference", placed, end


class Traces(Observer):
    """Spans and metrics of requests.

    Args:
        tracer_provider: makes the spans; by default the global provider, which may be set later.
        meter_provider: makes the metrics; by default the global provider.
    """

    keeps = False

    def __init__(
        self,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._providers = tracer_provider, meter_provider
        self._tracer: trace.Tracer | None = None
        self._histograms: Sequence[metrics.Histogram] = ()
        self._left: deque[Record] = deque()
        # The event loop that ends the spans of these.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looks_at = 0.0
        self._look()

    def _look(self) -> None:
        """Take the tracer and the instruments of an SDK that was set up."""
        tracers, meters = self._providers
        own = version("latimer")
        if self._tracer is None:
            tracer = (tracers or trace.get_tracer_provider()).get_tracer("latimer", own)
            if _does_something(tracer):
                self._tracer, self.follows = tracer, True
        provider = meters or metrics.get_meter_provider()
        if not self._histograms and _does_something(provider):
            meter = provider.get_meter("latimer", own)
            self._histograms = [
                meter.create_histogram(
                    row.name, row.unit, row.text, explicit_bucket_boundaries_advisory=row.buckets
                )
                for row in INSTRUMENTS
            ]

    def begin(self, exchange: Exchange) -> None:
        """Start the span of a request, which its calls of engines name as their parent."""
        scope = exchange.scope
        method, path = scope["method"], scope["path"]
        if path in PROBES or self._tracer is None:
            return
        context, kind = _parent_of(exchange)
        operation = operation_of(method, path)
        attributes: Attributes = {
            "http.request.method": method if method in _METHODS else "_OTHER",
            "url.path": path,
            "url.scheme": scope.get("scheme", "http"),
        }
        if operation:
            attributes["gen_ai.operation.name"] = operation
            attributes["gen_ai.provider.name"] = PROVIDER
        # The clock of the records has no date.
        offset = time.time() - time.perf_counter()
        span = self._tracer.start_span(
            operation or "HTTP",
            context,
            kind,
            attributes,
            start_time=_nanoseconds(exchange.begun_at + offset),
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span, context))
        lines = [
            f"{name}: {value}\r\n"
            for name, value in carrier.items()
            if value.isascii() and value.isprintable()
        ]
        trace_id = f"{span.get_span_context().trace_id:032x}"
        exchange.trace = Trace(span, offset, trace_id, "".join(lines).encode())
        if exchange.record is not None:
            exchange.record.trace = exchange.trace

    def take(self, ended: Sequence[Record]) -> None:
        """End the spans of requests, and measure them; many take several turns of the loop."""
        if ended[-1].ended >= self._looks_at:
            self._looks_at = ended[-1].ended + _AGAIN
            self._look()
        if self._tracer is not None or self._histograms:
            self._left.extend(ended)
            # That of earlier requests may have ended. A task that is garbage ends without one.
            loop = asyncio._get_running_loop()
            if loop is not None and self._loop is not loop:
                self._loop = loop
                self._go_on(loop)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            return
        try:
            for _ in range(min(_AT_ONCE, len(self._left))):
                self._end(self._left.popleft())
        finally:
            # A processor of spans can raise anything.
            if self._left:
                loop.call_soon(self._go_on, loop)
            else:
                self._loop = None

    def close(self) -> None:
        """End what is left now."""
        while self._left:
            self._end(self._left.popleft())

    def _end(self, record: Record) -> None:
        operation = operation_of(record.method, record.endpoint)
        context = None
        if record.trace is not None and self._tracer is not None:
            context = self._finish(self._tracer, record.trace, record, operation)
        if operation and record.begun and self._histograms:
            self._measure(record, operation, context)

    def _finish(
        self, tracer: trace.Tracer, own: Trace, record: Record, operation: str
    ) -> Context | None:
        """End a span, with a span for each phase; return its context if it is recorded."""
        span, offset = own.span, own.offset
        if not span.is_recording():
            return None
        if operation:
            span.update_name(f"{operation} {record.model}")
        else:
            method = record.method if record.method in _METHODS else "HTTP"
            span.update_name(method if record.endpoint == OTHER else f"{method} {record.endpoint}")
        span.set_attributes(attributes_of(record))
        if record.status >= 500 or record.failed >= 500:
            span.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(span, Context())
        for tried, start, end in attempts_of(record):
            attributes = {"latimer.engine": tried.engine, "error.type": tried.reason}
            begun = _nanoseconds(start + offset)
            attempt = tracer.start_span("attempt", context, attributes=attributes, start_time=begun)
            attempt.set_status(trace.StatusCode.ERROR)
            attempt.end(_nanoseconds(end + offset))
        for name, start, end in phases_of(record):
            phase = tracer.start_span(name, context, start_time=_nanoseconds(start + offset))
            phase.end(_nanoseconds(end + offset))
        span.end(_nanoseconds(record.ended + offset))
        return context

    def _measure(self, record: Record, operation: str, context: Context | None) -> None:
        """Add a request to the histograms; a client cannot choose a value of an attribute."""
        duration, tokens, first_token, per_token = self._histograms
        attributes: Attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "latimer.engine": record.engine,
        }
        if error := error_of(record):
            attributes["error.type"] = error
        duration.record(record.ended - record.begun_at, attributes, context)
        if record.prompt_tokens is None:
            return
        generated, arrivals = record.completion_tokens, record.arrivals
        prompt: Attributes = {**attributes, "gen_ai.token.type": "input"}
        tokens.record(record.prompt_tokens, prompt, context)
        if generated:
            tokens.record(generated, {**attributes, "gen_ai.token.type": "output"}, context)
        if arrivals:
            first_token.record(arrivals[0] - record.begun_at, attributes, context)
            if generated > 1:
                between = (arrivals[-1] - arrivals[0]) / (generated - 1)
                per_token.record(between, attributes, context)


def _parent_of(exchange: Exchange) -> tuple[Context | None, trace.SpanKind]:
    """Return the context with the parent of a request's span, and its kind.

    The parent is the span of the request that began this work, or that of the app around the
    adapter, or that of the client.
    """
    if exchange.trace is not None:
        context = trace.set_span_in_context(exchange.trace.span, Context())
        return context, trace.SpanKind.INTERNAL
    around = trace.get_current_span().get_span_context()
    if around.is_valid:
        return None, trace.SpanKind.SERVER if around.is_remote else trace.SpanKind.INTERNAL
    fields = _fields_of(propagate.get_global_textmap())
    carrier = {
        fields[name]: value.decode("latin-1")
        for name, value in joined_headers(exchange.scope["headers"]).items()
        if name in fields
    }
    context = propagate.extract(carrier, Context()) if carrier else Context()
    return context, trace.SpanKind.SERVER


@lru_cache(4)
def _fields_of(propagator: TextMapPropagator) -> Mapping[bytes, str]:
    """Return the names of the headers that have the parent of a span."""
    return {name.lower().encode(): name for name in propagator.fields}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _does_something(one: object) -> bool:
    """Return True for a tracer or a provider of an SDK."""
    return not type(one).__module__.startswith(_NO_SDK)
