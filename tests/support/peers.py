"""Raw servers for the upstream client, which answer byte for byte as a test defines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from latimer.backends.http import HttpUpstream

Answer = Callable[["Peer", bytes], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nok"


class Peer:
    """A connection on the server's side."""

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


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[tuple[HttpUpstream, list[Peer]]]:
    """Run a raw server; yield a client of it and the list of its connections."""
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

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = running.sockets[0].getsockname()[1]
    upstream = HttpUpstream(f"http://127.0.0.1:{port}/prefix/", {"X-Own": "1"}, 0.3, 0.3)
    try:
        yield upstream, peers
    finally:
        await upstream.aclose()
        running.close()
        for peer in peers:
            peer.writer.close()


async def ask(upstream: HttpUpstream, body: bytes | None = b"{}") -> bytes:
    """Send one request and return the body of its response."""
    async with upstream.send("POST", "/x", body) as reply:
        assert reply.status == 200
        return await reply.read()
