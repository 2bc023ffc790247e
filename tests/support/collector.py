"""A collector of OpenTelemetry: it takes spans and metrics over OTLP/HTTP."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

# The parent of a client's requests, and the headers that name it: those of the W3C's examples.
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


def value_of(value: Any) -> Any:
    """Return the value of an attribute."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(one) for one in value.array_value.values]
    return getattr(value, kind)


def pairs(attributes: Any) -> dict[str, Any]:
    """Return attributes by their names."""
    return {one.key: value_of(one.value) for one in attributes}


class Collector:
    """The spans and metrics that were sent.

    Attributes:
        address: the value of OTEL_EXPORTER_OTLP_ENDPOINT.
        heads: the headers of each request.
        answers: cleared to hold all answers.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.heads: list[dict[str, str]] = []
        self.answers = threading.Event()
        self.answers.set()

    def spans(self) -> list[tuple[dict[str, Any], Span]]:
        """Return all spans, each with the attributes of its resource."""
        return [
            (pairs(resource.resource.attributes), span)
            for one in [*self.traces]
            for resource in one.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def points(self) -> dict[str, list[Any]]:
        """Return the points of all metrics, by their names."""
        found: dict[str, list[Any]] = {}
        for one in [*self.metrics]:
            for resource in one.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        found.setdefault(metric.name, []).extend(metric.histogram.data_points)
        return found

    def wait(self, is_there: Callable[[], object], seconds: float = 20.0) -> None:
        """Wait until something was sent."""
        end = time.monotonic() + seconds
        while not is_there():
            assert time.monotonic() < end, "the collector has not got it"
            time.sleep(0.02)


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.heads.append({name.lower(): text for name, text in self.headers.items()})
            if self.path == "/v1/traces":
                collector.traces.append(ExportTraceServiceRequest.FromString(body))
            elif self.path == "/v1/metrics":
                collector.metrics.append(ExportMetricsServiceRequest.FromString(body))
            collector.answers.wait()
            with contextlib.suppress(OSError):
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            collector.answers.set()
            server.shutdown()
            thread.join()
