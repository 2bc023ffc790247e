"""HTTP/1.1 servers on raw connections, which can break every rule of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from latimer.backends.http import ConnectionPool, HttpClient

# `FAULT:name` in a prompt is a fault of its generation, `FAULT:name@/path` of another call.
FAULT = re.compile(r"FAULT:([\w./+-]+?)(?:@(/\S+))?(?=\s|$)")


@dataclass
class Request:
    """A request as received."""

    method: str
    path: str
    body: Any
    # The path with its query, and the body, as received.
    target: str = ""
    data: bytes = b""

    @property
    def text(self) -> str:
        """The beginning of the prompt or the content."""
        if not isinstance(self.body, dict):
            return ""
        return str(self.body.get("prompt", self.body.get("content", "")))[:4096]


@dataclass
class Answer:
    """A valid response, which a fault can spoil.

    Args:
        parts: the pieces of the body; the events of a stream.
        streamed: True to send the parts separately, without a length.
        chunked: True to send a streamed body in chunks; else it ends with the connection.
        raw: the whole head as it is sent, instead of one that is made.
        send: how it is sent, `plainly` unless given.
    """

    parts: AsyncGenerator[bytes, None]
    status: int = 200
    kind: bytes = b"application/json; charset=utf-8"
    streamed: bool = False
    chunked: bool = True
    raw: bytes = b""
    send: Send | None = None


class Wire:
    """One connection, for use by faults."""

    def __init__(self, engine: Engine, writer: asyncio.StreamWriter) -> None:
        self.engine = engine
        self._writer = writer
        self.gone = asyncio.Event()
        self.keep = True
        writer.transport.set_write_buffer_limits(high=2**16)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**17)

    async def send(self, data: bytes) -> None:
        """Send bytes, and wait while the peer does not read."""
        for start in range(0, len(data), 2**16):
            piece = data[start : start + 2**16]
            self._writer.write(piece)
            self.engine.sent += len(piece)
            await self._writer.drain()

    def reset(self) -> None:
        """Close with an RST."""
        sock = self._writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.keep = False
        self._writer.transport.abort()

    def end(self) -> None:
        """Close with a FIN."""
        self.keep = False
        self._writer.close()


async def plainly(wire: Wire, answer: Answer) -> None:
    """Send a response without faults."""
    if not answer.streamed:
        body = b"".join([part async for part in answer.parts])
        await wire.send(head(answer, len(body)) + body)
        return
    await wire.send(head(answer))
    async for part in answer.parts:
        await wire.send(framed(answer, part))
    await finish(wire, answer)


async def finish(wire: Wire, answer: Answer) -> None:
    """Send the end of a streamed response."""
    if answer.chunked:
        await wire.send(b"0\r\n\r\n")
    else:
        wire.end()


def head(answer: Answer, length: int | None = None, extra: bytes = b"") -> bytes:
    """Return the head of a response."""
    if answer.raw:
        return answer.raw
    lines = b"HTTP/1.1 %d Reason\r\nServer: fake\r\nContent-Type: %s\r\n" % (
        answer.status,
        answer.kind,
    )
    if length is not None:
        lines += b"Content-Length: %d\r\n" % length
    elif answer.chunked:
        lines += b"Transfer-Encoding: chunked\r\n"
    else:
        lines += b"Connection: close\r\n"
    return lines + extra + b"\r\n"


def framed(answer: Answer, part: bytes) -> bytes:
    """Return a part of a streamed body with its framing."""
    return b"%x\r\n%s\r\n" % (len(part), part) if answer.chunked else part


Send = Callable[[Wire, Answer], Awaitable[None]]


@dataclass
class Engine(ABC):
    """A fake engine with a record of its requests.

    Args:
        faults: the fault of every call to a path, with any body.
        idle: the seconds after which an idle connection is closed.
        sent: the bytes written to connections.
        open: the number of open connections; `most` is its maximum.
        working: the number of running generations.
        left: the times at which clients closed a connection before the response's end.
        aborted: the times at which generations were aborted by key.
        calls: the number of calls by path.
        seen: the prompts of generations, the newest last.
    """

    faults: dict[str, str] = field(default_factory=dict)
    idle: float | None = None
    sent: int = 0
    open: int = 0
    most: int = 0
    working: int = 0
    left: list[float] = field(default_factory=list)
    aborted: list[float] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    seen: list[str] = field(default_factory=list)
    port: int = 0

    # Paths of generations, to which faults in prompts apply.
    generations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], Wire] = {}

    @property
    def url(self) -> str:
        """The address."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before after a stop."""
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, backlog=4096, limit=2**26
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, close: bool = True) -> None:
        """Stop listening, and close connections unless `close` is False."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if close:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def restart(self) -> None:
        """Close every connection and listen again, like a restarted engine."""
        await self.stop()
        await self.start()

    def close_idle(self) -> None:
        """Close every connection."""
        for wire in list(self._tasks.values()):
            wire.reset()

    async def push(self, data: bytes) -> None:
        """Send unrequested bytes on every connection."""
        for wire in list(self._tasks.values()):
            with contextlib.suppress(OSError):
                await wire.send(data)

    @abstractmethod
    async def answer(self, request: Request) -> Answer:
        """Return the valid response to a request."""

    def fault(self, name: str, answer: Answer) -> tuple[Send, Answer]:
        """Return how a fault sends a response, and the response that it makes of the valid one."""
        raise NotImplementedError(name)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        wire = Wire(self, writer)
        self._tasks[task] = wire
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.faults.get("accept") == "reset":
                wire.reset()
            while wire.keep:
                async with asyncio.timeout(self.idle):
                    request = await _read(reader)
                if request is None:
                    break
                await self._serve(request, wire, reader)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            wire.reset()
        finally:
            self.open -= 1
            del self._tasks[task]
            with contextlib.suppress(Exception):
                writer.close()

    async def _serve(self, request: Request, wire: Wire, reader: asyncio.StreamReader) -> None:
        self.calls[request.path] += 1
        generates = request.path in self.generations
        if generates:
            self.seen.append(request.text)
            del self.seen[:-1000]
        name = self.faults.get(request.path) or _named(request, generates)
        self.working += generates
        watch = asyncio.create_task(self._watch(reader, wire))
        work = asyncio.create_task(self._send(request, wire, name))
        try:
            await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.left.append(time.monotonic())
                wire.keep = False
            else:
                work.result()
        finally:
            self.working -= generates
            for task in (watch, work):
                task.cancel()
            await asyncio.gather(watch, work, return_exceptions=True)

    async def _send(self, request: Request, wire: Wire, name: str) -> None:
        answer = await self.answer(request)
        send = answer.send or plainly
        if name:
            send, answer = self.fault(name, answer)
        async with contextlib.aclosing(answer.parts):
            await send(wire, answer)

    async def _watch(self, reader: asyncio.StreamReader, wire: Wire) -> None:
        """Return when the client closes; it never sends a second request before a response."""
        while not reader.at_eof():
            await asyncio.sleep(0.02)
            if reader.exception() is not None:
                break
        wire.gone.set()


def _named(request: Request, generates: bool) -> str:
    for name, path in FAULT.findall(request.text):
        if path == request.path or (generates and not path):
            return str(name)
    return ""


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    lines = data.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    length = next((int(one[15:]) for one in lines if one.lower().startswith("content-length:")), 0)
    data = await reader.readexactly(length)
    body = json.loads(data) if data else None
    return Request(method, target.partition("?")[0], body, target, data)


async def one(data: bytes) -> AsyncGenerator[bytes, None]:
    """Yield a body of one part."""
    yield data


def replied(value: Any, status: int = 200, chunked: bool = True) -> Answer:
    """Return a JSON response."""
    return Answer(one(json.dumps(value).encode()), status, chunked=chunked)


Started = TypeVar("Started", bound=Engine)


@contextmanager
def running(engine: Started) -> Iterator[Started]:
    """Run a fake engine in a thread with its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.start(), loop).result(10)
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


class Peer:
    """A connection on the side of a server that answers byte for byte as a test defines."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self.requests = 0
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """Write data and flush."""
        self.writer.write(data)
        await self.writer.drain()

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nok"


@asynccontextmanager
async def server(
    answer: Callable[[Peer, bytes], Awaitable[None]],
) -> AsyncIterator[tuple[HttpClient, list[Peer]]]:
    """Run a server; yield a client of it and the list of its connections.

    Args:
        answer: called with the connection and the bytes of each request.
    """
    peers: list[Peer] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(len(peers), reader, writer)
        peers.append(peer)
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                length = [h for h in request.split(b"\r\n") if h.lower()[:15] == b"content-length:"]
                if length:
                    request += await reader.readexactly(int(length[0].split(b":")[1]))
                peer.requests += 1
                await answer(peer, request)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/prefix/"
    client = HttpClient(url, {"X-Own": "1"}, ConnectionPool(url, 0.3, 0.3))
    try:
        yield client, peers
    finally:
        await client.aclose()
        listening.close()
        for peer in peers:
            peer.writer.close()


async def ask(client: HttpClient, body: bytes | None = b"{}") -> bytes:
    """Send one request and return the body of its response."""
    async with await client.send("POST", "/x", body) as response:
        assert response.status == 200
        return await response.aread()
