"""A client on a raw connection, and the replies that it reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LIMIT = 2**26


@dataclass
class Reply:
    """A reply as received.

    Args:
        status: the status, or 0 without a reply.
        problem: why the reply is incomplete: `refused`, `cut`, `silent`; empty otherwise.
        wanted: the completion that the request asks for, if known.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    problem: str = ""
    wanted: str | None = None

    def json(self) -> Any:
        """Return the body as JSON, or None if it is not valid."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def streamed(self) -> bool:
        """True if the reply is an event stream."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def events(self) -> list[str]:
        """Return the data of a stream's events."""
        lines = self.body.decode(errors="replace").split("\n")
        return [line[6:] for line in lines if line.startswith("data: ")]

    def chunks(self) -> list[Any]:
        """Return the events as JSON."""
        return [json.loads(event) for event in self.events() if event != "[DONE]"]

    def __str__(self) -> str:
        start = self.body[:300].decode(errors="replace")
        return f"{self.status} {self.problem} after {self.seconds:.2f} s: {start}".replace(
            "\n", " "
        )


def encoded(
    path: str,
    body: Any = None,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    keep: bool = False,
) -> bytes:
    """Return a request's bytes; a body of bytes is sent unchanged."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""
    lines = {"Host": "localhost", "Connection": "keep-alive" if keep else "close"}
    if method == "POST":
        lines |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    lines |= headers or {}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode() + data


class Client:
    """A connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def to(cls, port: int) -> Client:
        """Connect to a port."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=LIMIT))

    def send(self, data: bytes) -> None:
        """Send bytes without waiting for the peer to read."""
        self.writer.write(data)

    async def reply(self) -> Reply:
        """Read one reply."""
        start, reply = time.monotonic(), Reply()
        try:
            await self._read(reply)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            reply.body += getattr(error, "partial", b"")
            reply.problem = "cut"
        except ValueError as error:
            reply.problem = f"no HTTP: {error}"
        reply.seconds = time.monotonic() - start
        return reply

    async def _read(self, reply: Reply) -> None:
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        reply.status = int(lines[0].split(" ")[1])
        pairs = (line.partition(":") for line in lines[1:] if line)
        reply.headers = {name.lower(): value.strip() for name, _, value in pairs}
        if reply.headers.get("transfer-encoding") == "chunked":
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                reply.body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        elif "content-length" in reply.headers:
            reply.body = await self.reader.readexactly(int(reply.headers["content-length"]))
        else:
            reply.body = await self.reader.read()

    def leave(self) -> None:
        """Close the connection immediately."""
        self.writer.transport.abort()


async def ask(port: int, data: bytes, seconds: float = 10.0) -> Reply:
    """Send a request and return its reply, or a `silent` one after the time limit."""
    start = time.monotonic()
    try:
        client = await Client.to(port)
    except OSError as error:
        return Reply(problem=f"refused: {error}")
    try:
        async with asyncio.timeout(seconds):
            client.send(data)
            reply = await client.reply()
    except TimeoutError:
        reply = Reply(problem="silent")
    finally:
        client.leave()
        with contextlib.suppress(OSError):
            await client.writer.wait_closed()
    reply.seconds = time.monotonic() - start
    return reply
