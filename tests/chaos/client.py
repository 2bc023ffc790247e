"""A client on a raw connection that behaves as its request says, and the replies that it reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

# Bytes above which a body is not parsed again.
LARGE = 2**20


@dataclass(frozen=True)
class Request:
    """A request, and the behaviour of its client.

    Args:
        headers: headers that replace or follow the right ones.
        head: a request line and headers to send instead of the right ones, before the body. The
            expected reply is then unknown.
        leave: seconds after which the client disconnects, None to stay.
        pieces: the number of pieces in which the request is sent.
        slow: True if the client reads slowly, in small pieces.
    """

    path: str
    body: bytes = b""
    head: bytes | None = None
    leave: float | None = None
    pieces: int = 1
    slow: bool = False
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def data(self) -> bytes:
        """The bytes to send."""
        if self.head is not None:
            return self.head + self.body
        lines = {"Host": "localhost"}
        if self.method == "POST":
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(self.body))}
        text = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **self.headers}.items())
        return f"{self.method} {self.path} HTTP/1.1\r\n{text}\r\n".encode() + self.body

    def fields(self) -> dict[str, Any]:
        """Return the body, or an empty object if it is large or not an object.

        Parsing a large body would delay the small requests whose time is measured.
        """
        if len(self.body) > LARGE:
            return {}
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


def post(path: str, body: Any, headers: Mapping[str, str] | None = None) -> Request:
    """Return a request with a body as JSON; a body of bytes is sent unchanged."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Request(path, data, headers=headers or {})


def get(path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Request:
    """Return a request without a body."""
    return Request(path, method=method, headers=headers or {})


@dataclass
class Reply:
    """A reply as received.

    Args:
        status: the status, or 0 without a reply.
        problem: why the reply is incomplete: `refused`, `cut`, `no HTTP`, `silent`, or `left` by
            the client; empty otherwise.
        replies: the number of replies that began on the connection.
        wanted: the completion that the request asks for, if known.
    """

    request: Request
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0
    problem: str = ""
    replies: int = 0
    wanted: str | None = None

    def json(self) -> Any:
        """Return the body as JSON, or None if it is not valid."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
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

    def texts(self) -> dict[int, str]:
        """Return the text of each choice."""
        found: dict[int, str] = {}
        for body in self.chunks() if self.streamed else [self.json()]:
            for choice in body.get("choices", ()):
                message = choice.get("message") or choice.get("delta") or {}
                text = choice.get("text", message.get("content"))
                index = choice.get("index", 0)
                found[index] = found.get(index, "") + (text or "")
        return found

    def __str__(self) -> str:
        start = self.body[:300].decode(errors="replace").replace("\n", " ")
        return f"{self.status} {self.problem} after {self.seconds:.2f} s: {start}"


class Client:
    """A connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request
    ) -> None:
        self.reader = reader
        self.writer = writer
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._begun = Reply(request)
        self._parts: list[bytes] = []
        self._replies = 0
        self._whole: deque[Reply] = deque()

    @classmethod
    async def to(cls, port: int, request: Request) -> Client:
        """Connect to a port."""
        return cls(*await asyncio.open_connection("127.0.0.1", port), request)

    def send(self, data: bytes) -> None:
        """Send bytes without waiting for the peer to read."""
        self.writer.write(data)

    async def send_slowly(self) -> None:
        """Send the request in its pieces."""
        data = self._request.data
        if self._request.pieces == 1:
            # Without waiting: a server may reply before it has read everything.
            self.send(data)
            return
        size = max(len(data) // self._request.pieces, 1)
        for at in range(0, len(data), size):
            self.send(data[at : at + size])
            await self.writer.drain()
            await asyncio.sleep(0.005)

    async def reply(self) -> Reply:
        """Read one reply; one that is incomplete says why."""
        start, problem, slow = time.monotonic(), "cut", self._request.slow
        try:
            while not self._whole and (data := await self.reader.read(500 if slow else 2**16)):
                self._parser.feed_data(data)
                if slow:
                    await asyncio.sleep(0.001)
        except OSError:
            pass
        except httptools.HttpParserError as error:
            problem = f"no HTTP: {error}"
        reply = self._whole.popleft() if self._whole else self.partial(problem)
        reply.seconds, reply.replies = time.monotonic() - start, self._replies
        return reply

    def partial(self, problem: str) -> Reply:
        """Return what has arrived of a reply; without a length, it ends with the connection."""
        reply = self._begun
        reply.body = b"".join(self._parts)
        framed = {"content-length", "transfer-encoding"} & reply.headers.keys()
        reply.problem = "" if problem == "cut" and reply.status and not framed else problem
        return reply

    def leave(self) -> None:
        """Close the connection immediately."""
        self.writer.transport.abort()

    # The parser calls these.

    def on_message_begin(self) -> None:
        self._begun, self._parts = Reply(self._request), []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._begun.headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        self._begun.status = self._parser.get_status_code()
        self._replies += self._begun.status >= 200

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._begun.body = b"".join(self._parts)
        if self._begun.status >= 200:
            self._whole.append(self._begun)


async def ask(port: int, request: Request | bytes, seconds: float = 10.0) -> Reply:
    """Send a request with its client's behaviour, and return its reply.

    Args:
        seconds: the time limit, after which a reply is `silent`.
    """
    sent = Request("", request, b"") if isinstance(request, bytes) else request
    start = time.monotonic()
    try:
        client = await Client.to(port, sent)
    except OSError as error:
        return Reply(sent, problem=f"refused: {error}")
    try:
        async with asyncio.timeout(seconds if sent.leave is None else min(sent.leave, seconds)):
            with contextlib.suppress(OSError):
                await client.send_slowly()
            reply = await client.reply()
    except TimeoutError:
        reply = client.partial("silent" if sent.leave is None else "left")
    finally:
        client.leave()
        with contextlib.suppress(OSError):
            await client.writer.wait_closed()
    reply.seconds = time.monotonic() - start
    return reply
