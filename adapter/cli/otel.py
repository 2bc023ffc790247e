"""OpenTelemetry's SDK for `latimer serve`, set up by the environment variables of OpenTelemetry.

The SDK itself reads most of them: the name of the service, headers, samplers, limits and intervals.
Spans and metrics go to a collector over OTLP/HTTP, in threads of the SDK. An app that mounts the
adapter sets up its own SDK.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from ..settings import Settings
from ..settings_file import WrongSettings
from .terminal import fail, say

if TYPE_CHECKING:
    from ..traces import Traces

ENDPOINT, PROTOCOL = "http://localhost:4318", "http/protobuf"
# The name of the service, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES sets one.
SERVICE = "latimer"
# Seconds for the last spans and metrics at the end.
_LAST = 2.0
# Seconds after which another thread gets its turn. The exporter encodes hundreds of spans at a
# time, and with Python's 5 ms the event loop waits that long for each of its own steps.
_TURN = 0.0005


class Unsendable(WrongSettings):
    """A reason why spans and metrics cannot be sent."""


class Signal(NamedTuple):
    """A kind of data.

    Args:
        name: its name in OpenTelemetry's variables and paths.
        shown: its name for people.
    """

    name: str
    shown: str

    def setting(self, end: str) -> tuple[str, str]:
        """Return the variable that sets a property of its exporter, and the value; both or none."""
        for name in (f"{self.name.upper()}_{end}", end):
            if value := _value(f"OTEL_EXPORTER_OTLP_{name}"):
                return f"OTEL_EXPORTER_OTLP_{name}", value
        return "", ""

    def is_sent(self) -> bool:
        """Return False if its exporter is `none`.

        Raises:
            Unsendable: Latimer does not have the exporter, or its protocol.
        """
        name = f"OTEL_{self.name.upper()}_EXPORTER"
        exporter = _value(name) or "otlp"
        if exporter not in ("otlp", "none"):
            raise Unsendable(f"{name} must be otlp or none, not '{exporter}'")
        name, protocol = self.setting("PROTOCOL")
        if protocol not in ("", PROTOCOL):
            raise Unsendable(f"{name} must be {PROTOCOL}, not '{protocol}'")
        return exporter == "otlp"

    def endpoint(self) -> str:
        """Return the URL that it is sent to, without a password."""
        name, value = self.setting("ENDPOINT")
        if self.name.upper() not in name:
            value = f"{(value or ENDPOINT).removesuffix('/')}/v1/{self.name}"
        parts = urlsplit(value)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query=""))


TRACES, METRICS = Signal("traces", "spans"), Signal("metrics", "metrics")


def _with_place(endpoint: str, record: logging.LogRecord) -> bool:
    """Add the address to a line of an exporter, which has only the reason; keep the line."""
    record.msg, record.args = f"{record.getMessage()} Address: {endpoint}", ()
    return True


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()


def is_asked(settings: Settings) -> bool:
    """Return True if the settings, or OpenTelemetry's variables, ask for spans and metrics."""
    if _value("OTEL_SDK_DISABLED").lower() == "true":
        return False
    if settings.otel is not None:
        return settings.otel
    return any(signal.setting("ENDPOINT")[1] for signal in (TRACES, METRICS))


def describe() -> str:
    """Return what is sent, and where.

    Raises:
        Unsendable: a variable has a value that Latimer does not support.
    """
    places = [f"{one.shown} to {one.endpoint()}" for one in (TRACES, METRICS) if one.is_sent()]
    return " and ".join(places) or "nothing: both exporters are 'none'"


class Sdk:
    """OpenTelemetry's SDK in this process.

    Raises:
        Unsendable: the extra is not installed, or a variable has a wrong value.

    Attributes:
        where: what is sent, and where.
        observer: makes the spans and metrics.
    """

    def __init__(self) -> None:
        self.where = describe()
        try:
            self.observer = self._set_up()
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("opentelemetry"):
                raise
            raise Unsendable(
                "OpenTelemetry requires the extra 'otel': run pip install '.[otel]' in a clone of "
                "Latimer"
            ) from None
        except ValueError as error:
            raise Unsendable(f"a variable OTEL_… has a wrong value: {error}") from None

    def _set_up(self) -> Traces:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from ..traces import Traces

        self._providers: list[TracerProvider | MeterProvider] = []
        if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            # The command `opentelemetry-instrument` has set up an SDK.
            self.where = "spans and metrics to the SDK of opentelemetry-instrument"
            return Traces()
        sys.setswitchinterval(_TURN)
        # Each of several attempts is a warning, and the last one an error.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
        for signal, name in ((TRACES, "trace"), (METRICS, "metric")):
            exporter = f"opentelemetry.exporter.otlp.proto.http.{name}_exporter"
            logging.getLogger(exporter).addFilter(partial(_with_place, signal.endpoint()))
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        tracers = meters = None
        if TRACES.is_sent():
            tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
            self._providers.append(tracers)
        if METRICS.is_sent():
            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
            meters = MeterProvider([reader], resource, shutdown_on_exit=False)
            self._providers.append(meters)
        return Traces(tracers, meters)

    def close(self) -> None:
        """Send what is left, unless that takes too long."""
        threads = [
            threading.Thread(target=one.shutdown, name="latimer-otel", daemon=True)
            for one in self._providers
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + _LAST
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))


def start(settings: Settings) -> Sdk | None:
    """Set up the SDK if it is asked for, and print where spans and metrics go.

    Variables of the environment can be those of a whole cluster. So only the setting itself makes
    a server end that cannot send.

    Raises:
        SystemExit: the setting asks for what cannot be sent.
    """
    if not is_asked(settings):
        return None
    try:
        sdk = Sdk()
    except Unsendable as error:
        if settings.otel:
            fail(f"{settings.source_of('otel')}: {error}.")
        say(f"Latimer sends no spans and no metrics: {error}.", level="warning")
        return None
    say(f"Latimer sends {sdk.where}.")
    return sdk
