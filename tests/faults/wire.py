"""A raw HTTP/1.1 server that sends faulty responses and records its requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

# `FAULT:name` in a prompt is a fault of its generation, `FAULT:name@/path` of another call.
FAULT = re.compile(r"FAULT:([\w./+-]+?)(?:@(/\S+))?(?=\s|$)")


@dataclass
class Request:
    """A request as received."""

    method: str
    path: str
    body: Any

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
    """

    parts: AsyncGenerator[bytes, None]
    status: int = 200
    kind: bytes = b"application/json; charset=utf-8"
    streamed: bool = False
    chunked: bool = True


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
        sent: the bytes written to connections.
        open: the number of open connections; `most` is its maximum.
        working: the number of running generations.
        left: the times at which clients closed a connection before the response's end.
        aborted: the times at which generations were aborted by key.
        calls: the number of calls by path.
        seen: the prompts of generations, the newest last.
    """

    faults: dict[str, str] = field(default_factory=dict)
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

    @abstractmethod
    def fault(self, name: str, request: Request, answer: Answer) -> tuple[Send, Answer]:
        """Return how a fault sends a response, and the response that it makes of the valid one."""

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
                request = await _read(reader)
                if request is None:
                    break
                await self._serve(request, wire, reader)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
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
        send, answer = self.fault(name, request, answer) if name else (plainly, answer)
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
    method, path, _ = lines[0].split(" ")
    length = next((int(one[15:]) for one in lines if one.lower().startswith("content-length:")), 0)
    body = await reader.readexactly(length)
    return Request(method, path.partition("?")[0], json.loads(body) if body else None)


async def one(data: bytes) -> AsyncGenerator[bytes, None]:
    """Yield a body of one part."""
    yield data


def replied(value: Any, status: int = 200) -> Answer:
    """Return a JSON response."""
    return Answer(one(json.dumps(value).encode()), status)
