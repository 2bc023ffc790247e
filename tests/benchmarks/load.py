"""Clients that send prebuilt requests, and the times at which they get their answers."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from benchmarks.fake_engine import INTERVAL, LAST

# Seconds over which paced streams start.
RAMP = 2.0
# The starts of the last frame of a response over a WebSocket.
LAST_FRAMES = (b'{"type":"response.completed"', b'{"type":"response.incomplete"')


class Client(asyncio.Protocol):
    """A client that sends requests in a row; a response ends with the last bytes of its body.

    Attributes:
        head: what each response begins with.
    """

    head = b"HTTP/1.1 200 "
    # The number of requests after which it ends, at the latest.
    _most = sys.maxsize

    def __init__(self, request: bytes, end: bytes, seconds: float) -> None:
        self._request = request
        self._end = end
        self._until = time.perf_counter() + seconds
        self._tail = b""
        self._sent = 0.0
        self.latencies: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(self.head):
            self._transport.abort()
            self.done.set_exception(ValueError(f"not a success: {data!r:.500}"))
            return
        self._tail = (self._tail + data)[-64:]
        if not self._tail.endswith(self._end):
            return
        now = time.perf_counter()
        self.latencies.append(now - self._sent)
        self._tail = b""
        if now < self._until and len(self.latencies) < self._most:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the server closed the connection"))


class StreamClient(asyncio.Protocol):
    """A client that reads one paced stream and records the arrival time of each frame."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._last = b""
        self.times: list[float] = []
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.times += [now] * data.count(b" word")
        if LAST in (self._last + data)[-7:] and not self.done.done():
            self.done.set_result(None)
            self._transport.close()
        self._last = data[-8:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def http(path: str, body: dict[str, Any]) -> bytes:
    """Return a request as bytes."""
    data = json.dumps(body).encode()
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    ).encode() + data


def native(prompt: str, _stream: bool, tokens: int) -> bytes:
    """Return a request for the engine itself, which is always streamed."""
    return http("/completion", {"prompt": prompt, "n_predict": tokens, "stream": True})


def chat(prompt: str, stream: bool, tokens: int) -> bytes:
    """Return a chat request."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "fake", "messages": messages, "max_tokens": tokens, "stream": stream}
    return http("/v1/chat/completions", body)


def completion(prompt: str, stream: bool, tokens: int) -> bytes:
    """Return a request for a completion."""
    body = {"model": "fake", "prompt": prompt, "max_tokens": tokens, "stream": stream}
    return http("/v1/completions", body)


async def load(port: int, request: bytes, end: bytes, clients: int, seconds: float) -> list[float]:
    """Return the latencies in seconds of all requests of several clients."""
    loop = asyncio.get_running_loop()
    made: list[Client] = []
    for _ in range(clients):
        client = Client(request, end, seconds)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        made.append(client)
    await asyncio.gather(*(client.done for client in made))
    return [latency for client in made for latency in client.latencies]


async def streams(port: int, request: bytes, count: int) -> list[StreamClient]:
    """Run paced streams concurrently, which start one after the other."""
    loop = asyncio.get_running_loop()
    made: list[StreamClient] = []
    for _ in range(count):
        client = StreamClient(request)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        made.append(client)
        await asyncio.sleep(RAMP / count)
    await asyncio.gather(*(client.done for client in made))
    return made


def quantile(values: list[float], share: float) -> float:
    """Return a quantile in milliseconds."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] * 1000


def pacing(clients: list[StreamClient], tokens: int) -> dict[str, float]:
    """Return the number of frames, of lost ones, and of those later than one whole interval."""
    frames = sum(len(client.times) for client in clients)
    gaps = [b - a for c in clients for a, b in zip(c.times, c.times[1:], strict=False)]
    return {
        "frames": frames,
        "lost": len(clients) * tokens - frames,
        "late": sum(gap > 2 * INTERVAL for gap in gaps),
        "longest_gap_ms": round(max(gaps, default=0.0) * 1000, 1),
    }
