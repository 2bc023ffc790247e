"""A fake llama-server that is never the bottleneck: it sends prebuilt bytes.

The bytes have the shape of recorded ones. A request gets as many tokens as it asks for, all at
once, or one every 20 ms if its body contains `paced`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from latimer.backends.llama_server.translate import NEUTRAL

TOKENS = 8
# Seconds between two tokens of a paced stream.
INTERVAL = 0.02
# The number of tokens in a request: llama-server's field, and OpenAI's.
_COUNT = re.compile(rb'"(?:n_predict|max_tokens)": ?(\d+)')


def compact(value: Any) -> bytes:
    """Return JSON as llama-server writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


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
    return b"data: " + compact(body) + b"\n\n"


def final(tokens: int) -> bytes:
    """Return the final event, with the fields requested by `response_fields`."""
    recording = Path(__file__).parent.parent / "recordings" / "llama_server" / "limit-stream.json"
    events = json.loads(recording.read_text())["response"]["body"].strip().split("\n\n")
    body = json.loads(events[-1].removeprefix("data: "))
    body["tokens_predicted"] = tokens
    body["model"] = "fake"
    body = {name: body[name] for name in NEUTRAL["response_fields"]}
    return b"data: " + compact(body) + b"\n\n"


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: %s\r\n"
STREAM_HEAD = HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
PROPS = json.dumps(
    {
        "default_generation_settings": {"n_ctx": 8192},
        # More than the paced streams: Latimer lets requests beyond the slots wait.
        "total_slots": 1024,
        "model_alias": "fake",
        "model_path": "fake.gguf",
        "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "bos_token": "",
        "eos_token": "",
        "build_info": "fake",
    }
).encode()


@cache
def native(count: int) -> list[bytes]:
    """Return the parts of an answer of `/completion`: its head, its tokens, its end."""
    return [
        STREAM_HEAD,
        *(chunk(event(number)) for number in range(count)),
        chunk(final(count)) + LAST,
    ]


@cache
def openai(count: int) -> list[bytes]:
    """Return the parts of a streamed answer of llama-server's `/v1/chat/completions`."""
    head = {
        "id": "chatcmpl-fake", "object": "chat.completion.chunk", "created": 0, "model": "fake",
    }  # fmt: skip
    deltas: list[Any] = [({"content": f" word{number}"}, None) for number in range(count)]
    frames = [
        b"data: "
        + compact({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
        + b"\n\n"
        for delta, reason in [({"role": "assistant", "content": ""}, None), *deltas, ({}, "length")]
    ]
    return [
        STREAM_HEAD + chunk(frames[0]),
        *map(chunk, frames[1:-1]),
        chunk(frames[-1] + b"data: [DONE]\n\n") + LAST,
    ]


@cache
def whole(count: int) -> bytes:
    """Return a plain answer of llama-server's `/v1/chat/completions`."""
    text = "".join(f" word{number}" for number in range(count))
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count}
    reply = {
        "id": "chatcmpl-fake", "object": "chat.completion", "created": 0, "model": "fake",
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}], "usage": usage,
    }  # fmt: skip
    return json_response(compact(reply))


def json_response(body: bytes) -> bytes:
    """Return a response with a JSON body."""
    return HEAD % b"application/json" + b"Content-Length: %d\r\n\r\n" % len(body) + body


class FakeEngine(asyncio.Protocol):
    """One connection of the server."""

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
        path = head[:40]
        if b" /completion" in path:
            self._send(native(_count(body)), body)
        elif b" /v1/chat/completions" not in path:
            self._transport.write(json_response(PROPS if b" /props" in path else b'{"tokens":[]}'))
        elif b'"stream":true' in body.replace(b" ", b""):
            self._send(openai(_count(body)), body)
        else:
            self._transport.write(whole(_count(body)))

    def _send(self, parts: list[bytes], body: bytes) -> None:
        if b"paced" in body:
            self._pace(parts, 0, asyncio.get_running_loop().time())
        else:
            self._transport.write(b"".join(parts))

    def _pace(self, parts: list[bytes], number: int, start: float) -> None:
        """Send the head, and then one part in each interval."""
        if self._transport.is_closing():
            return
        self._transport.write(parts[number])
        if number + 1 < len(parts):
            loop = asyncio.get_running_loop()
            loop.call_at(start + (number + 1) * INTERVAL, self._pace, parts, number + 1, start)


def _count(body: bytes) -> int:
    match = _COUNT.search(body)
    return int(match[1]) if match else TOKENS


def run_engine(port: int, core: int | None = None, protocol: type[FakeEngine] = FakeEngine) -> None:
    """Run the fake engine's process."""
    import uvloop

    if core is not None:
        os.sched_setaffinity(0, {core})

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", port), backlog=2048) as listening:
            # libuv accepts one connection of each in a turn of the event loop.
            for _ in range(64):
                await loop.create_server(protocol, sock=listening.dup())
            await asyncio.Event().wait()

    uvloop.run(main())


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


def wait_for(port: int, seconds: float = 30.0) -> None:
    """Wait until a port accepts connections."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.002)
    raise TimeoutError(port)


if __name__ == "__main__":
    run_engine(int(sys.argv[1]))
