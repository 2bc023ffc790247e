"""Tests of shutdown: `latimer serve` gives running requests some time, then an error."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import time
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.cli import server
from latimer.adapter.cli.listener import bound
from latimer.adapter.settings import Settings
from support.engines.echo import Echo
from support.loops import lost
from support.servers import begun

WAITS = re.compile(
    r"The playground is at http://\S+\n"
    r"Latimer waits for \d+ requests, at most \d+ s; a second signal stops it\.\n"
)
LONG: dict[str, Any] = {
    "model": "demo", "prompt": "One day,", "max_tokens": 1500, "ignore_eos": True,
}  # fmt: skip


async def replies(address: str, count: int, stop: Any) -> list[httpx2.Response]:
    """Send streams and plain requests, and call `stop` after the first text of a stream."""
    async with httpx2.AsyncClient(timeout=30) as client:
        begun = asyncio.Event()

        async def stream() -> httpx2.Response:
            body = {**LONG, "stream": True}
            async with client.stream("POST", f"{address}/v1/completions", json=body) as reply:
                parts = []
                async for part in reply.aiter_bytes():
                    parts.append(part)
                    begun.set()
            return httpx2.Response(
                reply.status_code, headers=reply.headers, content=b"".join(parts)
            )

        tasks = [asyncio.create_task(stream())]
        await begun.wait()
        url = f"{address}/v1/completions"
        tasks += [asyncio.create_task(client.post(url, json=LONG)) for _ in range(count)]
        tasks += [asyncio.create_task(stream()) for _ in range(count)]
        await asyncio.sleep(0.3)
        stop()
        return list(await asyncio.gather(*tasks))


async def test_requests_that_have_arrived_are_answered() -> None:
    """A SIGTERM cuts no request that waits in the kernel while the server is busy."""
    with begun() as (process, address, _):
        async with httpx2.AsyncClient(timeout=30) as client:
            assert (await client.get(f"{address}/health")).status_code == 200
            process.send_signal(signal.SIGSTOP)
            body = {**LONG, "max_tokens": 1}
            url = f"{address}/v1/completions"
            tasks = [asyncio.create_task(client.post(url, json=body)) for _ in range(90)]
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
            found = await asyncio.gather(*tasks)
        assert [one.status_code for one in found] == [200] * 90


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "new"])
def test_clients_in_a_loop_lose_nothing(keeps: bool) -> None:
    """A SIGTERM leaves no request without an answer, over kept connections and over new ones."""
    with begun() as (process, address, _):
        assert not [*lost(address, keeps, process.terminate)]
        assert process.wait(10) == 0


@pytest.mark.timed
@pytest.mark.parametrize("second", [False, True])
def test_a_proxy_learns_of_the_end_before_the_drain(second: bool) -> None:
    """During --shutdown-delay, `/ready` is a 503, and new connections are served; a second signal
    ends it."""
    delay = 20 if second else 1
    with begun("--shutdown-delay", str(delay)) as (process, address, _):
        assert httpx2.get(f"{address}/ready").status_code == 200
        at = time.monotonic()
        process.terminate()
        time.sleep(0.3)
        found = httpx2.get(f"{address}/ready")
        assert (found.status_code, found.json()["error"]["code"]) == (503, "server_shutting_down")
        assert httpx2.get(f"{address}/v1/models").status_code == 200
        if second:
            process.terminate()
        assert process.wait(10) == 0
        assert second or time.monotonic() - at > 0.9
        assert time.monotonic() - at < 10
        assert process.stderr is not None
        lines = process.stderr.read()
        ends = server.ENDS if second else "Latimer ends; no request runs."
        assert lines.endswith(f"{server.leaves(delay)}\n{ends}\n")


async def test_a_second_signal_leaves_none_without_a_response() -> None:
    """Requests that arrive just before the second signal get a 503, and the server ends at once."""
    with begun() as (process, address, _):
        async with httpx2.AsyncClient(timeout=30) as client:
            url, body = f"{address}/v1/completions", {**LONG, "max_tokens": 1}
            assert (await client.post(url, json=body)).status_code == 200
            process.send_signal(signal.SIGSTOP)
            tasks = [asyncio.create_task(client.post(url, json=body)) for _ in range(90)]
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            found = await asyncio.gather(*tasks)
        assert {one.status_code for one in found} <= {200, 503}
        await asyncio.to_thread(process.wait, server.END - 1)


async def test_the_end_lets_each_request_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose task has not begun at the end of the drain begins, and is then cancelled."""
    monkeypatch.setattr(server, "end_within", lambda _seconds: None)
    served = server.Server(OpenAIAdapter(Echo()), Settings())
    has_begun: list[bool] = []

    async def run() -> None:
        has_begun.append(True)
        await asyncio.sleep(60)

    task = asyncio.create_task(run())
    served.server_state.tasks.add(task)
    served.end()
    await asyncio.wait([task], timeout=5)
    assert has_begun
    assert task.cancelled()


@pytest.mark.timed
@pytest.mark.parametrize(
    ("drain", "signals"),
    [
        ("0", [signal.SIGTERM]),
        ("60", [signal.SIGTERM, signal.SIGTERM]),
        ("60", [signal.SIGINT] * 2),
    ],
    ids=["over", "second SIGTERM", "second Ctrl-C"],
)
async def test_what_still_runs_is_answered(drain: str, signals: list[signal.Signals]) -> None:
    """After the drain or a second signal, each unfinished request gets a 503 or an error event."""
    with begun("--drain", drain, "--parallel", "2") as (process, address, _):
        sent = 0.0

        def stop() -> None:
            nonlocal sent
            for number in signals:
                process.send_signal(number)
                time.sleep(0.05)
            sent = time.monotonic()

        first, *others = await replies(address, 4, stop)
        assert first.status_code == 200
        *_, event, done = first.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "server_shutting_down"
        for reply in others:
            if reply.status_code == 200:
                # A stream that ran concurrently with the first one.
                assert '"code":"server_shutting_down"' in reply.text
                continue
            assert reply.status_code == 503
            assert reply.json()["error"]["type"] == "service_unavailable_error"
            assert reply.headers["connection"] == "close"
            assert "retry-after-ms" in reply.headers
        assert sum(reply.status_code == 503 for reply in others) >= 6
        assert process.stderr is not None
        assert process.wait(10) == 0
        lines, ends = process.stderr.read(), f"{server.ENDS}\n" * (len(signals) - 1)
        assert WAITS.fullmatch(lines.removesuffix(ends))
        assert lines.endswith(ends)
        assert time.monotonic() - sent < 4


async def test_a_reader_that_stopped_does_not_keep_it() -> None:
    """A client that does not read its stream does not block the shutdown."""
    with begun("--drain", "0") as (process, address, _):
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({**LONG, "stream": True, "n": 8, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        writer.write(head.encode() + body)
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10) == 0
        writer.close()


async def test_a_connection_that_nobody_reads_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a drain, the error waits half a second for a client that does not read; a line
    says so, and the request ends without a traceback."""
    monkeypatch.setattr(server, "end_within", lambda _seconds: None)
    ends = []

    async def endless(scope: Any, _receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            await send({"type": "http.response.body", "body": b"the error"})
            ends.append(asyncio.get_running_loop().time())

    sockets = bound("127.0.0.1", 0)
    sockets[0].listen()
    served = server.Server(OpenAIAdapter(Echo()), Settings(drain=0), endless)
    with caplog.at_level(logging.INFO), socket.socket() as client:
        running = asyncio.create_task(served.serve(sockets))
        connections: set[Any] = served.server_state.connections
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(sockets[0].getsockname())
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(10):
            while not any(one.flow.write_paused for one in connections):
                await asyncio.sleep(0.01)
            # The kernel moves the last bytes.
            await asyncio.sleep(0.2)
        begun = asyncio.get_running_loop().time()
        served.should_exit = True
        await running
    assert [0.4 < end - begun < 1.5 for end in ends] == [True]
    assert caplog.messages == [
        "Latimer closed a connection whose client did not read the response."
    ]
