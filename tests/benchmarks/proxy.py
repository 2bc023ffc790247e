"""Measure the overhead of Latimer in front of a llama-server that is never the bottleneck.

    python tests/benchmarks/proxy.py [--seconds 5] [--json FILE]

All measurements run together on one machine. A fake llama-server answers prebuilt bytes, shaped as
the recorded ones. Latimer runs under uvicorn, pinned to one core, and a client on asyncio protocols
runs on another. The floor is an ASGI app on the same server and the same upstream client that
passes bytes through and translates nothing. Three measurements:

* requests per second with 32 clients, the proxy alone on its core, and CPU per request
* the latency of one client, compared with direct access; engine and proxy share a core, so that
  both ways cross between cores equally often
* paced streams of 50 tokens per second, the proxy alone on its core
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from latimer.backends.llama_server.translate import NEUTRAL

TOKENS = 8
PACED_TOKENS = 250
RAMP_SECONDS = 2.0
INTERVAL = 0.02
CLOCK = os.sysconf("SC_CLK_TCK")


def event(number: int) -> bytes:
    """Return a partial event as llama-server sends it."""
    body = {
        "index": 0,
        "content": f" word{number}",
        "tokens": [number],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": number + 1,
        "tokens_evaluated": 12,
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def final(tokens: int) -> bytes:
    """Return the final event, with the fields requested by `response_fields`."""
    recording = Path(__file__).parent.parent / "recordings" / "llama_server" / "limit-stream.json"
    events = json.loads(recording.read_text())["response"]["body"].strip().split("\n\n")
    body = json.loads(events[-1].removeprefix("data: "))
    body["tokens_predicted"] = tokens
    body["model"] = "fake"
    body = {name: body[name] for name in NEUTRAL["response_fields"]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: %s\r\n"
STREAM_HEAD = HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"
BURST = (
    STREAM_HEAD
    + b"".join(chunk(event(i)) for i in range(TOKENS))
    + chunk(final(TOKENS))
    + b"0\r\n\r\n"
)
PACED = [chunk(event(i)) for i in range(PACED_TOKENS)]
PACED_END = chunk(final(PACED_TOKENS)) + b"0\r\n\r\n"
PROPS = json.dumps(
    {
        "default_generation_settings": {"n_ctx": 8192},
        "total_slots": 4,
        "model_alias": "fake",
        "model_path": "fake.gguf",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "bos_token": "",
        "eos_token": "",
        "build_info": "fake",
    }
).encode()


class FakeEngine(asyncio.Protocol):
    """A server of prebuilt bytes; a prompt that contains `paced` gets one event every 20 ms."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if b" /completion" in head[:40]:
            if b"paced" in body:
                self._transport.write(STREAM_HEAD)
                self._pace(0, asyncio.get_running_loop().time())
            else:
                self._transport.write(BURST)
            return
        reply = PROPS if b" /props" in head[:40] else b'{"tokens":[]}'
        length = b"Content-Length: %d\r\n\r\n" % len(reply)
        self._transport.write(HEAD % b"application/json" + length + reply)

    def _pace(self, number: int, start: float) -> None:
        if self._transport.is_closing():
            return
        if number == PACED_TOKENS:
            self._transport.write(PACED_END)
            return
        self._transport.write(PACED[number])
        loop = asyncio.get_running_loop()
        loop.call_at(start + (number + 1) * INTERVAL, self._pace, number + 1, start)


class Client(asyncio.Protocol):
    """A client that sends requests in a row; a response ends with the last bytes of its body."""

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
        self._tail = (self._tail + data)[-64:]
        if not self._tail.endswith(self._end):
            return
        now = time.perf_counter()
        self.latencies.append(now - self._sent)
        self._tail = b""
        if now < self._until:
            self._send()
        else:
            self._transport.close()
            self.done.set_result(None)


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
        if b"0\r\n\r\n" in (self._last + data)[-7:] and not self.done.done():
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


def direct(prompt: str) -> bytes:
    """Return the request for the engine itself."""
    return http("/completion", {"prompt": prompt, "n_predict": TOKENS, "stream": True})


def translated(prompt: str, stream: bool, tokens: int) -> bytes:
    """Return the request for Latimer."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "fake", "messages": messages, "max_tokens": tokens, "stream": stream}
    return http("/v1/chat/completions", body)


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
    """Run paced streams concurrently; the last starts when the first has three fifths left."""
    loop = asyncio.get_running_loop()
    made: list[StreamClient] = []
    for _ in range(count):
        client = StreamClient(request)
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)  # type: ignore[misc]
        made.append(client)
        await asyncio.sleep(RAMP_SECONDS / count)
    await asyncio.gather(*(client.done for client in made))
    return made


def run_engine(port: int, core: int, protocol: type[FakeEngine] = FakeEngine) -> None:
    """Run the fake engine's process."""
    import uvloop

    os.sched_setaffinity(0, {core})

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(protocol, "127.0.0.1", port, backlog=2048)
        await server.serve_forever()

    uvloop.run(main())


def run_latimer(port: int, engine: int, core: int) -> None:
    """Run Latimer as `latimer serve` does, with one worker on one core."""
    from latimer.adapter.cli import main

    os.sched_setaffinity(0, {core})
    main(["serve", f"http://127.0.0.1:{engine}", "--port", str(port)])


def run_floor(port: int, engine: int, core: int) -> None:
    """Run the minimal proxy on this server, which copies bytes without translating them."""
    import uvicorn
    from latimer.backends.http import HttpClient

    os.sched_setaffinity(0, {core})
    upstream = HttpClient(f"http://127.0.0.1:{engine}")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = (await receive())["body"]
        async with await upstream.send("POST", "/completion", body) as reply:
            headers = [(b"content-type", reply.content_type.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in reply.stream:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    uvicorn.run(
        app, host="127.0.0.1", port=port, log_level="error", access_log=False, lifespan="off"
    )


@contextlib.contextmanager
def package_of(tree: Path) -> Iterator[dict[str, str]]:
    """Yield the environment variables of a process that imports `latimer` from a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "latimer"
        package.mkdir()
        for name in ("adapter", "backends", "schemas"):
            (package / name).symlink_to((tree / name).resolve())
        yield {**os.environ, "PYTHONPATH": folder}


@contextlib.contextmanager
def fake_engine(core: int, protocol: type[FakeEngine] = FakeEngine) -> Iterator[int]:
    """Run the fake engine on a core, and this process on the same; yield its port."""
    os.sched_setaffinity(0, {core})
    port = free_port()
    process = multiprocessing.Process(target=run_engine, args=(port, core, protocol), daemon=True)
    process.start()
    wait_for(port)
    yield port
    process.terminate()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    """Wait until a port accepts connections."""
    for _ in range(200):
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise TimeoutError(port)


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK


def quantile(values: list[float], share: float) -> float:
    """Return a quantile in milliseconds."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] * 1000


def pacing(clients: list[StreamClient]) -> dict[str, float]:
    """Return the number of frames, and of those later than one whole interval."""
    frames = sum(len(client.times) for client in clients)
    gaps = [b - a for c in clients for a, b in zip(c.times, c.times[1:], strict=False)]
    late = sum(gap > 2 * INTERVAL for gap in gaps)
    return {
        "streams": len(clients),
        "frames": frames,
        "lost": len(clients) * PACED_TOKENS - frames,
        "late": late,
        "gap_p99_ms": round(quantile(gaps, 0.99), 2),
        "gap_max_ms": round(max(gaps) * 1000, 2),
    }


class Run:
    """The processes of one run, with their ports."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.proxy_core, self.other = cores[0], cores[-1]
        self.ports = {name: free_port() for name in ("direct", "floor", "latimer")}
        context = multiprocessing.get_context("spawn")
        engine = self.ports["direct"]
        self.processes = {
            "direct": context.Process(target=run_engine, args=(engine, self.other)),
            "floor": context.Process(
                target=run_floor, args=(self.ports["floor"], engine, self.proxy_core)
            ),
            "latimer": context.Process(
                target=run_latimer, args=(self.ports["latimer"], engine, self.proxy_core)
            ),
        }

    def __enter__(self) -> Run:
        for name, process in self.processes.items():
            process.start()
            wait_for(self.ports[name])
        os.sched_setaffinity(0, {self.other})
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes.values():
            process.terminate()
            process.join()

    def cpu(self, name: str) -> float:
        """Return the CPU seconds that a process has used."""
        pid = self.processes[name].pid
        assert pid is not None
        return cpu_seconds(pid)

    def move_engine(self, core: int) -> None:
        """Pin the fake engine to another core."""
        pid = self.processes["direct"].pid
        assert pid is not None
        os.sched_setaffinity(pid, {core})


PLAIN = {
    "direct": (direct("hello"), b"0\r\n\r\n"),
    "floor": (direct("hello"), b"0\r\n\r\n"),
    "latimer": (translated("hello", False, TOKENS), b"}"),
}
PACED_REQUESTS = {
    "direct": direct("paced"),
    "floor": direct("paced"),
    "latimer": translated("paced", True, PACED_TOKENS),
}


def throughput(run: Run, name: str, seconds: float) -> dict[str, Any]:
    """Return the requests per second of 32 clients, and the CPU time per request."""
    import uvloop

    request, end = PLAIN[name]
    uvloop.run(load(run.ports[name], request, end, 32, 1.0))
    before, start = run.cpu(name), time.perf_counter()
    latencies = uvloop.run(load(run.ports[name], request, end, 32, seconds))
    elapsed, used = time.perf_counter() - start, run.cpu(name) - before
    return {
        "requests_per_second": round(len(latencies) / elapsed),
        "cpu_us_per_request": round(used / len(latencies) * 1e6),
    }


def added_latency(run: Run, seconds: float) -> dict[str, Any]:
    """Return the milliseconds added to one client's latency: medians of five rounds."""
    import uvloop

    run.move_engine(run.proxy_core)
    rounds = [
        {name: uvloop.run(load(run.ports[name], *PLAIN[name], 1, seconds / 5)) for name in PLAIN}
        for _ in range(5)
    ]
    run.move_engine(run.other)
    figures: dict[str, Any] = {}
    for share, label in ((0.5, "p50"), (0.99, "p99")):
        times = {
            name: statistics.median(quantile(one[name], share) for one in rounds) for name in PLAIN
        }
        figures[f"direct_{label}_ms"] = round(times["direct"], 3)
        for name in ("floor", "latimer"):
            figures[f"{name}_adds_{label}_ms"] = round(times[name] - times["direct"], 3)
    return figures


def paced(run: Run, name: str, count: int) -> dict[str, Any]:
    """Return the figures of concurrent streams of 50 tokens per second."""
    import uvloop

    before = run.cpu(name)
    figures: dict[str, Any] = pacing(
        uvloop.run(streams(run.ports[name], PACED_REQUESTS[name], count))
    )
    used = run.cpu(name) - before
    return {**figures, "cpu_us_per_frame": round(used / figures["frames"] * 1e6, 1)}


def measure(seconds: float, stream_counts: list[int]) -> dict[str, Any]:
    """Run all measurements and return the figures."""
    with Run() as run:
        return {
            "machine": platform.platform(),
            "python": platform.python_version(),
            "throughput": {name: throughput(run, name, seconds) for name in PLAIN},
            "latency": added_latency(run, seconds),
            "paced": {name: [paced(run, name, count) for count in stream_counts] for name in PLAIN},
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments.seconds, arguments.streams)
    text = json.dumps(result, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    sys.stdout.write(text + "\n")
