"""A server in front of an engine that edits its responses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
from fuzz.edits import edited

# Paths whose responses identify the model; Latimer caches them.
FACTS = ("/props", "/tokenize", "/slots", "/v1/models", "/api/v1/model", "/api/extra/version",
         "/api/extra/true_max_context_length", "/api/extra/detokenize", "/api/extra/tokencount",
         "/detokenize", "/api/v1/generate")  # fmt: skip

# Seconds after which an idle connection is closed; llama-server does so after five.
IDLE = 2.0


class Front:
    """A proxy that forwards requests to an engine and edits its responses.

    Args:
        engine: the engine's own address.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._client = httpx2.AsyncClient(base_url=engine, timeout=60)
        self._edits: list[dict[str, Any]] = []
        self._answers = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._lock = threading.Lock()
        self.address = ""
        self.facts_changed = False

    def arm(self, edits: list[dict[str, Any]]) -> None:
        """Set the edits of all responses from now on; an empty list leaves them unchanged."""
        with self._lock:
            self._edits, self._answers = edits, 0

    def _edits_of_next(self) -> list[dict[str, Any]]:
        with self._lock:
            number, self._answers = self._answers, self._answers + 1
            return [one for one in self._edits if one["at"] in (None, number)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until it is closed."""
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError, EOFError, httpx2.HTTPError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request, and return False if the connection must be closed."""
        async with asyncio.timeout(IDLE):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        lengths = [line for line in head.lower().splitlines() if line.startswith("content-length:")]
        body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
        edits = self._edits_of_next()
        if edits and path in FACTS:
            self.facts_changed = True
        asking = asyncio.ensure_future(self._ask(method, path, body))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            return False
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
        return await _answer(writer, asking.result(), edits)

    async def _ask(self, method: str, path: str, body: bytes) -> httpx2.Response:
        headers = {"content-type": "application/json"}
        return await self._client.request(method, path, content=body, headers=headers)

    async def close(self) -> None:
        """Close every connection."""
        for writer in list(self._writers):
            writer.close()
        await self._client.aclose()


async def _answer(
    writer: asyncio.StreamWriter, reply: httpx2.Response, edits: list[dict[str, Any]]
) -> bool:
    """Send a response with its edits, and return False if the connection must be closed."""
    body = edited(reply.content, edits)
    by_kind = {one["do"]: one for one in edits}
    kind = reply.headers.get("content-type", "application/json")
    chunked = "chunked" in reply.headers.get("transfer-encoding", "") or "chunk" in by_kind
    head = f"HTTP/1.1 {reply.status_code} X\r\n"
    if "head" in by_kind:
        head = by_kind["head"]["value"] + "\r\n"
    if "Content-Type" not in head:
        head += f"Content-Type: {kind}\r\n"
    if "Content-Length" not in head and "Transfer-Encoding" not in head:
        head += "Transfer-Encoding: chunked\r\n" if chunked else f"Content-Length: {len(body)}\r\n"
    writer.write(head.encode("latin-1", "replace") + b"\r\n")
    async for piece in _pieces(body, by_kind):
        if chunked:
            size = by_kind["chunk"]["value"] if "chunk" in by_kind else f"{len(piece):x}"
            piece = size.encode() + b"\r\n" + piece + b"\r\n"
        writer.write(piece)
        await writer.drain()
    if "reset" in by_kind:
        _reset(writer)
        return False
    if "hang" in by_kind:
        await asyncio.sleep(60)
        return False
    if chunked and "cut" not in by_kind:
        writer.write(b"0\r\n\r\n")
    if "after" in by_kind:
        writer.write(by_kind["after"]["value"].encode())
    await writer.drain()
    return not (by_kind.keys() & {"cut", "head"})


async def _pieces(body: bytes, by_kind: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield a body in pieces, up to the place where an edit makes it hang or break off."""
    for kind in ("hang", "reset"):
        if kind in by_kind:
            body = body[: int(by_kind[kind]["place"] * len(body))]
    if "sizes" in by_kind and len(body) < 20_000:
        size = by_kind["sizes"]["value"]
        for at in range(0, len(body), size):
            yield body[at : at + size]
        return
    middle = int(by_kind["pause"]["place"] * len(body)) if "pause" in by_kind else len(body)
    if middle:
        yield body[:middle]
    if body[middle:]:
        await asyncio.sleep(0.3)
        yield body[middle:]


def _reset(writer: asyncio.StreamWriter) -> None:
    """Abort a connection with an RST."""
    own = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()


@contextlib.contextmanager
def fronting(engine: str) -> Iterator[Front]:
    """Run a front in a thread of its own."""
    front, ready, loop = Front(engine), threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(front.serve, "127.0.0.1", 0, backlog=256)
        front.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await over.wait()
        server.close()
        await front.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    assert urlsplit(engine).hostname
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield front
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()
