"""Tests of the messages about servers of other kinds, and about slow, silent and busy ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner
from latimer.conformance import discovery, runner
from latimer.conformance.check import all_checks
from latimer.conformance.command import conform
from latimer.conformance.target import Api
from suite.server import Server
from support.servers import serving

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]}
LIMITED = {"error": {"message": "Slow down.", "type": "rate_limit", "param": None, "code": None}}


def answering(status: int, kind: str, body: bytes, **more: str) -> Callable[[], Any]:
    """Return a server that gives every request one answer."""
    headers = {"content-type": kind, **{name.replace("_", "-"): more[name] for name in more}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await reply(send, status, body, headers)

    return lambda: app


async def reply(send: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
    """Send a whole reply."""
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


HTML = b"<!doctype html><title>Dashboard</title>"
JSON = "application/json"


@pytest.mark.parametrize(
    ("make", "arguments", "says"),
    [
        (answering(200, "text/html", HTML), [], "is a web page (status 200, text/html)"),
        (answering(200, "text/html", HTML), ["--model", "m"], "Check the port"),
        (answering(404, "text/html", HTML), [], "is a web page (status 404, text/html)"),
        (answering(401, JSON, b"{}"), [], "needs a key. Send one with --api-key"),
        (answering(401, JSON, b"{}"), ["--api-key", "k"], "rejects the key: status 401"),
        (answering(429, JSON, b"{}", retry_after="20"), [], "Try again after 20 s."),
        (answering(503, JSON, b'{"error": "Loading"}'), [], "is not ready: status 503"),
        (answering(404, JSON, b"{}"), [], "has neither /models nor /v1/models"),
        (answering(200, JSON, b'{"data": []}'), [], "lists no model"),
    ],
)
def test_a_server_that_is_no_api_is_named(
    make: Callable[[], Any], arguments: list[str], says: str
) -> None:
    """A reply without a list of models is described, and no check runs."""
    with serving(make) as address:
        done = CliRunner().invoke(conform, [address, *arguments], env={"OPENAI_API_KEY": ""})
    assert (done.exit_code, says in done.output) == (2, True), done.output


def test_http_is_no_https() -> None:
    """An address with https:// of a server without TLS is described."""
    with serving(Server) as address:
        done = CliRunner().invoke(conform, [address.replace("http:", "https:")])
    assert "does not speak TLS. Use http://" in done.output


def test_a_server_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts connections only is described after a time limit."""
    monkeypatch.setattr(discovery, "LISTED", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done = CliRunner().invoke(conform, [f"http://127.0.0.1:{port}/v1"])
    assert done.exit_code == 2
    assert "accepts connections, but does not answer within 0.2 s" in done.output


def test_a_server_may_start_late() -> None:
    """With `--wait`, a server that refuses connections at first is judged later."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    late = contextlib.ExitStack()

    def start() -> None:
        time.sleep(0.2)
        late.enter_context(serving(Server, port=port))

    thread = threading.Thread(target=start)
    thread.start()
    url = f"http://127.0.0.1:{port}/v1"
    with late:
        done = CliRunner().invoke(conform, [url, "--wait", "20", "--only", "models.list"])
        thread.join()
    assert done.exit_code == 0, done.output


class Hanging:
    """A server that lists its models, and answers nothing else, or nothing at all after a while.

    Args:
        answers: the number of requests that get an answer.
    """

    def __init__(self, answers: float) -> None:
        self.left = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.left -= 1
        if scope["path"].endswith("/models") and self.left >= 0:
            await reply(send, 200, json.dumps(MODELS).encode(), {"content-type": JSON})
        elif self.left >= 0:
            await reply(send, 404, json.dumps(LIMITED).encode(), {"content-type": JSON})
        else:
            while (await receive())["type"] != "http.disconnect":
                pass


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limits of servers that hang."""
    monkeypatch.setattr(discovery, "GENERATED", 0.3)
    monkeypatch.setattr(runner, "HANGS", 0.3)
    once = runner._once

    async def short(check: Any, api: Any, patience: float) -> Any:
        return await once(check, api, 0.3 / check.seconds)

    monkeypatch.setattr(runner, "_once", short)


@pytest.mark.usefixtures("hasty")
def test_a_run_ends_if_its_server_hangs() -> None:
    """If a server answers nothing more, the run ends, and names the checks that ran."""
    with serving(lambda: Hanging(12)) as address:
        done = CliRunner().invoke(conform, [f"{address}/v1", "--group", "chat"])
    assert done.exit_code == 4, done.output
    assert "did not end: the server does not answer GET /models" in done.output
    assert "(while these ran: chat." in done.output


def test_a_rate_limit_is_waited_for() -> None:
    """A request that is rejected with 429 and `retry-after` comes again, and is counted."""
    count = 0

    def limited() -> Any:
        server = Server()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            nonlocal count
            if scope["type"] == "http" and scope["method"] == "POST":
                count += 1
                if count % 3 == 0:
                    headers = {"content-type": JSON, "retry-after-ms": "20"}
                    await reply(send, 429, json.dumps(LIMITED).encode(), headers)
                    return
            await server(scope, receive, send)

        return app

    with serving(limited) as address:
        done = CliRunner().invoke(conform, [f"{address}/v1", "--group", "completions"])
    assert done.exit_code == 0, done.output
    assert "The server limits their rate. --at-once 1 sends fewer at a time." in done.output


def test_a_proxy_is_not_asked_for_a_local_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy in the environment is for other machines only, and a wrong one is an error of use."""
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(Server) as address:
        done = CliRunner().invoke(conform, [f"{address}/v1", "--only", "models.list"])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("ALL_PROXY", "a:b:c")
    done = CliRunner().invoke(conform, ["http://203.0.113.1/v1", "--only", "models.list"])
    assert done.exit_code == 2
    assert "a proxy or certificates in the environment: Invalid port" in done.output


def test_https_has_its_own_port() -> None:
    """Checks over bare sockets use port 443 if an address with https:// names none."""
    client = httpx2.AsyncClient(base_url="https://gateway.example/v1/")
    assert Api(client, "m").address == ("gateway.example", 443, "/v1")


async def _one_by_one(scope: Any, receive: Any, send: Any) -> None:
    """Transcribe one recording after the other, each in a tenth of a second."""
    body: dict[str, Any] = {"text": "The cat."}
    if "transcriptions" in scope["path"]:
        async with TURN:
            await asyncio.sleep(0.1)
    else:
        body = {"choices": [{}]}
    await reply(send, 200, json.dumps(body).encode(), {"content-type": JSON})


TURN = asyncio.Semaphore()


async def test_a_wait_for_a_turn_is_no_delay() -> None:
    """Eight transcriptions at once on a server that does one at a time: none is too late."""
    (check,) = [one for one in all_checks() if one.id == "audio.same-twice"]
    checks = [replace(check, id=f"audio.{number}", seconds=0.5) for number in range(8)]
    with serving(lambda: _one_by_one) as address:
        verdicts = await runner.judge(runner.Settings(f"{address}/v1", "m"), checks)
    assert [one.outcome for one in verdicts] == ["pass"] * 8, verdicts[-1].detail
    # The last one has waited for more than its limit.
    assert max(one.seconds for one in verdicts) > 0.5
