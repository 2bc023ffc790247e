"""Tests of the upstream client against servers that behave like engines, or worse."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import httpx2
import pytest
from latimer.backends import http
from latimer.backends.errors import EngineError, EngineSilent, EngineUnavailable
from latimer.backends.http import MOST_IDLE, HttpUpstream
from latimer.backends.upstream import HttpxUpstream
from support.engines.wire import OK, Peer, ask, server


async def test_a_request_carries_our_headers_and_nothing_else() -> None:
    """A request carries the host, the configured headers, and its body's type and length only."""
    seen: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        seen.append(request)
        await peer.send(OK)

    async with server(answer) as (upstream, _):
        assert await ask(upstream, b'{"a":1}') == b"ok"
        host = upstream.address.removeprefix("http://").removesuffix("/prefix")
    assert seen[0].decode().split("\r\n") == [
        "POST /prefix/x HTTP/1.1",
        f"Host: {host}",
        "X-Own: 1",
        "Content-Type: application/json",
        "Content-Length: 7",
        "",
        '{"a":1}',
    ]


async def test_a_connection_is_reused() -> None:
    """Consecutive requests share one connection."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(OK)

    async with server(answer) as (upstream, peers):
        for _ in range(150):
            assert await ask(upstream) == b"ok"
        assert len(peers) == 1


async def test_a_server_that_closes_after_100_answers_causes_no_error() -> None:
    """The client opens a new connection after a response with `Connection: close`."""

    async def answer(peer: Peer, _request: bytes) -> None:
        close = peer.requests == 100
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
        await peer.send(head + (b"Connection: close\r\n" if close else b"") + b"\r\nok")
        if close:
            await peer.close()

    async with server(answer) as (upstream, peers):
        for _ in range(250):
            assert await ask(upstream) == b"ok"
        assert [peer.requests for peer in peers] == [100, 100, 50]


async def test_a_reused_connection_that_dies_silently_is_replaced() -> None:
    """The client repeats a request once when its reused connection closes before the response."""

    async def answer(peer: Peer, _request: bytes) -> None:
        if peer.number == 0 and peer.requests == 2:
            await peer.close()
        else:
            await peer.send(OK)

    async with server(answer) as (upstream, peers):
        assert [await ask(upstream) for _ in range(3)] == [b"ok"] * 3
        assert [peer.requests for peer in peers] == [2, 2]


async def test_a_fresh_connection_that_dies_is_an_error() -> None:
    """The client does not repeat a request when a new connection closes without a response."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.close()

    async with server(answer) as (upstream, peers):
        with pytest.raises(EngineError, match="without a response"):
            await ask(upstream)
        assert len(peers) == 1


async def test_an_idle_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client does not reuse a connection that was idle for longer than `IDLE_SECONDS`."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(OK)

    monkeypatch.setattr("latimer.backends.http.IDLE_SECONDS", 0.01)
    async with server(answer) as (upstream, peers):
        await ask(upstream)
        await asyncio.sleep(0.05)
        await ask(upstream)
        assert len(peers) == 2


async def test_a_stream_comes_as_it_is_sent() -> None:
    """The client returns each chunk of a body when it arrives."""
    go = asyncio.Event()

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go.wait()
        await peer.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with server(answer) as (upstream, _), upstream.send("GET", "/s") as reply:
        chunks = reply.chunks()
        assert await anext(chunks) == b"one"
        go.set()
        assert await anext(chunks) == b"two"
        assert [chunk async for chunk in chunks] == []


async def test_leaving_early_closes_the_connection() -> None:
    """The client closes the connection when a response is abandoned before its end."""
    closed = asyncio.Event()

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        if not await peer.reader.read():
            closed.set()

    async with server(answer) as (upstream, _):
        async with upstream.send("GET", "/s") as reply:
            await anext(reply.chunks())
        await asyncio.wait_for(closed.wait(), 1)


async def test_a_body_may_end_with_the_connection() -> None:
    """An HTTP/1.0 body without a length ends when the server closes the connection."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(b"HTTP/1.0 200 OK\r\nContent-Type: x/y\r\n\r\nall ")
        await asyncio.sleep(0.01)
        await peer.send(b"of it")
        await peer.close()

    async with server(answer) as (upstream, _):
        assert await ask(upstream) == b"all of it"


async def test_a_broken_body_is_an_error() -> None:
    """A connection that breaks in the middle of a body raises an error."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await peer.close()

    async with server(answer) as (upstream, _):
        with pytest.raises(EngineError, match="was lost"):
            await ask(upstream)


async def test_silence_is_an_error() -> None:
    """An engine that sends nothing for too long raises an error."""

    async def answer(_peer: Peer, _request: bytes) -> None:
        await asyncio.sleep(2)

    async with server(answer) as (upstream, _):
        with pytest.raises(EngineError, match=r"sent nothing for 0\.3 s"):
            await ask(upstream)


async def test_silence_is_an_error_after_a_close() -> None:
    """The time limit of a running request still applies after the client closes idle
    connections."""

    async def answer(_peer: Peer, _request: bytes) -> None:
        await asyncio.sleep(2)

    async with server(answer) as (upstream, _):
        asking = asyncio.create_task(ask(upstream))
        await asyncio.sleep(0.05)
        await upstream.aclose()
        with pytest.raises(EngineError, match=r"sent nothing for 0\.3 s"):
            await asyncio.wait_for(asking, 2)


async def test_something_else_than_http_is_an_error() -> None:
    """The error says when a port does not speak HTTP."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(b"220 mail.example ESMTP\r\n")

    async with server(answer) as (upstream, _):
        with pytest.raises(EngineError, match="invalid HTTP response"):
            await ask(upstream)


async def test_nobody_there_is_unavailable() -> None:
    """The error of a refused connection names the address."""
    upstream = HttpUpstream("http://127.0.0.1:1")
    with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
        await ask(upstream)


async def test_a_slow_reader_stops_the_server() -> None:
    """The client stops reading from the connection when nobody reads the body."""
    sent = 0

    async def answer(peer: Peer, _request: bytes) -> None:
        nonlocal sent
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        while sent < 100_000_000:
            await peer.send(b"x" * 100_000)
            sent += 100_000

    async with server(answer) as (upstream, _), upstream.send("GET", "/s") as reply:
        await anext(reply.chunks())
        await asyncio.sleep(0.2)
        assert sent < 50_000_000


def test_an_address_must_be_one() -> None:
    """The constructor rejects an invalid address."""
    with pytest.raises(ValueError, match="not a valid address"):
        HttpUpstream("localhost:8080")


async def test_a_users_own_client_is_an_upstream_too() -> None:
    """An httpx client, here over an ASGI app, works like the default client."""

    async def app(scope: object, receive: object, send: Callable[..., Awaitable[None]]) -> None:
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"inside"})

    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://inside") as client:
        upstream = HttpxUpstream(client)
        async with upstream.send("POST", "/x", b"{}") as reply:
            assert (reply.status, reply.content_type) == (200, "text/plain")
            assert await reply.read() == b"inside"


async def test_a_users_own_client_fails_as_the_default_one_does() -> None:
    """A transport error of an httpx client is raised as an error of this project."""
    async with httpx2.AsyncClient() as client:
        upstream = HttpxUpstream(client, "http://127.0.0.1:1")
        with pytest.raises(EngineUnavailable):
            async with upstream.send("GET", "/x"):
                pass


async def test_a_large_body_arrives_whole() -> None:
    """The client sends a body of 10 MB completely, and reuses the connection."""
    body = bytes(range(256)) * 40_000
    received: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        received.append(request.partition(b"\r\n\r\n")[2])
        await peer.send(OK)

    async with server(answer) as (client, peers):
        for _ in range(2):
            async with client.send("POST", "/", body) as reply:
                assert await reply.read() == b"ok"
        assert received == [body, body]
        assert len(peers) == 1


async def test_an_answer_before_the_end_of_a_body_is_read() -> None:
    """The client reads a response that arrives before the request's body is sent, and does not
    reuse the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK.replace(b"200 OK", b"413 Too Large"))
        await writer.drain()
        await reader.read()
        writer.close()

    served: list[bytes] = []
    running = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024)
    client = HttpUpstream(f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}")
    for _ in range(2):
        async with client.send("POST", "/", bytes(30_000_000)) as reply:
            assert (reply.status, await reply.read()) == (413, b"ok")
    assert len(served) == 2
    await client.aclose()
    running.close()


@pytest.mark.parametrize("cut", range(0, 60, 7))
async def test_informational_answers_are_skipped(cut: int) -> None:
    """The client skips 1xx responses, and each request gets its own final response."""
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"

    async def answer(peer: Peer, request: bytes) -> None:
        name = request.split()[1].removeprefix(b"/prefix")
        body = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(name), name)
        data = early + body
        await peer.send(data[:cut])
        await asyncio.sleep(0.001)
        await peer.send(data[cut:])

    async with server(answer) as (client, peers):
        for name in ("/a", "/bc", "/def"):
            async with client.send("GET", name) as reply:
                assert (reply.status, await reply.read()) == (200, name.encode())
        assert len(peers) == 1


@pytest.mark.parametrize(
    "more", [OK, b"rubbish", b"\r\n\r\nHTTP/1.1 200", b"HTTP/1.1 100 Continue\r\n\r\n"]
)
@pytest.mark.parametrize("late", [False, True])
async def test_what_follows_an_answer_is_nobodys(more: bytes, late: bool) -> None:
    """Bytes after a response close the connection, and the next request opens a new one."""

    async def answer(peer: Peer, request: bytes) -> None:
        name = request.split()[1].removeprefix(b"/prefix")
        body = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(name), name)
        await peer.send(body if late else body + more)
        if late:
            await asyncio.sleep(0.01)
            await peer.send(more)

    async with server(answer) as (client, peers):
        for name in ("/a", "/bc", "/def"):
            async with client.send("GET", name) as reply:
                assert (reply.status, await reply.read()) == (200, name.encode())
            await asyncio.sleep(0.03)
        assert len(peers) == 3


async def test_bytes_behind_an_answer_leave_nobody_waiting() -> None:
    """The client returns a complete response immediately, even when invalid bytes follow it."""

    async def answer(peer: Peer, request: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        await peer.send(head + b"2\r\nok\r\n0\r\n\r\ngarbage")

    async with server(answer) as (client, _), asyncio.timeout(5):
        patient = HttpUpstream(client.address)
        async with patient.send("GET", "/") as reply:
            assert await reply.read() == b"ok"


async def test_an_answer_that_changes_the_protocol_is_an_error() -> None:
    """A response that switches protocols raises an error."""

    async def answer(peer: Peer, request: bytes) -> None:
        await peer.send(b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc")

    async with server(answer) as (client, _), asyncio.timeout(2):
        with pytest.raises(EngineError, match="invalid HTTP response: an upgrade"):
            async with client.send("GET", "/"):
                pass


async def test_framing_holds_nothing_back() -> None:
    """The client reads a body to its end after a chunk extension of one megabyte."""

    async def answer(peer: Peer, request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await peer.send(b"2;" + b"e" * 2**20 + b"\r\nok\r\n0\r\n\r\n")

    async with server(answer) as (client, _peers), client.send("GET", "/") as reply:
        assert await asyncio.wait_for(reply.read(), 10) == b"ok"


async def test_headers_without_end_are_an_error() -> None:
    """Headers beyond the size limit raise an error."""

    async def answer(peer: Peer, request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                await peer.send(b"x" * 65_536)

    async with server(answer) as (client, _peers):
        with pytest.raises(EngineError, match="headers that are too large"):
            async with client.send("GET", "/"):
                pass


async def test_of_an_errors_body_only_the_beginning_is_read() -> None:
    """The client reads only the beginning of an endless error body."""

    async def answer(peer: Peer, request: bytes) -> None:
        await peer.send(b"HTTP/1.1 500 Oh\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(2_000):
                await peer.send(b"broken " * 10_000)

    async with server(answer) as (client, _peers):
        async with client.send("GET", "/") as reply:
            body = await reply.read()
        assert reply.status == 500
        assert body.startswith(b"broken broken")
        assert len(body) < 4_000_000


async def test_idle_connections_are_bounded() -> None:
    """The client keeps at most `MOST_IDLE` idle connections after a burst of requests."""
    together = asyncio.Event()

    async def answer(peer: Peer, request: bytes) -> None:
        await together.wait()
        await peer.send(OK)

    async def ask(client: HttpUpstream) -> None:
        async with client.send("GET", "/") as reply:
            await reply.read()

    async with server(answer) as (client, peers):
        asking = [asyncio.create_task(ask(client)) for _ in range(MOST_IDLE + 20)]
        while len(peers) < MOST_IDLE + 20:
            await asyncio.sleep(0.01)
        together.set()
        await asyncio.gather(*asking)
        assert len(client._idle) == MOST_IDLE


@pytest.mark.parametrize("listens", [True, False])
async def test_an_engine_that_stops_listening_has_lost_its_answer(
    listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client waits for a silent response only while the engine accepts connections."""
    monkeypatch.setattr(http, "PROBE_AFTER", 0.1)
    monkeypatch.setattr(http, "PROBE_SECONDS", 0.1)
    probes = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal probes
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"GET /health"):
            probes += 1
            writer.write(OK)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf")
            if not listens:
                running.close()
            await asyncio.sleep(0.7)
            writer.write(b"rest")
        await writer.drain()
        writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    client = HttpUpstream(address, probe="/health")
    async with client.send("POST", "/", b"{}") as reply:
        if listens:
            assert await reply.read() == b"halfrest"
            assert probes
        else:
            with pytest.raises(EngineSilent, match="no longer accepts connections"):
                await reply.read()
    await client.aclose()
    running.close()
