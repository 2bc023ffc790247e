"""Tests of shutdown: `latimer serve` gives running requests some time, then an error."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from typing import Any

import httpx2
import pytest
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
        assert WAITS.fullmatch(process.stderr.read())
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
