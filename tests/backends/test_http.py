"""Tests of the HTTP client against servers that behave like engines, or worse."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import httpcore2
import httpx2
import pytest
from latimer.backends import http
from latimer.backends.connection import HIGH_WATER, MOST_HELD, Connection
from latimer.backends.errors import EngineError, EngineSilent, EngineUnavailable, ModelChanged
from latimer.backends.http import (
    MOST_IDLE,
    ConnectionPool,
    HttpClient,
    header_lines,
    shown_address,
)
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from support.engines.wire import OK, Peer, ask, server
from support.servers import llama_server

Serve = Callable[[Peer, bytes], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def sends(*parts: bytes, ends: bool = False) -> Serve:
    """Return a server's answer to each request: parts one after the other, and maybe the end."""

    async def answer(peer: Peer, _request: bytes) -> None:
        for part in parts:
            await peer.send(part)
            await asyncio.sleep(0.01 if part is not parts[-1] else 0)
        if ends:
            await peer.close()

    return answer


async def silent(_peer: Peer, _request: bytes) -> None:
    """Answer nothing for longer than the client waits."""
    await asyncio.sleep(2)


async def test_a_request_carries_our_headers_and_nothing_else() -> None:
    """A request carries the host, the configured headers, and its body's type and length only."""
    seen: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        seen.append(request)
        await peer.send(OK)

    async with server(answer) as (client, _):
        assert await ask(client, b'{"a":1}') == b"ok"
        host = client.address.removeprefix("http://").removesuffix("/prefix")
    assert seen[0].decode().split("\r\n") == [
        "POST /prefix/x HTTP/1.1",
        f"Host: {host}",
        "X-Own: 1",
        "Content-Type: application/json",
        "Content-Length: 7",
        "",
        '{"a":1}',
    ]


async def test_connections_are_reused_while_they_are_fresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Consecutive requests share a connection that was idle for at most `IDLE_SECONDS`."""
    async with server(sends(OK)) as (client, peers):
        for _ in range(150):
            assert await ask(client) == b"ok"
        assert len(peers) == 1
        monkeypatch.setattr("latimer.backends.http.IDLE_SECONDS", 0.01)
        await asyncio.sleep(0.05)
        await ask(client)
        assert len(peers) == 2


async def test_a_server_that_closes_after_100_answers_causes_no_error() -> None:
    """The client opens a new connection after a response with `Connection: close`."""

    async def answer(peer: Peer, _request: bytes) -> None:
        close = peer.requests == 100
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n"
        await peer.send(head + (b"Connection: close\r\n" if close else b"") + b"\r\nok")
        if close:
            await peer.close()

    async with server(answer) as (client, peers):
        for _ in range(250):
            assert await ask(client) == b"ok"
        assert [peer.requests for peer in peers] == [100, 100, 50]


async def test_a_reused_connection_that_dies_silently_is_replaced() -> None:
    """The client repeats a request once when its reused connection closes before the response."""

    async def answer(peer: Peer, _request: bytes) -> None:
        if peer.number == 0 and peer.requests == 2:
            await peer.close()
        else:
            await peer.send(OK)

    async with server(answer) as (client, peers):
        assert [await ask(client) for _ in range(3)] == [b"ok"] * 3
        assert [peer.requests for peer in peers] == [2, 2]


async def test_a_stream_comes_as_it_is_sent() -> None:
    """The client returns each chunk of a body when it arrives."""
    go = asyncio.Event()

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go.wait()
        await peer.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with server(answer) as (client, _), await client.send("GET", "/s") as response:
        chunks = aiter(response.stream)
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

    async with server(answer) as (client, _):
        async with await client.send("GET", "/s") as response:
            await anext(aiter(response.stream))
        await asyncio.wait_for(closed.wait(), 1)


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        # A body without a length ends when the server closes the connection.
        (
            sends(b"HTTP/1.0 200 OK\r\nContent-Type: x/y\r\n\r\nall ", b"of it", ends=True),
            b"all of it",
        ),
        # Nobody waits for more than the response.
        (sends(CHUNKED + b"2\r\nok\r\n0\r\n\r\ngarbage"), b"ok"),
        (sends(CHUNKED, b"2;" + b"e" * 2**20 + b"\r\nok\r\n0\r\n\r\n"), b"ok"),
    ],
    ids=["end of the connection", "garbage behind it", "chunk extension of 1 MiB"],
)
async def test_a_body_is_read_to_its_end(answer: Serve, body: bytes) -> None:
    """The client returns a body as soon as it is complete, in each framing."""
    async with server(answer) as (client, _), asyncio.timeout(10):
        patient = HttpClient(client.address)
        assert await ask(patient) == body
        await patient.aclose()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (sends(ends=True), "without a response"),
        (sends(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", ends=True), "was lost"),
        (silent, r"sent nothing for 0\.3 s"),
        (sends(b"220 mail.example ESMTP\r\n"), "invalid HTTP response"),
        (
            sends(b"HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nabc"),
            "invalid HTTP response: an upgrade",
        ),
    ],
    ids=["no response", "half a body", "silence", "no HTTP", "another protocol"],
)
async def test_no_whole_response_is_an_error(answer: Serve, words: str) -> None:
    """The client raises the reason, and does not repeat a request on a new connection."""
    async with server(answer) as (client, peers), asyncio.timeout(2):
        with pytest.raises(EngineError, match=words):
            await ask(client)
        assert len(peers) == 1


async def test_silence_is_an_error_after_a_close() -> None:
    """The time limit of a running request still applies after the client closes idle
    connections."""
    async with server(silent) as (client, _):
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0.05)
        await client.aclose()
        with pytest.raises(EngineError, match=r"sent nothing for 0\.3 s"):
            await asyncio.wait_for(asking, 2)


async def test_nobody_there_is_unavailable() -> None:
    """The error of a refused connection names the address."""
    client = HttpClient("http://127.0.0.1:1")
    with pytest.raises(EngineUnavailable, match=r"1:1 cannot be reached: Connection refused\. Is"):
        await ask(client)


async def test_a_certificate_that_is_not_trusted_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine whose certificate is not trusted runs, so the message says how to trust it."""
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"

    async def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    backend = LlamaServer("https://127.0.0.1:1")
    with pytest.raises(EngineUnavailable, match=r"not trusted here: self-signed .* SSL_CERT_FILE"):
        await backend.model()
    await backend.aclose()


async def test_a_slow_reader_stops_the_server() -> None:
    """The client stops reading from the connection when nobody reads the body."""
    sent = 0

    async def answer(peer: Peer, _request: bytes) -> None:
        nonlocal sent
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        while sent < 100_000_000:
            await peer.send(b"x" * 100_000)
            sent += 100_000

    async with server(answer) as (client, _), await client.send("GET", "/s") as response:
        await anext(aiter(response.stream))
        await asyncio.sleep(0.2)
        assert sent < 50_000_000


async def test_a_response_that_nobody_reads_spoils_no_later_one() -> None:
    """A connection whose large response was complete, and was left unread, serves the next one."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (HIGH_WATER + 1))
        await peer.send(b"x" * (HIGH_WATER - 1_000))
        await asyncio.sleep(0.1)
        await peer.send(b"x" * 1_001)

    async with server(answer) as (client, peers):
        async with await client.send("GET", "/"):
            await asyncio.sleep(0.3)
        async with asyncio.timeout(5):
            assert len(await ask(client)) == HIGH_WATER + 1
        assert [peer.requests for peer in peers] == [2]


def test_an_address_must_be_one() -> None:
    """The constructor rejects an invalid address."""
    with pytest.raises(ValueError, match="not a valid address"):
        HttpClient("localhost:8080")


async def inside(scope: object, receive: object, send: Callable[..., Awaitable[None]]) -> None:
    """Answer every request with a text."""
    start = {"type": "http.response.start", "status": 200}
    await send({**start, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": b"inside"})


@pytest.mark.parametrize(
    "made",
    [
        lambda: httpx2.ASGITransport(inside),
        lambda: httpx2.AsyncClient(transport=httpx2.ASGITransport(inside)),
        lambda: httpx2.MockTransport(lambda request: httpx2.Response(200, text="inside")),
        lambda: httpcore2.AsyncConnectionPool(
            network_backend=httpcore2.AsyncMockBackend(
                [b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\n", b"\r\ninside"]
            )
        ),
    ],
    ids=["transport", "client", "mock", "pool"],
)
async def test_a_users_own_client_takes_the_pools_place(made: Callable[[], Any]) -> None:
    """A transport, client, mock or pool of httpx2 or httpcore2 sends the requests."""
    client = HttpClient("http://inside/prefix", client=made())
    async with await client.send("POST", "/x", b"{}") as response:
        assert response.status == 200
        assert response.content_type.startswith("text/plain")
        assert await response.aread() == b"inside"
    await client.aclose()


@pytest.mark.parametrize(
    "made", [httpx2.AsyncClient, httpx2.AsyncHTTPTransport, httpcore2.AsyncConnectionPool]
)
async def test_a_users_own_client_fails_as_the_pool_does(made: Callable[[], Any]) -> None:
    """A transport error of a user's client is raised as an error of this project."""
    async with made() as own:
        client = HttpClient("http://127.0.0.1:1", client=own)
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:1 cannot be reached"):
            await client.send("GET", "/x")


async def test_a_users_own_client_sends_what_the_pool_sends() -> None:
    """Both send the same request, and a response that breaks is the same error."""
    seen: list[list[bytes]] = []

    async def answer(peer: Peer, request: bytes) -> None:
        seen.append(sorted(request.lower().split(b"\r\n")))
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        await peer.close()

    async with server(answer) as (client, _), httpcore2.AsyncConnectionPool() as own:
        url = client.address
        for each in (client, HttpClient(url, {"X-Own": "1"}, own)):
            with pytest.raises(EngineError, match="was lost"):
                await ask(each)
    assert seen[0] == seen[1]


async def test_the_pool_takes_requests_of_httpcore() -> None:
    """The pool has the interface of httpcore's own pools."""
    seen: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        seen.append(request)
        await peer.send(OK)

    async def parts() -> AsyncIterator[bytes]:
        yield b"one "
        yield b"two"

    async with server(answer) as (client, _):
        assert client.pool is not None
        headers = [(b"Host", b"x"), (b"Transfer-Encoding", b"chunked")]
        url = f"{client.address}/y?z=1"
        for content in (b"one two", parts(), None):
            request = httpcore2.Request("POST", url, headers=headers, content=content)
            response = await client.pool.handle_async_request(request)
            assert (response.status, response.headers[0]) == (200, (b"content-length", b"2"))
            assert await response.aread() == b"ok"
            await response.aclose()
    whole = b"POST /prefix/y?z=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\none two"
    assert seen == [whole, whole, b"POST /prefix/y?z=1 HTTP/1.1\r\nHost: x\r\n\r\n"]


async def test_a_large_body_arrives_whole() -> None:
    """The client sends a body of 10 MB completely, and reuses the connection."""
    body = bytes(range(256)) * 40_000
    received: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        received.append(request.partition(b"\r\n\r\n")[2])
        await peer.send(OK)

    async with server(answer) as (client, peers):
        for _ in range(2):
            async with await client.send("POST", "/", body) as response:
                assert await response.aread() == b"ok"
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
    client = HttpClient(f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}")
    for _ in range(2):
        async with await client.send("POST", "/", bytes(30_000_000)) as response:
            assert (response.status, await response.aread()) == (413, b"ok")
    assert len(served) == 2
    await client.aclose()
    running.close()


def answer_to(request: bytes) -> bytes:
    """Return a response with the path of a request."""
    name = request.split()[1].removeprefix(b"/prefix")
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(name), name)


async def check_names(client: HttpClient, pause: float = 0) -> None:
    """Check that each of three requests gets its own response."""
    for name in ("/a", "/bc", "/def"):
        async with await client.send("GET", name) as response:
            assert (response.status, await response.aread()) == (200, name.encode())
        await asyncio.sleep(pause)


@pytest.mark.parametrize("cut", range(0, 60, 7))
async def test_informational_answers_are_skipped(cut: int) -> None:
    """The client skips 1xx responses, and each request gets its own final response."""
    early = b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"

    async def answer(peer: Peer, request: bytes) -> None:
        data = early + answer_to(request)
        await sends(data[:cut], data[cut:])(peer, request)

    async with server(answer) as (client, peers):
        await check_names(client)
        assert len(peers) == 1


@pytest.mark.parametrize(
    "more", [OK, b"rubbish", b"\r\n\r\nHTTP/1.1 200", b"HTTP/1.1 100 Continue\r\n\r\n"]
)
@pytest.mark.parametrize("late", [False, True])
async def test_what_follows_an_answer_is_nobodys(more: bytes, late: bool) -> None:
    """Bytes after a response close the connection, and the next request opens a new one."""

    async def answer(peer: Peer, request: bytes) -> None:
        data = answer_to(request)
        await (sends(data, more) if late else sends(data + more))(peer, request)

    async with server(answer) as (client, peers):
        await check_names(client, 0.03)
        assert len(peers) == 3


async def test_headers_without_end_are_an_error() -> None:
    """Headers beyond the size limit raise an error."""

    async def answer(peer: Peer, request: bytes) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                await peer.send(b"x" * 65_536)

    async with server(answer) as (client, _peers):
        with pytest.raises(EngineError, match="headers that are too large"):
            async with await client.send("GET", "/"):
                pass


async def test_of_an_errors_body_only_the_beginning_is_read() -> None:
    """The client reads only the beginning of an endless error body."""

    async def answer(peer: Peer, request: bytes) -> None:
        await peer.send(b"HTTP/1.1 500 Oh\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(2_000):
                await peer.send(b"broken " * 10_000)

    async with server(answer) as (client, _peers):
        async with await client.send("GET", "/") as response:
            body = await response.aread()
        assert response.status == 500
        assert body.startswith(b"broken broken")
        assert len(body) < 4_000_000


async def test_a_separate_client_has_the_same_server() -> None:
    """Connections of their own go to the same host, also if the address has an @ in its path."""
    async with server(sends(OK)) as (client, peers):
        assert client.pool is not None
        path = f"http://127.0.0.1:{client.pool._port}/team@nowhere.invalid"
        other = HttpClient(path, {}, ConnectionPool(path)).separate()
        async with await other.send("GET", "/") as response:
            await response.aread()
        assert len(peers) == 1
        await other.aclose()


async def test_idle_connections_are_bounded() -> None:
    """The client keeps at most `MOST_IDLE` idle connections after a burst of requests."""
    together = asyncio.Event()

    async def answer(peer: Peer, request: bytes) -> None:
        await together.wait()
        await peer.send(OK)

    async def ask(client: HttpClient) -> None:
        async with await client.send("GET", "/") as response:
            await response.aread()

    async with server(answer) as (client, peers):
        asking = [asyncio.create_task(ask(client)) for _ in range(MOST_IDLE + 20)]
        while len(peers) < MOST_IDLE + 20:
            await asyncio.sleep(0.01)
        together.set()
        await asyncio.gather(*asking)
        assert client.pool is not None
        assert len(client.pool._idle) == MOST_IDLE


async def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client closes idle connections after `IDLE_SECONDS`, without another request."""
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.2)
    together = asyncio.Event()
    closed = 0

    async def answer(peer: Peer, request: bytes) -> None:
        nonlocal closed
        await together.wait()
        await peer.send(OK)
        if not await peer.reader.read():
            closed += 1

    async with server(answer) as (client, peers):
        asking = [asyncio.create_task(ask(client)) for _ in range(5)]
        while len(peers) < 5:
            await asyncio.sleep(0.01)
        together.set()
        await asyncio.gather(*asking)
        assert client.pool is not None
        assert len(client.pool._idle) == 5
        async with asyncio.timeout(2):
            while closed < 5:
                await asyncio.sleep(0.01)
        # Without connections there is no timer.
        await asyncio.sleep(0.1)
        assert (client.pool._idle, client.pool._sweep) == ([], None)


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
    client = HttpClient(address, client=ConnectionPool(address, probe="/health"))
    async with await client.send("POST", "/", b"{}") as response:
        if listens:
            assert await response.aread() == b"halfrest"
            assert probes
        else:
            with pytest.raises(EngineSilent, match="answers no new connections"):
                await response.aread()
    await client.aclose()
    running.close()


async def test_an_engine_that_stops_listening_may_end_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A response that was silent and continues is read to its end, although nothing listens."""
    monkeypatch.setattr(http, "PROBE_AFTER", 0.1)
    monkeypatch.setattr(http, "PROBE_SECONDS", 0.1)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"GET /health"):
            writer.write(OK)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n")
            await asyncio.sleep(0.4)
            running.close()
            for _ in range(50):
                writer.write(b"x")
                await asyncio.sleep(0.02)
        await writer.drain()
        writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    client = HttpClient(address, client=ConnectionPool(address, probe="/health"))
    async with await client.send("POST", "/", b"{}") as response:
        assert await response.aread() == b"x" * 50
    await client.aclose()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nbody", 204),
        (b"HTTP/1.1 302 Found\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n", 302),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", None),
        (b"HTTP/9.9 banana\r\n\r\n", None),
    ],
    ids=range(8),
)
async def test_odd_answers_are_read_or_errors(data: bytes, status: int | None) -> None:
    """The client follows no redirect, and reports broken framing as an engine
    error."""
    async with server(sends(data)) as (client, _):
        for _ in range(2):
            if status is None:
                with pytest.raises(EngineError):
                    await ask(client)
                continue
            async with await client.send("GET", "/") as response:
                assert (response.status, await response.aread()) == (status, b"")


async def test_a_new_connection_is_asked_about_before_a_request() -> None:
    """An error that the hook for new connections raises reaches the caller and no request is sent.
    Reused connections do not call the hook."""
    hooked = 0
    may_go = asyncio.Event()
    sent: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        sent.append(request)
        await peer.send(OK)

    async def hook() -> None:
        nonlocal hooked
        hooked += 1
        if hooked == 2:
            await may_go.wait()
        if hooked == 3:
            raise EngineUnavailable("another")

    async with server(answer) as (client, peers):
        pool = client.pool
        assert pool is not None
        pool.on_connect = hook
        for _ in range(3):
            await ask(client)
        assert (hooked, len(peers)) == (1, 1)
        pool.fail_pending(EngineUnavailable("was made before"))
        pending = asyncio.create_task(ask(client))
        while len(peers) == 1:
            await asyncio.sleep(0)
        pool.fail_pending(ModelChanged("was made before"))
        may_go.set()
        with pytest.raises(ModelChanged, match="was made before"):
            await pending
        pool.fail_pending(EngineUnavailable("was made before"))
        with pytest.raises(EngineUnavailable, match="another"):
            await ask(client)
        assert (hooked, len(sent)) == (3, 3)


def test_headers_are_utf_8() -> None:
    """Header values are sent as UTF-8, as an engine reads its key from the command line."""
    assert header_lines({"A": "schlüssel", "b-C": "ключ"}) == (
        "A: schlüssel\r\nb-C: ключ\r\n".encode()
    )


async def test_an_engine_takes_such_a_key() -> None:
    """llama-server accepts a key that is not ASCII."""
    with llama_server(DEMO_MODEL, "--api-key", "schlüssel", slots=1, context=256) as address:
        for key, refused in (("schlüssel", False), ("schlussel", True)):
            backend = LlamaServer(address, key)
            with pytest.raises(EngineError) if refused else nullcontext():
                assert (await backend.model()).context == 256
            await backend.aclose()


@pytest.mark.parametrize(
    "value", ["s3cr3t\r\nX: y", "s3cr3t\n", "\rs3cr3t", "s3cr3t\x00", "\udcff"]
)
def test_a_value_cannot_end_its_line(value: str) -> None:
    """The constructor rejects a header value with a line end, and its message does not show the
    value."""
    for make in (
        lambda: HttpClient("http://127.0.0.1:1", {"Authorization": value}),
        lambda: LlamaServer("http://127.0.0.1:1", value),
        lambda: KoboldCpp("http://127.0.0.1:1", value),
    ):
        with pytest.raises(ValueError, match="the value of the header Authorization") as raised:
            make()
        assert "s3cr3t" not in str(raised.value)
        assert raised.value.__context__ is None


def test_a_name_is_a_token() -> None:
    """The constructor rejects a header name that is not an ASCII token."""
    for name in ("a b", "a:", "a\r\n", "", "ü"):
        with pytest.raises(ValueError, match="not the name of an HTTP header"):
            HttpClient("http://127.0.0.1:1", {name: "x"})


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://127.0.0.1:8080/prefix/", "http://127.0.0.1:8080/prefix"),
        ("http://user:pass@host:1/x", "http://host:1/x"),
        ("http://user:p/a@host:1?key=s#t", "http://host:1"),
        ("http://host?a=http://b", "http://host"),
        ("user:pass@host", "host"),
    ],
)
def test_addresses_are_shown_without_secrets(address: str, shown: str) -> None:
    """Messages show an address without user, password and query."""
    assert shown_address(address) == shown


class Deaf(asyncio.Transport):
    """A transport that drops what it gets."""

    def write(self, data: Any) -> None:
        """Do nothing."""


async def test_a_reader_of_all_is_woken_rarely() -> None:
    """A reader that wants the whole body gets it at its end, or when `MOST_HELD` bytes wait."""
    connection = Connection(asyncio.get_running_loop())
    connection.connection_made(Deaf())
    connection.start(b"GET / HTTP/1.1\r\n\r\n", b"")
    size = MOST_HELD
    connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nab" % (size + 6))
    connection.holds = True
    assert await anext(connection) == b"ab"
    reading = asyncio.ensure_future(anext(connection))
    for part in (b"cd", b"e" * size):
        await asyncio.sleep(0)
        assert not reading.done()
        connection.data_received(part)
    assert await reading == b"cd" + b"e" * size
    reading = asyncio.ensure_future(anext(connection))
    await asyncio.sleep(0)
    connection.data_received(b"fg")
    assert await reading == b"fg"
    assert connection.is_read
