"""Tests of the server side of an HTTP connection."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from latimer.adapter import OpenAIAdapter
from latimer.adapter.cli import timeouts
from latimer.adapter.cli.protocol import MOST_HEAD, Protocol
from latimer.adapter.errors import InvalidRequest, render
from latimer.adapter.proxies import ForwardedFor
from latimer.adapter.request import PUSH, WHOLE
from latimer.backends.errors import LatimerError
from support.clocks import hurried, now
from support.engines.echo import Echo
from support.servers import begun, serving
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.server import ServerState


class Waiting:
    """An app that waits until the client disconnects."""

    def __init__(self) -> None:
        self.begun = 0
        self.left = 0

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        """Wait for `http.disconnect`, or answer `/now` immediately."""
        if scope["type"] != "http":
            return
        self.begun += 1
        if scope["path"] == "/now":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
            return
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left += 1


@asynccontextmanager
async def connected(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Serve an app in this event loop, and yield a connection to it."""
    async with served(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        yield reader, writer
        writer.close()


def port_of(address: str) -> int:
    """Return the port of an address."""
    return int(address.rpartition(":")[2])


REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "behind", [b"", REQUEST, REQUEST * 3], ids=["nothing", "a request", "three requests"]
)
@hurried
async def test_a_client_that_leaves_is_noticed(behind: bytes) -> None:
    """A disconnect reaches the app, even if the client has sent more after its request."""
    app = Waiting()
    async with connected(app) as (_, writer):
        writer.write(REQUEST + behind)
        await asyncio.sleep(0.1)
        assert app.begun == 1
        assert app.left == 0
        writer.transport.abort()
        async with asyncio.timeout(1.5):
            while not app.left:
                await asyncio.sleep(0.01)


async def answer(port: int, data: bytes) -> tuple[bytes, dict[str, dict[str, str]]]:
    """Return the status line and the JSON body of the response to some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.read()
    writer.close()
    await writer.wait_closed()
    return head.split(b"\r\n")[0], json.loads(body)


async def test_requests_that_are_none_get_an_error_object() -> None:
    """Bytes that are not HTTP, and headers without end, get an OpenAI error object."""
    with serving(Waiting) as address:
        port = port_of(address)
        status, body = await answer(port, b"\x16\x03\x01 hello\r\n\r\n")
        assert status == b"HTTP/1.1 400 Bad Request"
        assert body["error"]["type"] == "invalid_request_error"
        endless = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MOST_HEAD // 4)
        status, body = await answer(port, endless)
        assert status.startswith(b"HTTP/1.1 431")
        assert str(MOST_HEAD) in body["error"]["message"]


CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: %b\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "status", "named"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400, "no 'Host'"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400, "2 'Host'"),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", 400, "2 'Host'"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505, "HTTP/2.0"),
        (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 505, "HTTP/0.9"),
        (CHUNKED % b"gzip, chunked", 501, "'gzip, chunked'"),
        (CHUNKED % b"gzip\r\nTransfer-Encoding: chunked", 501, "'gzip, chunked'"),
        (CHUNKED % b"gzip", 400, "'gzip'"),
        (CHUNKED % b"chunked\t", 400, "'chunked"),
        (CHUNKED % b"chunked\r\nContent-Length: 3", 400, "Invalid"),
    ],
)
async def test_a_head_that_http_does_not_allow_is_refused(
    head: bytes, status: int, named: str
) -> None:
    """A head that RFC 9112 does not allow gets an error object, also on a kept connection."""
    app = Waiting()
    with serving(lambda: app) as address:
        line, body = await answer(port_of(address), head + b"0\r\n\r\n")
        assert line.startswith(b"HTTP/1.1 %d " % status)
        assert named in body["error"]["message"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        writer.write(NOW)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
        writer.write(head)
        assert (await reader.read()).startswith(b"HTTP/1.1 %d " % status)
        writer.close()
        await writer.wait_closed()
    assert app.begun == 1


class Held:
    """An app that answers when it may."""

    def __init__(self) -> None:
        self.begun, self.may = asyncio.Event(), asyncio.Event()

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        """Answer with 204."""
        self.begun.set()
        await self.may.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"no HTTP\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * MOST_HEAD, 431),
    ],
    ids=["host", "invalid", "large"],
)
async def test_a_request_before_a_refused_one(head: bytes, status: int, parts: int) -> None:
    """A request that runs is answered before the error of the one behind it, and the close."""
    app = Held()
    async with connected(app) as (reader, writer):
        writer.write(REQUEST + (head if parts == 1 else b""))
        await app.begun.wait()
        if parts > 1:
            writer.write(head)
        app.may.set()
        first, second = await reader.readuntil(b"\r\n\r\n"), await reader.readuntil(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 204 ")
        assert b"connection: close" not in first
        assert second.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in second
        assert json.loads(await reader.read())["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("before", [b"", b"1\r\n{\r\n"], ids=["at once", "later"])
@pytest.mark.parametrize("more", [b"", b"x" * 1_000_000], ids=["", "more"])
async def test_a_body_with_invalid_chunks_gets_an_error_object(before: bytes, more: bytes) -> None:
    """A chunk without a length is a 400, also if a part of the body has been read, and then the
    connection closes."""
    with serving(lambda: OpenAIAdapter(Echo())) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        head = CHUNKED.replace(b" / ", b" /v1/completions ") % b"chunked"
        writer.write(head + before)
        await asyncio.sleep(0.1 if before else 0)
        writer.write(b"x\r\n" + more)
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 400")
        assert b"chunk" in reply
        assert reply.count(b"HTTP/1.1") == 1
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("behind", [b"", b"no HTTP\r\n\r\n"])
async def test_an_early_request_is_the_last_one_of_its_connection(behind: bytes) -> None:
    """A second request that arrives before a response is answered, and the connection closes."""
    app = Waiting()
    async with connected(app) as (reader, writer):
        writer.write(b"GET /now HTTP/1.1\r\nHost: a\r\n\r\n" * 5 + behind)
        first, second = await reader.readuntil(b"\r\n\r\n"), await reader.readuntil(b"\r\n\r\n")
        assert b" 204 " in first
        assert b"connection: close" not in first
        assert b" 204 " in second
        assert b"connection: close" in second
        async with asyncio.timeout(1.5):
            assert await reader.read() == b""
    assert app.begun == 2


class Brief(Protocol):
    """A connection that may be idle for 0.3 s."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timeout_keep_alive: Any = 0.3


@hurried
async def test_an_idle_connection_closes() -> None:
    """A connection closes when it was idle for its time, and not while requests follow."""
    async with served(Waiting(), Brief) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for pause in (0.2, 0.2, 0.0):
            writer.write(b"GET /now HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(pause)
        before = now()
        async with asyncio.timeout(3):
            assert await reader.read() == b""
        assert now() - before > 0.2
        writer.close()


@asynccontextmanager
async def ending(
    before: bytes, app: Any = None
) -> AsyncIterator[tuple[socket.socket, Callable[[], None]]]:
    """Yield a connection whose client has sent some bytes, and the function that begins the end."""
    found: list[Protocol] = []

    def make() -> Protocol:
        config = uvicorn.Config(app or Waiting(), http=Protocol, ws="none", log_config=None)
        found.append(Protocol(config=config, server_state=ServerState(), app_state={}))
        return found[0]

    listening = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with listening:
        with socket.create_connection(listening.sockets[0].getsockname(), 5) as client:
            client.sendall(before)
            await asyncio.sleep(0.05)
            if before == NOW:
                assert b" 204 " in client.recv(4096)
            yield client, found[0].shutdown


NOW = b"GET /now HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def _moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the moments for a last request be enough for a busy machine."""
    monkeypatch.setattr(timeouts, "LAST", 2.0)


@pytest.mark.usefixtures("_moments")
@pytest.mark.parametrize("before", [b"", NOW], ids=["new", "kept"])
@pytest.mark.parametrize("later", [0.0, 0.05])
async def test_a_request_that_meets_the_end_is_answered(before: bytes, later: float) -> None:
    """The end of a server answers what the kernel has, or what arrives within moments, and closes
    the connection then."""
    async with ending(before) as (client, end):
        if later:
            end()
            await asyncio.sleep(later)
        client.sendall(NOW)
        if not later:
            end()
        head = await asyncio.to_thread(client.recv, 4096)
        assert b" 204 " in head
        assert b"\r\nconnection: close\r\n" in head
        assert await asyncio.to_thread(client.recv, 1) == b""


@pytest.mark.usefixtures("_moments")
async def test_a_stream_that_meets_the_end_has_a_successor() -> None:
    """A response that began before the end does not close its connection: its head let the client
    send another request, which is answered."""
    goes_on = asyncio.Event()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if scope["path"] == "/now":
            await goes_on.wait()
        await send({"type": "http.response.body", "body": b"z"})

    async with ending(NOW[:-2], app) as (client, end):
        client.sendall(NOW[-2:])
        assert b"connection: close" not in await asyncio.to_thread(client.recv, 4096)
        end()
        goes_on.set()
        assert b"z" in await asyncio.to_thread(client.recv, 4096)
        client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"connection: close" in await asyncio.to_thread(client.recv, 4096)


@pytest.mark.timed
@pytest.mark.parametrize(
    ("before", "status", "most"), [(b"", b"", 0.5), (NOW, b"", 0.5), (NOW[:-1], b" 408 ", 1.5)]
)
async def test_the_end_waits_for_moments(before: bytes, status: bytes, most: float) -> None:
    """An idle connection closes soon after the end begins, and half a head gets one second."""
    async with ending(before) as (client, end):
        end()
        at = time.monotonic()
        answer = await asyncio.to_thread(client.recv, 4096)
        assert time.monotonic() - at < most
        assert status in answer if status else answer == b""


@pytest.mark.timed
def test_the_idle_time_is_a_setting() -> None:
    """--timeout-keep-alive is the time after which `latimer serve` closes an idle connection."""
    with (
        begun("--timeout-keep-alive", "1") as (_, address, _),
        socket.create_connection(("127.0.0.1", port_of(address)), 5) as client,
    ):
        client.sendall(b"GET /v1/models/none HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b" 404 " in client.recv(4096)
        at = time.monotonic()
        assert client.recv(1) == b""
        assert 0.9 < time.monotonic() - at < 2.0


@hurried
async def test_half_a_head_is_not_idle() -> None:
    """A request that arrives slowly after another one is answered."""
    async with served(Waiting(), Brief) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /now HTTP/1.1\r\nHost: a\r\n\r\nGET /now HTTP")
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"/1.1\r\n")
        await asyncio.sleep(0.5)
        writer.write(b"Host: a\r\n\r\n")
        async with asyncio.timeout(3):
            assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_trailers_are_no_headers_and_have_an_end() -> None:
    """Trailers of a chunked body do not become headers, and their size is limited."""
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                more = message["more_body"]
            seen.extend(value for name, value in scope["headers"] if name == b"host")
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    chunked = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    async with connected(app) as (reader, writer):
        writer.write(chunked + b"Host: evil.example\r\n\r\n")
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        assert seen == [b"a"]
    async with connected(app) as (reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(chunked)
            for _ in range(64):
                writer.write(b"a:b\r\n" * 4_096)
                await writer.drain()
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                await reader.read()
    assert len(seen) == 1


async def test_small_chunks_are_no_trailers() -> None:
    """A chunked body with chunks of one byte is accepted with framing of any length."""
    body = b"".join(b"1\r\nx\r\n" for _ in range(50_000))
    async with connected(Waiting()) as (reader, writer):
        head = b"POST /now HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + body + b"0\r\n\r\n")
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")


@hurried
async def test_trailers_are_not_part_of_the_next_head() -> None:
    """A connection takes 40 KB of trailers, and then a head of 40 KB."""
    async with connected(Waiting()) as (reader, writer):
        head = b"POST /now HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        lines = b"a: b\r\n" * 6_600
        for data in (head, b"1\r\nx\r\n0\r\n", lines + b"\r\n"):
            writer.write(data)
            await asyncio.sleep(0.05)
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        for data in (b"GET /now HTTP/1.1\r\nHost: a\r\n", lines, b"\r\n"):
            writer.write(data)
            await asyncio.sleep(0.05)
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")


@pytest.mark.parametrize(
    "framed",
    [
        b"Content-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    ],
    ids=["length", "chunked"],
)
@pytest.mark.parametrize("asks", [b"h2c", b"TLS/1.2"], ids=bytes.decode)
async def test_another_protocol_is_not_needed(framed: bytes, asks: bytes) -> None:
    """A request that asks for HTTP/2 keeps its body, wherever the bytes are cut, and its connection
    serves the next one."""
    bodies: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            bodies.append(body)
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: "
    request = head + asks + b"\r\n" + framed
    async with connected(app) as (reader, writer):
        cuts = range(len(head), len(request) + 1)
        for cut in cuts:
            writer.write(request[:cut])
            await writer.drain()
            await asyncio.sleep(0.002)
            writer.write(request[cut:])
            async with asyncio.timeout(5):
                assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
    assert bodies == [b"{}"] * len(cuts)


async def test_a_whole_response_is_one_message() -> None:
    """A message with a whole response is written as HTTP, and the connection serves the next one;
    a header with a line break closes it."""
    value = b"fine"

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert WHOLE in scope["extensions"]
            headers = [(b"x-value", value), (b"content-length", b"2")]
            await send({"type": WHOLE, "status": 201, "headers": headers, "body": b"{}"})

    async with connected(app) as (reader, writer):
        for _ in range(2):
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 201 Created\r\n")
            assert head.endswith(b"x-value: fine\r\ncontent-length: 2\r\n\r\n")
            assert await reader.readexactly(2) == b"{}"
        value = b"a\r\nb: c"
        writer.write(REQUEST)
        assert await reader.read() == b""


async def test_a_part_of_a_body_is_written_at_once() -> None:
    """The function in the first message writes parts in their order; a slow client is reported."""
    answers = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert PUSH in scope["extensions"]
            start: Any = {"type": "http.response.start", "status": 200, "headers": []}
            await send(start)
            push = start[PUSH]
            answers.append(push(b"one"))
            await send({"type": "http.response.body", "body": b" two", "more_body": True})
            while push(b"x" * 65_536):
                answers.append(True)
            await send({"type": "http.response.body", "body": b" end"})

    async with connected(app) as (reader, writer):
        writer.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).endswith(b"transfer-encoding: chunked\r\n\r\n")
        assert await reader.readuntil(b"two\r\n") == b"3\r\none\r\n4\r\n two\r\n"
        rest = b""
        while not rest.endswith(b"\r\n0\r\n\r\n"):
            rest += await reader.read(65_536)
        assert rest.endswith(b"x\r\n4\r\n end\r\n0\r\n\r\n")
        assert rest.count(b"x") == 65_536 * len(answers)
        assert answers


class Endless:
    """An app that sends a response without end, over HTTP or a WebSocket, until a disconnect."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until the client has disconnected."""
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            part: Any = {"type": "websocket.send", "bytes": bytes(65_536)}
        elif scope["type"] == "http":
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            part = {"type": "http.response.body", "body": bytes(65_536), "more_body": True}
        else:
            return
        leaving = asyncio.ensure_future(receive())
        with contextlib.suppress(ClientDisconnected):
            while not leaving.done():
                await send(part)
                await asyncio.sleep(0)
        assert (await leaving)["type"].endswith(".disconnect")
        self.has_left.set()


@asynccontextmanager
async def served(app: Any, http: type[Protocol] = Protocol) -> AsyncIterator[int]:
    """Serve an app in this event loop; yield the port."""
    config = uvicorn.Config(
        app, http=http, ws="none", log_config=None, ws_ping_interval=None, interface="asgi3",
        proxy_headers=False,
    )  # fmt: skip
    config.load()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: http(config, ServerState(), {}), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("opening", [REQUEST, HANDSHAKE], ids=["HTTP", "WebSocket"])
@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "reads a little"])
@hurried
async def test_a_client_that_reads_nothing_has_left(
    monkeypatch: pytest.MonkeyPatch, opening: bytes, reads: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection whose client reads nothing for a while closes, with a line in the log, and its
    request ends as if the client had disconnected; that of a slow client stays."""
    monkeypatch.setattr(timeouts, "UNREAD", 0.6)
    caplog.set_level("INFO", "latimer")
    app = Endless()
    async with served(app) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(opening)
            if not reads:
                async with asyncio.timeout(5):
                    await app.has_left.wait()
                assert cuts_in(caplog) == [{"client": "127.0.0.1", "seconds": 0.6}]
                return
            client.settimeout(1)
            for _ in range(30):
                await asyncio.sleep(0.05)
                assert client.recv(8_192)
            assert not app.has_left.is_set()
        async with asyncio.timeout(5):
            await app.has_left.wait()
        assert cuts_in(caplog) == []


@hurried
async def test_a_client_behind_a_proxy_that_reads_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line about a closed connection has the address that the request's line has."""
    monkeypatch.setattr(timeouts, "UNREAD", 0.3)
    caplog.set_level("INFO", "latimer")
    app = Endless()
    head = REQUEST.replace(b"Host: a\r\n", b"Host: a\r\nX-Forwarded-For: 203.0.113.9\r\n")
    async with served(ForwardedFor(app, ["127.0.0.1"])) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(head)
            async with asyncio.timeout(5):
                await app.has_left.wait()
    assert cuts_in(caplog) == [{"client": "203.0.113.9", "seconds": 0.3}]
    assert caplog.messages == [
        "the connection of the client 203.0.113.9 was closed: it has read nothing for 0.3 s"
    ]


def cuts_in(caplog: pytest.LogCaptureFixture) -> list[Any]:
    """Return the fields of the lines about closed connections."""
    records: list[Any] = caplog.records
    return [one.fields for one in records if getattr(one, "event", "") == "client_cut"]


@pytest.mark.parametrize(
    ("header", "then"),
    [(b"", b""), (b"Connection: close\r\n", b""), (b"", b"nonsense\r\n\r\n")],
    ids=["idle", "last", "refused"],
)
@hurried
async def test_a_finished_response_that_nobody_reads_has_an_end(
    monkeypatch: pytest.MonkeyPatch, header: bytes, then: bytes
) -> None:
    """A connection closes in time after a response that its client does not read, also if what
    follows is refused."""
    monkeypatch.setattr(timeouts, "UNREAD", 0.3)
    has_closed = asyncio.Event()

    class Roomy(Brief):
        """A connection that never pauses the app."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.set_write_buffer_limits(high=64 << 20)

        def closed(self) -> None:
            has_closed.set()

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": WHOLE, "status": 200, "headers": [], "body": bytes(16 << 20)})

    async with served(app, Roomy) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n")
            await asyncio.sleep(0.05)
            client.sendall(then)
            async with asyncio.timeout(5):
                await has_closed.wait()


@pytest.mark.timed
@hurried
async def test_what_is_sent_during_a_response_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a head does not begin with bytes that the client sent during the response before
    it, such as an empty line."""
    monkeypatch.setattr(timeouts, "REQUEST", 1.0)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await asyncio.sleep(0.4)
        await send({"type": WHOLE, "status": 200, "headers": [], "body": b""})

    async with served(app, Brief) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        # The head of the next request takes 1.2 s, but only 0.8 of them after the response.
        for piece in (b"\r\n", b"GET / HT", b"TP/1.1\r\nHo", b"st: a\r\n\r\n"):
            await asyncio.sleep(0.05 if piece == b"\r\n" else 0.4)
            writer.write(piece)
        found = b""
        async with asyncio.timeout(5):
            while piece := await reader.read(4096):
                found += piece
        assert [line for line in found.split(b"\r\n") if line.startswith(b"HTTP")] == [
            b"HTTP/1.1 200 OK",
            b"HTTP/1.1 200 OK",
        ]
        writer.close()


LATE = b"HTTP/1.1 408 Request Timeout\r\n"


async def seconds_until_end(port: int, *parts: bytes, pause: float = 0.25) -> tuple[float, bytes]:
    """Send parts with pauses; return the seconds from the last one to the end, and the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts[:-1]:
        writer.write(part)
        await asyncio.sleep(pause)
    if parts:
        writer.write(parts[-1])
    begun = now()
    async with asyncio.timeout(5):
        found = await reader.read()
    writer.close()
    return now() - begun, found


async def bodies(_scope: Any, receive: Any, send: Any) -> None:
    """Read the body, and send its size; an error that reading raises is sent as a server does."""
    size, more = 0, True
    headers: list[tuple[bytes, bytes]] = []
    try:
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        status, body = 200, b"%d" % size
    except LatimerError as error:
        status, told, headers = render(error)
        body = json.dumps(told).encode()
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": WHOLE, "status": status, "headers": headers, "body": body})


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests be late after 0.6 s."""
    monkeypatch.setattr(timeouts, "REQUEST", 0.6)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("before", [b"", REQUEST], ids=["first", "second"])
@hurried
async def test_a_head_has_to_be_complete_in_time(before: bytes) -> None:
    """A head gets a 408 some time after its first byte, also if its bytes arrive slowly."""
    async with served(bodies, Brief) as port:
        parts = [b"GET / HTTP/1.1\r\n", b"a: b\r\n", b"c: d\r\n", b"e"]
        if before:
            parts = [before, *parts]
        seconds, found = await seconds_until_end(port, *parts, pause=0.12)
        # Three pauses are over.
        assert 0.1 < seconds < 0.5
        assert LATE in found
        assert json.loads(found.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


class Long(Protocol):
    """A connection that may be idle for longer than a head may take."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.timeout_keep_alive: Any = 75.0


@pytest.mark.usefixtures("_soon")
@hurried
async def test_a_long_idle_time_is_for_idle_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head has its own time, also if connections may be idle for longer."""
    monkeypatch.setattr(timeouts, "LOOK", 0.2)
    async with served(bodies, Long) as port:
        seconds, found = await seconds_until_end(port, b"GET / HTTP", pause=0.0)
        assert seconds < 1.5
        assert LATE in found


@pytest.mark.usefixtures("_soon")
@hurried
async def test_a_connection_has_to_send_something() -> None:
    """A connection without a byte closes in time, without a response; before, it is served."""
    async with served(bodies, Brief) as port:
        seconds, found = await seconds_until_end(port)
        assert (0.5 < seconds < 1.2, found) == (True, b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0.45)
        writer.write(REQUEST)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.close()


HALVES = [b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", b"12", b"34", b"56"]
CHUNKS = [b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n", b"x\r\n"]


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("parts", [HALVES, CHUNKS], ids=["length", "chunked"])
@hurried
async def test_a_body_has_to_make_progress(parts: list[bytes]) -> None:
    """A body that stops gets the app's 408 some time after its last byte, and not while bytes
    arrive."""
    async with served(bodies, Brief) as port:
        seconds, found = await seconds_until_end(port, *parts, pause=0.4)
        assert 0.5 < seconds < 1.2
        assert found.startswith(LATE)
        assert b"connection: close" in found


@pytest.mark.usefixtures("_soon")
@hurried
async def test_a_client_that_waits_is_not_late() -> None:
    """A request is not late while the app works, while it does not read the body, and while the
    client waits for `100 Continue`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.2)
        await bodies(scope, receive, send)

    async with served(app, Brief) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for size, expect in ((2, b""), (2, b"Expect: 100-continue\r\n"), (1 << 20, b"")):
            head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % size
            writer.write(head + expect + b"\r\n")
            if expect:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            writer.write(bytes(size))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(len(str(size))) == b"%d" % size
        writer.close()


@pytest.mark.usefixtures("_soon")
@hurried
async def test_a_body_that_ends_after_the_response_leaves_the_connection_idle() -> None:
    """After a response that did not wait for the body, the rest of the body has its time, and then
    the connection is idle."""
    async with served(Waiting(), Brief) as port:
        head = b"POST /now HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n\r\n"
        seconds, found = await seconds_until_end(port, head, b"12", b"34", pause=0.15)
        assert 0.2 < seconds < 0.55
        assert found.count(b"HTTP/1.1 ") == 1
        seconds, found = await seconds_until_end(port, head, b"12", pause=0.15)
        assert 0.5 < seconds < 1.2
        assert LATE in found


@pytest.mark.parametrize("before", [b"", b"GET /now HTTP/1.1\r\nHost: a\r\n\r\n"])
@hurried
async def test_a_large_head_is_refused_in_one_piece(before: bytes) -> None:
    """A head of more than the limit is refused, in one piece or in two. Bodies do not count."""
    large = b"GET /now HTTP/1.1\r\nHost: a\r\nx-big: " + b"a" * (MOST_HEAD - 64) + b"\r\n"
    async with served(Waiting()) as port:
        for parts in ([large, b"b: c\r\n" * 9 + b"\r\n"], [large + b"b: c\r\n" * 9 + b"\r\n"]):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if before:
                writer.write(before)
                assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.05)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431")
            assert str(MOST_HEAD).encode() in await reader.read()
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        length = b"Content-Length: %d\r\n\r\n" % (MOST_HEAD * 2)
        writer.write(large.replace(b"GET", b"PUT")[: -MOST_HEAD // 2] + b"\r\n" + length)
        writer.write(bytes(2 * MOST_HEAD))
        assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def refusing(_scope: Any, _receive: Any, send: Any) -> None:
    """Refuse a request without reading its body."""
    status, told, headers = render(InvalidRequest("It is too large.", status=413))
    body = json.dumps(told).encode()
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": WHOLE, "status": status, "headers": headers, "body": body})


async def test_a_client_that_sends_a_refused_body_to_its_end_gets_the_response() -> None:
    """The connection stays open while a client sends a body that was refused, so that no reset
    takes the response away; then it closes."""

    def post(port: int) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as one:
            one.request("POST", "/", bytes(20_000_000))
            reply = one.getresponse()
            return reply.status, reply.read()

    async with served(refusing) as port:
        for _ in range(5):
            status, body = await asyncio.to_thread(post, port)
            assert (status, b"too large" in body) == (413, True)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("sends", [False, True])
@hurried
async def test_a_refused_body_has_an_end(sends: bool) -> None:
    """The connection of a refused body closes soon if nothing arrives, and at last in any case."""
    head = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999\r\n\r\n"
    async with served(refusing, Brief) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        begun = now()
        assert (await reader.read()).startswith(b"HTTP/1.1 413")
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                while not writer.transport.is_closing():
                    if sends:
                        writer.write(b"x")
                        await writer.drain()
                    elif now() - begun > 0.5:
                        # The second write finds out that nobody is there.
                        writer.write(b"x")
                    await asyncio.sleep(0.02)
        assert 0.4 < now() - begun < 1.5
        writer.close()
