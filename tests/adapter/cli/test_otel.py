"""Tests of `latimer serve --otel`: what a collector gets, and what is said about it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.cli import otel
from latimer.adapter.settings import Settings
from support import copies
from support.collector import PARENT, SAMPLED, TRACE, Collector, collecting, pairs
from support.servers import command
from support.workers import workers

CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove OpenTelemetry's variables from the environment."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[Collector]:
    """Run a collector."""
    with collecting() as found:
        yield found


def test_a_collector_gets_spans_and_metrics(collector: Collector) -> None:
    """With OpenTelemetry's variables alone, a server sends spans and metrics, also at its end."""
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=secret",
        "OTEL_SERVICE_NAME": "my-service",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with command(**environment) as (process, address):
        url = f"{address}/v1/chat/completions"
        usage = httpx2.post(url, json=CHAT, headers=SAMPLED).json()["usage"]
        collector.wait(lambda: len(collector.spans()) >= 2)
        httpx2.post(url, json={**CHAT, "temperature": "hot"})
        process.terminate()
        assert process.stderr is not None
        lines = process.stderr.read().decode()
    assert f"Latimer sends spans to {collector.address}/v1/traces and metrics to" in lines
    requests = [(resource, span) for resource, span in collector.spans() if span.attributes]
    (resource, good), (_, bad) = requests
    assert resource["service.name"] == "my-service"
    assert (good.trace_id.hex(), good.parent_span_id.hex()) == (TRACE, PARENT)
    assert (good.name, good.kind) == ("chat demo", good.SPAN_KIND_SERVER)
    found = pairs(good.attributes)
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    seconds = (good.end_time_unix_nano - good.start_time_unix_nano) / 1e9
    assert 0 < seconds < 60
    assert abs(good.end_time_unix_nano / 1e9 - time.time()) < 60
    assert pairs(bad.attributes)["http.response.status_code"] == 400
    points = collector.points()
    assert sum(one.sum for one in points["gen_ai.client.token.usage"]) == usage["total_tokens"]
    assert points["gen_ai.server.request.duration"][0].count == 1
    assert all(one["api-key"] == "secret" for one in collector.heads)


def test_each_worker_sends_its_own(collector: Collector, llama_server_url: str) -> None:
    """Workers are instances of one service, and none loses spans at the end."""
    environment: dict[str, Any] = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.address}
    with workers(llama_server_url, "--any-model", **environment) as running:
        url = f"{running.address}/v1/chat/completions"
        # Each client has a connection that stays open, and the parent shares them evenly.
        with httpx2.Client(timeout=60) as one, httpx2.Client(timeout=60) as other:
            for client in (one, other, one, other):
                assert client.post(url, json=CHAT).status_code == 200
        lines = "".join(running.lines) + running.end()
    assert lines.count("Latimer sends spans") == 1
    requests = [resource for resource, span in collector.spans() if span.attributes]
    assert len(requests) == 4
    assert {one["service.name"] for one in requests} == {"latimer"}
    assert len({one["service.instance.id"] for one in requests}) == 2


@pytest.mark.slow
def test_a_collector_that_does_not_answer(collector: Collector) -> None:
    """A collector that hangs delays no request, and the end of the server by two seconds."""
    collector.answers.clear()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
        "OTEL_BSP_SCHEDULE_DELAY": "20",
        "OTEL_METRIC_EXPORT_INTERVAL": "20",
    }
    with command(**environment) as (process, address), httpx2.Client(timeout=10) as client:
        seconds = []
        for _ in range(20):
            begun = time.monotonic()
            assert client.post(f"{address}/v1/chat/completions", json=CHAT).status_code == 200
            seconds.append(time.monotonic() - begun)
        collector.wait(lambda: collector.traces and collector.metrics)
        process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - begun < 5
    assert sorted(seconds)[10] < 1


def test_a_line_about_a_dead_collector(llama_server_url: str) -> None:
    """The exporter's line about spans that it could not send names the address."""
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:secret@127.0.0.1:9",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "0.1",
        "OTEL_BSP_SCHEDULE_DELAY": "20",
    }
    with command(**environment) as (process, address):
        httpx2.post(f"{address}/v1/chat/completions", json=CHAT)
        assert process.stderr is not None
        lines = iter(process.stderr.readline, b"")
        line = next(one for one in lines if b"Failed to export spans" in one).decode()
    assert line.endswith(" Address: http://127.0.0.1:9/v1/traces\n")
    assert "secret" not in line


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return copies.run(*words, **environment)


WRONG: list[tuple[dict[str, str], str]] = [
    ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"),
    ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER must be otlp or none"),
    ({"OTEL_METRIC_EXPORT_INTERVAL": "0"}, "a variable OTEL_… has a wrong value"),
]


@pytest.mark.parametrize(("variables", "says"), WRONG)
def test_wrong_variables(
    variables: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--otel` does not start a server that cannot send; variables of a cluster only warn."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as raised:
        otel.start(Settings(otel=True))
    assert raised.value.code == 3
    assert says in capsys.readouterr().err
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert otel.start(Settings()) is None
    line = capsys.readouterr().err
    assert line.startswith("Latimer sends no spans and no metrics: ")
    assert says in line


ASKED: list[tuple[dict[str, str], bool | None, bool]] = [
    ({}, None, False),
    ({}, True, True),
    ({"OTEL_SERVICE_NAME": "a"}, None, False),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, None, True),
    ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://a"}, None, True),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, False, False),
    ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"}, True, False),
]


@pytest.mark.parametrize(("variables", "setting", "is_asked"), ASKED)
def test_who_asks_for_it(
    variables: dict[str, str],
    setting: bool | None,
    is_asked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An endpoint turns it on, the setting overrides that, and OTEL_SDK_DISABLED overrides both."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otel.is_asked(Settings(otel=setting)) is is_asked


PLACES: list[tuple[dict[str, str], str]] = [
    (
        {},
        "spans to http://localhost:4318/v1/traces and metrics to http://localhost:4318/v1/metrics",
    ),
    (
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "https://user:secret@all/",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces/here?key=secret",
        },
        "spans to https://traces/here and metrics to https://all/v1/metrics",
    ),
    ({"OTEL_METRICS_EXPORTER": "none"}, "spans to http://localhost:4318/v1/traces"),
    (
        {"OTEL_METRICS_EXPORTER": "none", "OTEL_TRACES_EXPORTER": "none"},
        "nothing: both exporters are 'none'",
    ),
]


@pytest.mark.parametrize(("variables", "where"), PLACES)
def test_where_it_goes(
    variables: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line at the start names the places, as the exporters have them, without a secret."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert otel.describe() == where


def test_a_missing_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the extra, `--otel` names it, and with variables alone a server still starts."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SystemExit) as raised:
        otel.start(Settings.load(None, otel=True))
    assert raised.value.code == 3
    error = capsys.readouterr().err
    assert error.startswith("Latimer cannot start: --otel: OpenTelemetry requires the extra 'otel'")
    assert "pip install '.[otel]'" in error
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert otel.start(Settings()) is None
    assert "the extra 'otel'" in capsys.readouterr().err


def test_check_says_where_it_goes(llama_server_url: str) -> None:
    """`latimer check` has a row for what is sent, and fails if `--otel` cannot send."""
    done = run("check", llama_server_url, "--otel")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^otel +spans to http://localhost:4318/v1/traces and", done.stdout, re.M)
    done = run("check", llama_server_url, "--otel", OTEL_TRACES_EXPORTER="zipkin")
    assert done.returncode == 1
    assert re.search(r"^otel +no: OTEL_TRACES_EXPORTER must be otlp or none", done.stdout, re.M)
    assert "otel" not in run("check", llama_server_url).stdout


AUTOMATIC = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)
"""


def test_an_sdk_that_is_there(tmp_path: Path) -> None:
    """An SDK that `opentelemetry-instrument` has set up in the process gets the spans."""
    (tmp_path / "sitecustomize.py").write_text(AUTOMATIC)
    environment: dict[str, Any] = {"PYTHONPATH": str(tmp_path), "LATIMER_OTEL": "true"}
    with command(**environment) as (process, address):
        httpx2.post(f"{address}/v1/chat/completions", json=CHAT)
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert b"Latimer sends spans and metrics to the SDK of opentelemetry-instrument." in errors
    assert b'"name": "chat demo"' in output
