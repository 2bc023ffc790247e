"""Raw servers for the HTTP client, which answer byte for byte as a test defines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from latimer.backends.http import ConnectionPool, HttpClient

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
async def server(answer: Answer) -> AsyncIterator[tuple[HttpClient, list[Peer]]]:
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
    url = f"http://127.0.0.1:{port}/prefix/"
    client = HttpClient(url, {"X-Own": "1"}, ConnectionPool(url, 0.3, 0.3))
    try:
        yield client, peers
    finally:
        await client.aclose()
        running.close()
        for peer in peers:
            peer.writer.close()


async def ask(client: HttpClient, body: bytes | None = b"{}") -> bytes:
    """Send one request and return the body of its response."""
    async with await client.send("POST", "/x", body) as response:
        assert response.status == 200
        return await response.aread()
