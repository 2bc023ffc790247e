"""Tests of the number of Python calls that a request and a token take."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
import uvicorn
from benchmarks import calls
from latimer.adapter.cli.protocol import Protocol
from latimer.adapter.cli.sockets import SocketProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode

# More calls than these make every request or every token slower.
MOST = {
    "chat": 81,
    "chat, token": 5,
    "chat, token in a burst": 0,
    "chat, token of a plain response": 1,
    "completion": 56,
    "completion, token": 5,
    "completion, token in a burst": 0,
    "completion, token of a plain response": 1,
    # At most 1.1 times those of chat.
    "messages": 88,
    "messages, token": 5,
    "messages, token in a burst": 0,
    "messages, token of a plain response": 1,
    "streamed response": 114,
    "streamed response, token": 5,
    "streamed response, token in a burst": 0,
    # At most 15 more than the request by POST.
    "response over a WebSocket": 128,
    "response over a WebSocket, token": 5,
    "response over a WebSocket, token in a burst": 0,
    "over llama-server: chat": 119,
    "over llama-server: chat, token": 4,
    "over llama-server: chat, token in a burst": 0,
    "over llama-server: chat, token of a plain response": 1,
    "over llama-server: completion": 101,
    "over llama-server: completion, token": 4,
    "over llama-server: completion, token in a burst": 0,
    "over llama-server: completion, token of a plain response": 1,
    "over llama-server: messages": 127,
    "over llama-server: messages, token": 4,
    "over llama-server: messages, token in a burst": 0,
    "over llama-server: messages, token of a plain response": 1,
    # Metrics, the log, and spans without an SDK; what they do after a request counts too.
    "observed, over llama-server: chat": 130,
    "observed, over llama-server: chat, token": 4,
    "observed, over llama-server: chat, token in a burst": 0,
    "observed, over llama-server: chat, token of a plain response": 1,
    "observed, over llama-server: completion": 112,
    "observed, over llama-server: completion, token": 4,
    "observed, over llama-server: completion, token in a burst": 0,
    "observed, over llama-server: completion, token of a plain response": 1,
    "over a pool of one: chat": 133,
    "over a pool of one: chat, token": 4,
    "over a pool of one: chat, token in a burst": 0,
    "over a pool of one: completion": 115,
    "over a pool of one: completion, token": 4,
    "over a pool of one: completion, token in a burst": 0,
    "over a pool of four, with limits: chat": 145,
    "over a pool of four, with limits: chat, token": 4,
    "over a pool of four, with limits: chat, token in a burst": 0,
    "over a pool of four, with limits: completion": 127,
    "over a pool of four, with limits: completion, token": 4,
    "over a pool of four, with limits: completion, token in a burst": 0,
    "over a pool of one: chat, token of a plain response": 1,
    "over a pool of one: completion, token of a plain response": 1,
    "over a pool of four, with limits: chat, token of a plain response": 1,
    "over a pool of four, with limits: completion, token of a plain response": 1,
}


# The APIs that may take at most a tenth more than another one, and that one.
LIKE = {
    "messages": "chat",
    "over llama-server: messages": "over llama-server: chat",
}
# The calls for a frame and its turn, which were a tenth of a POST with 150; uvicorn's calls for a
# POST, which are not counted, take as long.
FRAME = 15


@pytest.fixture(scope="module")
def measured() -> dict[str, Counter[str]]:
    """Return the calls for each kind of request, by function."""
    return calls.measure()


@pytest.fixture(scope="module")
def counted(measured: dict[str, Counter[str]]) -> dict[str, int]:
    """Return the number of calls for each kind of request."""
    return calls.numbers(measured)


@pytest.mark.parametrize("name", MOST)
def test_calls_have_a_limit(
    measured: dict[str, Counter[str]], counted: dict[str, int], name: str
) -> None:
    """A request, and each token of its stream, takes at most as many Python calls as before."""
    assert counted[name] <= MOST[name], (
        f"{counted[name]} calls. A generator expression is one for each of its items, and before "
        "Python 3.12 a comprehension is one. `python tests/benchmarks/calls.py --list "
        f"'{name}'` prints this list, also in an earlier checkout:\n{calls.listed(measured[name])}"
    )


@pytest.mark.parametrize("end", ["", ", token", ", token in a burst"])
@pytest.mark.parametrize("name", LIKE)
def test_another_api_takes_hardly_more(counted: dict[str, int], name: str, end: str) -> None:
    """A request and a token of the other APIs take at most a tenth more calls than of the first."""
    assert counted[name + end] <= 1.1 * counted[LIKE[name] + end]


@pytest.mark.parametrize(("end", "more"), [("", FRAME), (", token", 0), (", token in a burst", 0)])
def test_a_frame_takes_hardly_more(counted: dict[str, int], end: str, more: int) -> None:
    """A response and a token over a WebSocket take hardly more calls than by POST."""
    assert counted[f"response over a WebSocket{end}"] <= counted[f"streamed response{end}"] + more


def test_every_kind_has_a_limit(counted: dict[str, int]) -> None:
    """Each number that the benchmark prints has a limit."""
    assert counted.keys() == MOST.keys()


class Memory(asyncio.Transport):
    """The transport of a connection in memory, which notes the end of an answer."""

    def __init__(self, ends: tuple[bytes, ...]) -> None:
        super().__init__()
        self._ends = ends
        self.protocol: Any = None
        self.ended = asyncio.Event()

    def write(self, data: Any) -> None:
        """Note the end."""
        if any(end in data for end in self._ends):
            self.ended.set()

    def is_closing(self) -> bool:
        """Return False: nobody disconnects."""
        return False

    def close(self) -> None:
        """Do nothing: `fewest` ends the connection."""

    def set_protocol(self, protocol: Any) -> None:
        """Let another protocol take what arrives."""
        self.protocol = protocol


async def fewest(protocol: Any, sent: bytes, *ends: bytes, opening: bytes = b"") -> int:
    """Return the fewest calls for a request and its answer, with those of the server."""
    transport = Memory(ends)
    protocol.connection_made(transport)
    transport.protocol = protocol
    if opening:
        protocol.data_received(opening)
        while not protocol.handshake_complete:
            await asyncio.sleep(0.01)
    found = []
    for _ in range(20):
        transport.ended.clear()
        with calls.Profile() as profile:
            transport.protocol.data_received(sent)
            await asyncio.wait_for(transport.ended.wait(), 5)
            # The task of the request ends, too.
            await asyncio.sleep(0.002)
        found.append(profile.counted().total())
    transport.protocol.connection_lost(None)
    await asyncio.gather(*protocol.tasks)
    return min(found)


async def test_a_frame_takes_hardly_more_in_a_server() -> None:
    """With the server's calls, a response takes hardly more than a chat, by POST or a frame."""
    config = uvicorn.Config(calls.prepared(True), http=Protocol, ws="none", log_config=None)
    config.load()
    body: dict[str, Any] = {"model": "m", "max_output_tokens": 8, "input": "Hello"}
    asked = {"model": "m", "max_tokens": 8, "stream": True,
             "messages": [{"role": "user", "content": "Hello"}]}  # fmt: skip
    last = b"0\r\n\r\n"

    def http() -> Protocol:
        return Protocol(config, ServerState(), {})

    chat = await fewest(http(), post("/v1/chat/completions", asked), last)
    posted = await fewest(http(), post("/v1/responses", {**body, "stream": True}), last)
    frame = Frame(Opcode.TEXT, json.dumps({"type": "response.create", **body}).encode())
    framed = await fewest(
        SocketProtocol(config, ServerState(), {}, closed=lambda: None),
        frame.serialize(mask=True),
        b'"type":"response.completed"',
        b'"type":"response.incomplete"',
        opening=HANDSHAKE,
    )
    assert posted <= 1.1 * chat
    assert framed <= 1.1 * posted


def post(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    head = "POST {} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}"
    return head.format(path, len(data)).encode() + b"\r\n\r\n" + data


HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
