"""A client that behaves as its request says, and reads the response."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

import httptools
from fuzz.cases import Request


@dataclass
class Answer:
    """The response that a client received.

    Args:
        ended: "whole", "closed" (before its end), "left" by the client, or "timeout".
        status: the status of the last response, or None without one.
        replies: the number of responses that began; a client can send more than one request.
    """

    ended: str = "closed"
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    replies: int = 0
    seconds: float = 0.0


class _Parser:
    """A parser of HTTP responses."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parts: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._answer.headers = {}
        self._parts = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._answer.replies += 1
        self._answer.status = status

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._answer.body = b"".join(self._parts)
        if self._answer.status is not None and self._answer.status >= 200:
            self._answer.ended = "whole"

    def end(self) -> None:
        if self._answer.ended != "whole":
            self._answer.body = b"".join(self._parts)


async def ask(port: int, request: Request, seconds: float) -> Answer:
    """Send a request with its client's behaviour, and read the response.

    Args:
        seconds: how long to wait for the end of the response.
    """
    answer = Answer()
    clock = asyncio.get_running_loop().time
    start = clock()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    parser = _Parser(answer)
    limit = seconds if request.leave is None else min(request.leave, seconds)
    try:
        async with asyncio.timeout(limit):
            with contextlib.suppress(OSError):
                await _send(writer, request)
            await _read(reader, parser, answer, request.slow)
    except TimeoutError:
        answer.ended = "timeout" if request.leave is None else "left"
    except (OSError, httptools.HttpParserError):
        pass
    finally:
        parser.end()
        writer.transport.abort()
    answer.seconds = clock() - start
    return answer


async def _send(writer: asyncio.StreamWriter, request: Request) -> None:
    data = request.data
    size = max(len(data) // request.pieces, 1)
    for at in range(0, len(data), size):
        writer.write(data[at : at + size])
        await writer.drain()
        if request.pieces > 1:
            await asyncio.sleep(0.005)


async def _read(reader: asyncio.StreamReader, parser: _Parser, answer: Answer, slow: bool) -> None:
    while answer.ended != "whole":
        data = await reader.read(500 if slow else 2**16)
        if not data:
            return
        parser.feed(data)
        if slow:
            await asyncio.sleep(0.001)
