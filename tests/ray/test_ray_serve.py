"""Tests of Latimer on a local Ray with two replicas, with figures."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import psycopg
import pytest
from support.ray_server import (
    LONG,
    QUESTION,
    cpu_seconds,
    is_idle,
    leave,
    note,
    processes,
    replicas,
    running,
    session_of_each,
    until,
)

pytestmark = pytest.mark.timeout(200)

# How often the proxy may ask its router in 2 s while requests wait.
MOST_QUESTIONS = 60


def events(url: str, body: dict[str, Any], **headers: str) -> list[str]:
    """Return the data of a stream's events."""
    request = {"json": {**body, "stream": True}, "headers": headers, "timeout": 120}
    with httpx2.stream("POST", url, **request) as response:
        assert response.status_code == 200
        return [
            line.removeprefix("data: ")
            for line in response.iter_lines()
            if line.startswith("data: ")
        ]


def without_ids(data: list[str]) -> list[Any]:
    """Return events without what differs between two requests."""
    found = [json.loads(one) for one in data[:-1]]
    return [{**one, "id": "", "created": 0} for one in found] + [data[-1]]


def test_streams_are_equal(url: str, plain: str) -> None:
    """A stream through Ray has the events of one from a plain server."""
    for path, body in (
        ("/chat/completions", QUESTION),
        ("/completions", {"model": "demo", "prompt": "One two", "temperature": 0, "logprobs": 2}),
    ):
        ray, own = (events(f"{base}{path}", body) for base in (url, plain))
        assert ray[-1] == "[DONE]"
        assert without_ids(ray) == without_ids(own)


def test_one_request_id(url: str) -> None:
    """A response has one id, which is the client's if it sent one."""
    for sent in ({}, {"x-request-id": "mine-1"}):
        response = httpx2.post(f"{url}/chat/completions", json=QUESTION, headers=sent, timeout=30)
        ids = response.headers.get_list("x-request-id")
        assert len(ids) == 1
        assert not sent or ids == ["mine-1"]


@pytest.mark.parametrize("phase", ["before the first token", "stream", "plain"])
def test_disconnect_frees_the_slot(url: str, phase: str) -> None:
    """A client that disconnects ends the generation within 1.5 s, and the next one is served."""
    sessions = [*session_of_each(url).values()]
    until(lambda: is_idle(url, sessions), 20)
    body = {**LONG, "stream": phase == "stream"}
    leave(f"{url}/completions", body, 0.1 if phase.startswith("before") else 1.0)
    took = until(lambda: is_idle(url, sessions), 10)
    note(f"idle after a disconnect, {phase}: {took:.2f} s (0.2 s of it to measure)")
    assert took < 1.5
    for _ in range(4):
        reply = httpx2.post(f"{url}/chat/completions", json=QUESTION, timeout=30)
        assert reply.status_code == 200, reply.text


def test_no_error_follows_a_client_that_left(url: str) -> None:
    """After each of 20 clients that left a plain request, the next ones are served."""
    sessions = [*session_of_each(url).values()]
    for number in range(20):
        leave(f"{url}/completions", LONG, 0.05 + 0.05 * (number % 5))
        for _ in range(2):
            reply = httpx2.post(f"{url}/chat/completions", json=QUESTION, timeout=30)
            assert reply.status_code == 200, reply.text
    until(lambda: is_idle(url, sessions), 20)


def test_waiting_requests_cost_nothing(url: str, questions: Path) -> None:
    """Requests beyond what the replicas take wait in the proxy, which asks its router rarely.

    How often it asks depends on pauses, and not on how fast the machine is.
    """
    sessions = [*session_of_each(url).values()]
    until(lambda: is_idle(url, sessions), 20)
    body = {**LONG, "n": 1}
    (proxy,) = processes("ray::ProxyActor")
    first = questions.stat().st_size
    with ThreadPoolExecutor(80) as pool:
        for _ in range(80):
            pool.submit(leave, f"{url}/completions", body, 15)
        # The router is asked once for each request, and again for those that wait.
        until(lambda: questions.stat().st_size - first > 100, 12)
        asked, before = questions.stat().st_size, cpu_seconds(proxy)
        time.sleep(2)
        asked, used = questions.stat().st_size - asked, cpu_seconds(proxy) - before
    until(lambda: is_idle(url, sessions), 30)
    note(
        f"16 requests wait in the proxy: in 2 s it asks its router {asked} times, and uses "
        f"{used:.2f} s of processor time"
    )
    # Each of at most four tasks asks twice a second; without pauses it is hundreds of times.
    assert 0 < asked <= MOST_QUESTIONS


@pytest.mark.parametrize("header", ["x-session-id", "x-session-affinity"])
def test_sessions_stay(url: str, header: str) -> None:
    """The requests of a session reach one replica, and two sessions can use both."""
    assert set(session_of_each(url, header)) == replicas()


def test_a_wrong_key_is_rejected(url: str) -> None:
    """An application with an API key rejects requests without it, in OpenAI's words."""
    scaled = url.replace("/v1", "/scaled/v1")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=scaled, api_key="wrong").models.list()
    models = openai.OpenAI(base_url=scaled, api_key="secret").models.list()
    assert [one.id for one in models] == ["scaled"]


def test_overhead(url: str, plain: str) -> None:
    """The cost of Ray for a request and a token is measured against a plain server."""
    short = {"model": "demo", "prompt": "One", "max_tokens": 1, "temperature": 0}
    long = {**short, "max_tokens": 400, "ignore_eos": True}
    two_hops = url.replace("/v1", "/two-hops/v1")
    bases = {"plain": plain, "Ray": url, "two hops of Ray": two_hops}
    until(lambda: httpx2.get(f"{two_hops}/models", timeout=10).status_code == 200, 60)
    requests: dict[str, list[float]] = {base: [] for base in bases.values()}
    streams: dict[str, list[float]] = {base: [] for base in bases.values()}
    with httpx2.Client(timeout=60) as client:
        for round_ in range(25):
            for base in bases.values():
                begun = time.perf_counter()
                assert client.post(f"{base}/completions", json=short).status_code == 200
                requests[base].append(time.perf_counter() - begun)
                if round_ < 5:
                    begun = time.perf_counter()
                    assert len(events(f"{base}/completions", long)) > 300
                    streams[base].append(time.perf_counter() - begun)
    for name, base in bases.items():
        note(
            f"{name}, medians: request of one token {statistics.median(requests[base]) * 1e3:.1f} "
            f"ms, streamed token {statistics.median(streams[base]) * 1e6 / 400:.0f} us"
        )


def test_scale(url: str) -> None:
    """Replicas go from one to three under load and back, and no request fails."""
    scaled = url.replace("/v1", "/scaled/v1")
    assert len(replicas("scaled")) == 1
    body = {**QUESTION, "model": "scaled", "n": 8, "temperature": 1}
    over = threading.Event()
    counts = []

    def load() -> int:
        count = 0
        while not over.is_set():
            data = events(f"{scaled}/chat/completions", body, authorization="Bearer secret")
            assert data[-1] == "[DONE]"
            count += 1
        return count

    with ThreadPoolExecutor(10) as pool:
        jobs = [pool.submit(load) for _ in range(10)]
        try:
            up = until(lambda: len(replicas("scaled")) == 3, 60)
            time.sleep(3)
        finally:
            over.set()
        counts = [job.result() for job in jobs]
        down = until(lambda: len(replicas("scaled")) == 1, 60)
    note(
        f"scale 1 to 3 in {up:.0f} s, 3 to 1 in {down:.0f} s; {sum(counts)} of {sum(counts)} "
        "streams complete"
    )


class Reader:
    """A client that reads a stream.

    Attributes:
        begun: set when the first event was read.
        last: the data of the last event.
        broken: the error that ended the stream, or None.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.last = ""
        self.broken: httpx2.HTTPError | None = None

    def read(self, url: str, body: dict[str, Any], session: str) -> None:
        """Read a stream of completions to its end."""
        headers = {"x-session-id": session}
        request = {"json": {**body, "stream": True}, "headers": headers, "timeout": 120}
        try:
            with httpx2.stream("POST", f"{url}/completions", **request) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.last = line.removeprefix("data: ")
                        self.begun.set()
        except httpx2.HTTPError as error:
            self.broken = error


def five_in_a_row(url: str, sessions: Sequence[str]) -> tuple[float, list[str]]:
    """Send requests of these sessions until five in a row succeed; return seconds and failures."""
    begun = time.monotonic()
    failures: list[str] = []
    in_a_row = 0
    while in_a_row < 5:
        headers = {"x-session-id": sessions[in_a_row % len(sessions)]}
        reply = httpx2.post(f"{url}/chat/completions", json=QUESTION, headers=headers, timeout=30)
        in_a_row = in_a_row + 1 if reply.status_code == 200 else 0
        if reply.status_code != 200:
            failures.append(f"{reply.status_code} {reply.text[:200]!r}")
            assert (reply.status_code, reply.headers.get("retry-after")) == (503, "1"), failures
        assert time.monotonic() - begun < 15, failures
    return time.monotonic() - begun, failures


def test_killed_replica(url: str) -> None:
    """A stream of the other replica ends whole, and requests are served within 15 s, without a 500.

    The killed replica's stream is cut. A request without a byte gets a 503, after which OpenAI's
    client sends it again.
    """
    (victim, one), (_, other) = session_of_each(url).items()
    until(lambda: is_idle(url, (one, other)), 60)
    body = {**LONG, "n": 1}
    named = {"x-session-id": one}
    client = openai.OpenAI(base_url=url, api_key="none", default_headers=named)
    cut, whole = Reader(), Reader()
    with ThreadPoolExecutor(5) as pool:
        streams = [
            pool.submit(reader.read, url, body, session)
            for reader, session in ((cut, one), (whole, other))
        ]
        plain = pool.submit(httpx2.post, f"{url}/completions", json=body, headers=named, timeout=60)
        again = pool.submit(
            client.completions.create,
            model="demo", prompt="One", max_tokens=300, extra_body={"ignore_eos": True},
        )  # fmt: skip
        assert cut.begun.wait(30)
        assert whole.begun.wait(30)
        until(lambda: running(url, one) == 3, 30)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        back = pool.submit(until, lambda: len(replicas() - {victim}) == 2, 60)
        lost = plain.result()
        told = time.monotonic() - killed
        took, failures = five_in_a_row(url, (one, other))
        for stream in streams:
            stream.result()
        usage = again.result().usage
    assert (whole.last, whole.broken) == ("[DONE]", None)
    assert cut.last != "[DONE]"
    assert cut.broken is not None
    assert (lost.status_code, lost.headers.get("retry-after")) == (503, "1"), lost.text
    assert lost.json()["error"]["code"] == "replica_ended"
    assert usage is not None
    assert usage.completion_tokens == 300
    note(
        f"killed replica: a 503 for a request without a byte after {told:.1f} s; then five "
        f"requests in a row served after {took:.1f} s, failures {failures}; its stream ends with "
        f"{cut.broken!r}; the next process after {back.result():.0f} s"
    )


def test_drain(url: str, served: tuple[str, subprocess.Popen[bytes]], database: str) -> None:
    """SIGTERM to the driver lets streams and responses in the background end; the last test."""
    with ThreadPoolExecutor(1) as pool:
        body = {**LONG, "n": 1}
        work = {"model": "demo", "input": "One", "background": True, "ignore_eos": True}
        made = httpx2.post(f"{url}/responses", json={**work, "max_output_tokens": 1500}).json()
        stream = pool.submit(events, f"{url}/completions", body)
        time.sleep(1)
        assert not stream.done()
        begun = time.monotonic()
        served[1].send_signal(signal.SIGTERM)
        assert stream.result()[-1] == "[DONE]"
        streamed = time.monotonic() - begun
    assert served[1].wait(90) == 0
    note(
        f"drain: the stream ended {streamed:.1f} s after SIGTERM, and all processes "
        f"{time.monotonic() - begun:.1f} s after it"
    )
    assert not replicas()
    if database:
        with psycopg.connect(database) as connection:
            query = "SELECT reply FROM latimer_objects WHERE id = %s"
            row = connection.execute(query, [made["id"]]).fetchone()
        assert row is not None
        assert json.loads(row[0])["status"] == "incomplete"
