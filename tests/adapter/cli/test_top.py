"""Tests of `latimer top`: rates and percentiles of a window, the table, and the live screen."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import pytest
from latimer.adapter.cli.top import Row, percentile, rows_of, scrape_of, table_of
from support import copies
from support.servers import command, free_port
from typing_extensions import override

CHAT = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "stream": True,
}

TEXT = """\
# TYPE {p}num_requests_running gauge
{p}num_requests_running{{model_name="m",engine="e"}} 3
# TYPE {p}num_requests_waiting gauge
{p}num_requests_waiting{{model_name="m"}} 2
# TYPE {p}kv_cache_usage_perc gauge
{p}kv_cache_usage_perc{{model_name="m",engine="e"}} 0.25
# TYPE latimer_engine_state gauge
latimer_engine_state{{model_name="m",engine="e",state="ready"}} 0
latimer_engine_state{{model_name="m",engine="e",state="unavailable"}} 1
# TYPE {p}prompt_tokens_total counter
{p}prompt_tokens_total{{model_name="m",engine="e"}} {prompt}
# TYPE {p}generation_tokens_total counter
{p}generation_tokens_total{{model_name="m",engine="e"}} {generated}
# TYPE {p}time_to_first_token_seconds histogram
{p}time_to_first_token_seconds_bucket{{model_name="m",engine="e",le="0.1"}} {fast}
{p}time_to_first_token_seconds_bucket{{model_name="m",engine="e",le="0.2"}} {all}
{p}time_to_first_token_seconds_bucket{{model_name="m",engine="e",le="+Inf"}} {all}
"""


def text(prefix: str = "latimer_", **numbers: float) -> str:
    """Return metrics with some numbers."""
    zero = {"prompt": 0, "generated": 0, "fast": 0, "all": 0}
    return TEXT.format(p=prefix, **{**zero, **numbers})


@pytest.mark.parametrize("prefix", ["latimer_", "vllm:"])
def test_rates_are_those_of_the_window(prefix: str) -> None:
    """Rates and percentiles are those between two scrapes, under both names."""
    before = scrape_of(text(prefix, prompt=100, generated=50, fast=90, all=90), 10.0)
    now = scrape_of(text(prefix, prompt=300, generated=60, fast=90, all=100), 12.0)
    (row,) = rows_of(before, now)
    assert row == Row("m", "e", "DOWN", 3, 2, 0.25, 100.0, 5.0, row.first, (None, None))
    # All ten of the window took between 0.1 and 0.2 s.
    assert row.first[0] == pytest.approx(0.15)
    assert row.first[1] == pytest.approx(0.195)
    (first,) = rows_of(None, now)
    assert (first.input, first.output) == (None, None)
    assert first.first[0] == pytest.approx(0.1 * 50 / 90)


def test_a_restart_is_no_negative_rate() -> None:
    """After a restart the counters begin again, and so do the rates."""
    before = scrape_of(text(prompt=100, generated=50, fast=5, all=5), 10.0)
    now = scrape_of(text(prompt=20, generated=10, fast=2, all=2), 11.0)
    (row,) = rows_of(before, now)
    assert (row.input, row.output) == (20.0, 10.0)
    assert row.first[0] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("counts", "share", "wanted"),
    [
        ({}, 0.5, None),
        ({1.0: 0, float("inf"): 0}, 0.5, None),
        ({1.0: 10, 2.0: 10, float("inf"): 10}, 0.5, 0.5),
        ({1.0: 0, 2.0: 10, float("inf"): 10}, 0.95, 1.95),
        ({1.0: 0, 2.0: 0, float("inf"): 10}, 0.5, 2.0),
    ],
)
def test_percentiles(counts: dict[float, float], share: float, wanted: float | None) -> None:
    """Percentiles are Prometheus': even in a bucket, and the last bound beyond it."""
    found = percentile(counts, share)
    assert found == wanted if wanted is None else found == pytest.approx(wanted)


def test_a_table_is_as_wide_as_the_terminal() -> None:
    """Lines are cut at the width, and names of models cannot control the terminal."""
    row = Row("m\x1b[2J", "e", "ready", 1, 0, None, 1.0, 2.0, (0.5, 1.5), (None, None))
    lines = table_of([row], 40)
    assert all(len(line) <= 40 for line in lines)
    assert "\x1b" not in "".join(table_of([row]))
    assert "500ms  1.50s" in table_of([row])[1]


def test_the_first_bucket_is_no_figure() -> None:
    """A time between tokens in the first bucket is shown as that, because it may be much less."""
    row = Row("m", "e", "ready", 1, 0, None, 1.0, 2.0, (0.004, 0.009), (0.005, 0.012))
    assert table_of([row])[1].split()[-4:] == ["4ms", "9ms", "<10ms", "12ms"]


def test_a_table_fits_80_columns() -> None:
    """Long names and large numbers leave all columns in 80 characters, and short names whole."""
    long = "Qwen3-30B-A3B-Instruct-2507-Q4_K_M", "llama-server-on-the-second-machine"
    times = (0.123, 12.5), (0.012, 0.045)
    rows = [
        Row(*long, "DOWN", 64, 1024, 0.99, 12345.6, 2345.6, *times),
        Row("demo", "one", "loading", 1, 0, None, None, None, (None, None), (None, None)),
    ]
    head, first, second = table_of(rows, 80)
    assert max(map(len, (head, first, second))) <= 80
    numbers = "DOWN 64 1024 99% 12346 2346 123ms 12s 12ms 45ms"
    assert " ".join(first.split()[2:]) == numbers
    assert "…" in first
    assert second.split()[:3] == ["demo", "one", "loading"]
    assert len(head.split()) == 12


def test_the_help_explains_every_column() -> None:
    """`latimer top --help` and docs/operations.md name each column of the table."""
    shown = top("--help").stdout
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    for name in table_of([])[0].split():
        for text in (shown, page):
            assert re.search(rf"\b{name}\b", text)


def window(address: str, seconds: float) -> float:
    """Return the seconds between the two scrapes of a table."""
    reply: Any = json.loads(top(address, "--json", "--interval", str(seconds)).stdout)
    return float(reply["seconds"])


def test_the_interval_is_the_window(server: str) -> None:
    """With `--once` and `--json` the window of the rates is `--interval`."""
    for seconds in (0.2, 0.7):
        # A busy machine can delay the second scrape.
        found = [window(server, seconds)]
        while found[-1] >= seconds + 0.4 and len(found) < 5:
            found.append(window(server, seconds))
        assert seconds <= min(found) < seconds + 0.4


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run `latimer serve` with a key."""
    with command("--api-key", "secret", "--metrics-open") as (_, address):
        yield address


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """Run `latimer serve` whose metrics need a key, with vLLM's names."""
    with command("--api-key", "secret", "--metrics-names", "vllm") as (_, address):
        yield address


def top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `latimer top` without a terminal."""
    return copies.run("top", *arguments, **environment)


def test_a_table_of_a_server(server: str) -> None:
    """Without a terminal there is one table, and with `--json` the same as objects."""
    done = top(server, "--interval", "0.2")
    assert (done.returncode, done.stderr) == (0, "")
    head, row = done.stdout.splitlines()
    assert head.split()[:5] == ["MODEL", "ENGINE", "STATE", "RUN", "WAIT"]
    assert row.split()[:5] == ["demo", "llama_cpp", "ready", "0", "0"]
    reply: Any = json.loads(top(server + "/v1", "--json", "--interval", "0.2").stdout)
    (found,) = reply["rows"]
    assert (found["model"], found["engine"], found["running"]) == ("demo", "llama_cpp", 0)
    assert reply["seconds"] > 0


def test_the_key_is_sent(closed: str) -> None:
    """A server with a key answers one, from the flag or the environment, with vLLM's names."""
    assert top(closed, "--once").returncode == 1
    assert "the server needs an API key: send one with --api-key" in top(closed, "--once").stderr
    assert "the API key is wrong" in top(closed, "--once", "--api-key", "other").stderr
    assert top(closed, "--once", "--interval", "0.2", "--api-key", "secret").returncode == 0
    done = top(closed, "--once", "--interval", "0.2", LATIMER_API_KEY="secret,other")
    assert "demo" in done.stdout


def test_a_server_that_is_gone_is_an_error() -> None:
    """Without a server the exit code is 1, and one line says why."""
    done = top(f"http://127.0.0.1:{free_port()}", "--once")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert top("127.0.0.1:8000").returncode == 2


def test_a_proxy_is_not_asked_for_a_local_server(server: str) -> None:
    """A proxy in the environment, which reaches other servers, is not between this machine's."""
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), "http://127.0.0.1:9")
    done = top(server, "--once", "--interval", "0.2", "--api-key", "secret", no_proxy="", **proxies)
    assert (done.returncode, done.stderr) == (0, "")
    done = top("http://203.0.113.1:8000", "--once", no_proxy="", **proxies)
    assert "Connection refused" in done.stderr


class Other(BaseHTTPRequestHandler):
    """A server that is not Latimer: its metrics are missing, disabled, or others."""

    answers: ClassVar = {"/a": 404, "/b": 501, "/c": 200}

    def do_GET(self) -> None:
        self.send_response(self.answers[self.path.removesuffix("/metrics")])
        self.end_headers()
        self.wfile.write(b"llamacpp:prompt_tokens_total 3\n\xff")

    @override
    def log_message(self, *_: object) -> None:
        """Write no log."""


def test_another_server_is_no_latimer() -> None:
    """A server without Latimer's metrics is an error that names the address to use."""
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            for path, status in Other.answers.items():
                done = top(f"http://127.0.0.1:{other.server_port}{path}", "--once")
                assert (done.returncode, done.stderr.count("\n")) == (1, 1)
                assert f"does not answer like Latimer (status {status}). Write" in done.stderr
                assert "the address of 'latimer serve', not that of an engine" in done.stderr
                assert ("--no-metrics" in done.stderr) == (status == 404)
        finally:
            other.shutdown()
            thread.join()


def screen(master: int, until: str, seconds: float = 20.0) -> str:
    """Return what a terminal shows, once it has shown a text."""
    shown, end = "", time.monotonic() + seconds
    while until not in shown and time.monotonic() < end:
        if select.select([master], [], [], 0.2)[0]:
            try:
                shown += os.read(master, 65_536).decode()
            except OSError:
                break
    assert until in shown, shown
    return shown


def test_the_screen_is_restored() -> None:
    """The live table shows requests, then STALE and DOWN, and a SIGTERM restores the screen."""
    master, slave = pty.openpty()
    with command() as (process, address):
        live: copies.Latimer[bytes] = copies.Latimer(
            ["latimer", "top", address, "--interval", "0.2"], stdout=slave, stderr=slave
        )
        os.close(slave)
        assert "\x1b[?1049h" in screen(master, "llama_cpp")
        httpx2.post(f"{address}/v1/chat/completions", json=CHAT)
        screen(master, "ms ")
        process.send_signal(signal.SIGTERM)
        screen(master, "STALE")
        screen(master, "DOWN")
    live.send_signal(signal.SIGTERM)
    assert screen(master, "\x1b[?1049l").endswith("\x1b[?25h\x1b[?1049l")
    assert live.wait(10) == 128 + signal.SIGTERM
    os.close(master)
