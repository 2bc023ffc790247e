"""Tests of WebSockets of `latimer serve`: large frames, shutdown, workers, many clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from latimer.adapter.arrivals import TOGETHER, Arrivals
from latimer.adapter.cli.protocol import Protocol
from latimer.adapter.cli.sockets import PIECE, SocketProtocol, Splitter
from latimer.adapter.handshake import ARRIVALS, FRAMES, PARTS
from latimer.adapter.request import PUSH
from latimer.adapter.text_frames import frames_of
from support.frames import R, answered, create, is_last, text_of
from support.servers import begun
from support.workers import double, workers
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.server import ServerState
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol
from websockets.sync.client import connect as connect_in_sync

HANDSHAKE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MOST = 3 * PIECE
LONG = {"max_output_tokens": 1500, "ignore_eos": True}
SIZES = st.sampled_from([0, 1, 125, 126, 127, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, MOST])


def url_of(address: str) -> str:
    """Return the URL of the WebSocket of a server."""
    return address.replace("http", "ws", 1) + R


def parsed(pieces: list[bytes]) -> ServerProtocol:
    """Return a parser that has read a handshake and some bytes."""
    parser = ServerProtocol(max_size=MOST)
    parser.receive_data(HANDSHAKE)
    (request,) = parser.events_received()
    parser.send_response(parser.accept(request))  # type: ignore[arg-type]
    parser.data_to_send()
    for piece in pieces:
        parser.receive_data(piece)
    return parser


@settings(max_examples=25)
@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=4), st.integers(1, 200_000))
def test_a_split_frame_is_the_same_message(sizes: list[tuple[int, bool]], step: int) -> None:
    """Any frames, cut anywhere, are the same messages for the parser, in small fragments."""
    data, messages = b"", []
    for size, is_ping in sizes:
        text = os.urandom(min(size, 125) if is_ping else size)
        data += Frame(Opcode.PING if is_ping else Opcode.BINARY, text).serialize(mask=True)
        messages.append((is_ping, text))
    splitter = Splitter(MOST)
    step = max(step, len(data) // 200 + 1)
    pieces = [b"".join(splitter.split(data[at : at + step])) for at in range(0, len(data), step)]
    parser = parsed(pieces)
    assert parser.parser_exc is None
    found: list[tuple[bool, bytes]] = []
    whole = b""
    for frame in parser.events_received():
        assert isinstance(frame, Frame)
        assert len(frame.data) <= PIECE
        whole += bytes(frame.data)
        if frame.fin:
            found.append((frame.opcode is Opcode.PING, whole))
            whole = b""
    assert found == messages


@given(
    st.sampled_from([0x81, 0x01, 0x82, 0x88, 0x89, 0xC1, 0x80]),
    st.sampled_from([0, 1, 125, 126, 127, 300, 16_376, 16_377, PIECE]),
    st.sampled_from(["short", "16 bits", "64 bits", "unmasked", "cut", "followed"]),
)
def test_a_text_that_needs_no_parser_is_that_of_the_parser(
    first: int, size: int, form: str
) -> None:
    """Only a small masked text that is all that has arrived is read without the parser."""
    mask, text = os.urandom(4), os.urandom(size)
    length = bytes((0x80 | min(size, 125),))
    if form == "64 bits" or size > 0xFFFF:
        length = b"\xff" + size.to_bytes(8)
    elif form == "16 bits" or size > 125:
        length = b"\xfe" + size.to_bytes(2)
    data = bytes((first,)) + length + mask + text
    if form == "unmasked":
        data = bytes((first, length[0] & 0x7F)) + length[1:] + text
    elif form == "cut":
        data = data[:-1]
    elif form == "followed":
        data *= 2
    found = Splitter(MOST).whole(data)
    is_text = first == 0x81 and form not in ("unmasked", "cut", "followed")
    assert (found is not None) == (is_text and length[:1] != b"\xff" and len(data) <= 16_384)
    if found is not None:
        (frame,) = parsed([data]).events_received()
        assert isinstance(frame, Frame)
        assert (frame.opcode, frame.fin, frame.data) == (Opcode.TEXT, True, found)


def test_a_text_between_fragments_is_for_the_parser() -> None:
    """A text that may belong to a frame before it is not read without the parser."""
    frame = Frame(Opcode.TEXT, b"{}").serialize(mask=True)
    for before in (
        frame[:1],
        frame[:-1],
        Frame(Opcode.TEXT, os.urandom(PIECE)).serialize(mask=True)[:-1],
    ):
        splitter = Splitter(MOST)
        assert b"".join(splitter.split(before)) is not None
        assert splitter.whole(frame) is None
    assert Splitter(1).whole(frame) is None


def test_a_frame_beyond_the_limit_is_refused_by_its_head() -> None:
    """The parser closes the connection before the text of such a frame has arrived."""
    data = Frame(Opcode.TEXT, b"x" * (MOST + 1)).serialize(mask=True)
    parser = parsed([*Splitter(MOST).split(data[:20])])
    assert parser.close_sent is not None
    assert parser.close_sent.code == 1009


async def test_large_and_wrong_frames() -> None:
    """A frame of 20 MiB is read, and one over the limit, wrong text and flooding harm no other."""
    with begun("--max-body", str(24 << 20)) as (_, address, _):
        async with (
            connect(url_of(address), proxy=None, max_size=None) as one,
            connect(url_of(address), proxy=None) as other,
        ):
            refused = await answered(one, "x" * (20 << 20))
            assert refused["error"]["code"] == "context_length_exceeded"
            assert text_of(await answered(one, "Count to 5.")) == "1, 2, 3, 4, 5."
            await one.send(b"\xff\xfe", text=True)
            with pytest.raises(ConnectionClosed):
                await one.recv()
            with pytest.raises(ConnectionClosed) as closed:
                await answered(other, "x" * (24 << 20))
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        async with connect(url_of(address), proxy=None) as flooding:
            count = 3000
            data = Frame(Opcode.TEXT, b"{}").serialize(mask=True) * count
            flooding.transport.write(data + Frame(Opcode.PING, b"").serialize(mask=True) * count)
            async with connect(url_of(address), proxy=None) as other:
                async with asyncio.timeout(5):
                    assert text_of(await answered(other, "Count to 5.")) == "1, 2, 3, 4, 5."
            for _ in range(count):
                assert json.loads(await flooding.recv())["status"] == 400


def test_a_client_that_still_writes_learns_why_it_ends() -> None:
    """A connection ends with its reason, also for what a client sends after the close frame."""
    size = 8 << 20
    with begun("--max-body", str(1 << 20)) as (_, address, _):
        for _ in range(3):
            with (
                connect_in_sync(url_of(address), proxy=None) as client,
                pytest.raises(ConnectionClosed) as closed,
            ):
                client.send("x" * size)
                client.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        host, port = address.removeprefix("http://").split(":")
        data = Frame(Opcode.TEXT, b"x" * size).serialize(mask=True)
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(HANDSHAKE)
            assert client.recv(12) == b"HTTP/1.1 101"
            client.sendall(data[: size // 2])
            # The server has refused it by then.
            time.sleep(0.2)
            client.sendall(data[size // 2 :])
            answer = b""
            while received := client.recv(1024):
                answer += received
        reason = answer[answer.index(b"\r\n\r\n") + 4 :]
        assert (reason[0], int.from_bytes(reason[2:4])) == (0x88, 1009)


def test_incomplete_frames_of_a_key_have_a_limit() -> None:
    """The frames of one key that have not arrived completely take half of the room of all."""
    data = Frame(Opcode.TEXT, b"x" * (1 << 20)).serialize(mask=True)[:-1]
    with (
        begun("--max-body", str(1 << 20), "--api-key", "sk-a") as (_, address, _),
        contextlib.ExitStack() as stack,
    ):
        host, port = address.removeprefix("http://").split(":")
        answer = b""
        for _ in range(TOGETHER // 2 + 1):
            assert not answer
            client = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            client.sendall(HANDSHAKE[:-2] + b"Authorization: Bearer sk-a\r\n\r\n")
            assert client.recv(12) == b"HTTP/1.1 101"
            while not client.recv(1024).endswith(b"\r\n\r\n"):
                pass
            client.sendall(data)
            client.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                answer = client.recv(1024)
        assert (answer[0], int.from_bytes(answer[2:4])) == (0x88, 1013)


async def test_a_key_is_checked_in_the_handshake() -> None:
    """Handshakes without the key get the 401 and its error object, also the first ones at once."""
    with begun("--api-key", "sk-a") as (_, address, _):
        tries = [connect(url_of(address), proxy=None).__aenter__() for _ in range(8)]
        for one in await asyncio.gather(*tries, return_exceptions=True):
            assert isinstance(one, InvalidStatus)
        with pytest.raises(InvalidStatus) as refused:
            await connect(url_of(address), proxy=None)
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["type"] == "invalid_request_error"
        headers = {"authorization": "Bearer sk-a"}
        async with connect(url_of(address), proxy=None, additional_headers=headers) as one:
            assert (await answered(one, "Hi"))["type"] == "response.completed"


async def test_a_shutdown_ends_connections() -> None:
    """After SIGTERM an idle connection closes at once, and a busy one after its response."""
    with begun("--drain", "30", LATIMER_LOG_FORMAT="text") as (process, address, _):
        async with (
            connect(url_of(address), proxy=None) as idle,
            connect(url_of(address), proxy=None) as busy,
        ):
            await busy.send(json.dumps(create("Hi", **LONG)))
            while json.loads(await busy.recv())["type"] != "response.output_text.delta":
                pass
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed) as closed:
                await idle.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
            while not is_last(frame := json.loads(await busy.recv())):
                pass
            assert frame["type"] == "response.incomplete"
            with pytest.raises(ConnectionClosed):
                await busy.recv()
        assert process.stderr is not None
        rest = await asyncio.to_thread(process.stderr.read)
        assert process.wait(10) == 0
        assert "Latimer waits for 1 request, at most 30 s" in rest
        assert "Error" not in rest


async def test_the_end_of_a_drain_ends_responses() -> None:
    """When the drain is over, a response that runs fails with the reason, before the close."""
    with begun("--drain", "0") as (process, address, _):
        async with connect(url_of(address), proxy=None) as busy:
            await busy.send(json.dumps(create("Hi", **LONG)))
            while json.loads(await busy.recv())["type"] != "response.output_text.delta":
                pass
            process.send_signal(signal.SIGTERM)
            while not is_last(frame := json.loads(await busy.recv())):
                pass
            assert frame["type"] == "response.failed"
            assert "shutting down" in frame["response"]["error"]["message"]
            with pytest.raises(ConnectionClosed) as closed:
                await busy.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
async def test_connections_of_workers() -> None:
    """Each worker serves WebSockets; a drain closes them all, and the server ends."""
    with double() as engine, workers(engine) as server:
        url = url_of(server.address)
        async with connect(url, proxy=None) as one, connect(url, proxy=None) as other:
            for connection in (one, other):
                body = {"model": "fake", "max_output_tokens": 16}
                made = await answered(connection, "Hi", **body)
                body["previous_response_id"] = made["response"]["id"]
                again = await answered(connection, "Hi", **body)
                assert again["type"] in ("response.completed", "response.incomplete"), again
            server.process.send_signal(signal.SIGTERM)
            for connection in (one, other):
                with pytest.raises(ConnectionClosed) as closed:
                    await connection.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1001
        assert await asyncio.to_thread(server.process.wait, 20) == 0


def open_files(pid: int) -> int:
    """Return the number of open files of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def come_and_go(url: str, count: int) -> None:
    """Open connections, and leave some at once, some in a response, some after wrong frames."""

    async def one(number: int) -> None:
        connection = await connect(url, proxy=None)
        if number % 4 == 1:
            await answered(connection, "Hi")
        elif number % 4 == 2:
            await connection.send(json.dumps(create("Hi", **LONG)))
            await connection.recv()
        elif number % 4 == 3:
            await connection.send("{")
            await connection.recv()
        if number % 8 < 4:
            await connection.close()
        else:
            connection.transport.abort()

    for start in range(0, count, 20):
        await asyncio.gather(*map(one, range(start, start + 20)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_thousand_connections_leave_nothing() -> None:
    """Connections that have closed leave no files, no memory and no request that runs."""
    with begun(LATIMER_LOG_FORMAT="text") as (process, address, _):
        url = url_of(address)
        await come_and_go(url, 200)
        await asyncio.sleep(1)
        files, memory = open_files(process.pid), resident(process.pid)
        await come_and_go(url, 1000)
        await asyncio.sleep(1)
        assert open_files(process.pid) <= files
        assert resident(process.pid) - memory < 8 << 20
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        rest = await asyncio.to_thread(process.stderr.read)
        assert process.wait(10) == 0
        assert "waits for" not in rest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("opcode", [Opcode.TEXT, Opcode.PING])
def test_a_client_that_does_not_read_is_held_back(opcode: Opcode) -> None:
    """The server reads no more from a client that reads no answers, and its memory stays small."""
    with begun() as (process, address, _):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=2) as client:
            client.sendall(HANDSHAKE)
            assert client.recv(12) == b"HTTP/1.1 101"
            memory = resident(process.pid)
            data = Frame(opcode, b"x" * 100).serialize(mask=True) * 5000
            sent = 0
            with pytest.raises(TimeoutError):
                while sent < 200 << 20:
                    sent += client.send(data)
            assert resident(process.pid) - memory < 32 << 20


class Written(asyncio.Transport):
    """A transport that keeps what is written, and whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_read = True
        self.is_ended = self.is_closed = False

    def write(self, data: Any) -> None:
        """Keep data."""
        self.writes.append(bytes(data))

    def can_write_eof(self) -> bool:
        """Return True, as for TCP."""
        return True

    def write_eof(self) -> None:
        """Note that nothing else is written."""
        self.is_ended = True

    def is_closing(self) -> bool:
        """Return True after the end."""
        return self.is_closed

    def close(self) -> None:
        """End the connection."""
        self.is_closed = True

    def pause_reading(self) -> None:
        """Note that nothing is read."""
        self.is_read = False

    def resume_reading(self) -> None:
        """Note that it is read."""
        self.is_read = True


@contextlib.asynccontextmanager
async def held(arrivals: Arrivals | None = None) -> AsyncIterator[tuple[SocketProtocol, Written]]:
    """Yield an open connection, of which only the caller reads and sends messages."""
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        offer = scope["extensions"][FRAMES]
        if arrivals is not None:
            offer[ARRIVALS] = arrivals, ""
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        await ended.wait()

    config = uvicorn.Config(app, http=Protocol, ws="none", log_config=None)
    config.load()
    protocol, transport = SocketProtocol(config, ServerState(), {}, closed=lambda: None), Written()
    protocol.connection_made(transport)
    protocol.data_received(HANDSHAKE)
    while not protocol.handshake_complete:
        await asyncio.sleep(0)
    transport.writes.clear()
    yield protocol, transport
    ended.set()
    await asyncio.gather(*protocol.tasks)


async def test_frames_of_one_message_are_one_write() -> None:
    """A server writes the frames of several texts at once, as they are."""
    async with held() as (protocol, transport):
        frames = frames_of([b"{}", b"x" * 70_000, b""])
        await protocol.send({"type": "websocket.send", FRAMES: frames})
        assert transport.writes == [frames]


async def test_frames_are_written_at_once() -> None:
    """The function in a message writes frames at once, and reports a slow client and its end."""
    async with held() as (protocol, transport):
        message: Any = {"type": "websocket.send", FRAMES: frames_of([b"{}"])}
        await protocol.send(message)
        push, frames = message[PUSH], frames_of([b"1"])
        assert push(frames)
        protocol.pause_writing()
        assert not push(frames)
        protocol.resume_writing()
        assert push(frames)
        assert transport.writes[1:] == [frames] * 3
        transport.close()
        assert not push(frames)
        assert len(transport.writes) == 4


async def test_a_full_transport_holds_the_producer() -> None:
    """Nothing is sent to a client that does not read, until it reads or the connection is lost."""
    async with held() as (protocol, transport):
        for goes_on in (True, False):
            protocol.pause_writing()
            sending = asyncio.create_task(
                protocol.send({"type": "websocket.send", FRAMES: b"\x81\x02{}"})
            )
            await asyncio.sleep(0.01)
            assert (transport.writes, sending.done()) == ([], False)
            if goes_on:
                protocol.resume_writing()
                await sending
                assert transport.writes == [b"\x81\x02{}"]
                transport.writes.clear()
        transport.close()
        protocol.connection_lost(ConnectionError())
        with pytest.raises(ClientDisconnected):
            await sending
        assert transport.writes == []


async def test_a_text_within_a_message_is_an_error() -> None:
    """A text after the first fragment of another one closes the connection (RFC 6455, 5.4)."""
    async with held() as (protocol, transport):
        protocol.data_received(Frame(Opcode.TEXT, b"{", fin=False).serialize(mask=True))
        protocol.data_received(Frame(Opcode.TEXT, b"{}").serialize(mask=True))
        assert (await protocol.receive())["code"] == 1002
        assert transport.is_ended
        with pytest.raises(ClientDisconnected):
            await protocol.send({"type": "websocket.send", "text": "{}"})


async def test_a_connection_ends_after_the_frame_that_is_refused() -> None:
    """The server reads the rest of a frame, drops it with all that follows, and ends only then."""
    async with held() as (protocol, transport):
        size = protocol.config.ws_max_size + 1
        data = Frame(Opcode.TEXT, b"x" * size).serialize(mask=True)
        protocol.data_received(data[:PIECE])
        assert (await protocol.receive())["code"] == 1009
        (written,) = transport.writes
        assert written[0] == 0x88
        for at in range(PIECE, size, 16 * PIECE):
            assert not transport.is_ended
            protocol.data_received(data[at : at + 16 * PIECE])
        assert transport.is_ended
        protocol.data_received(Frame(Opcode.TEXT, b"{}").serialize(mask=True) * 2)
        assert transport.is_read
        assert transport.writes == [written]
        assert protocol.queue.empty()
        assert not transport.is_closing()
        assert protocol.close_timer is not None
        protocol.connection_lost(None)
        assert protocol.close_timer is None


async def test_incomplete_messages_have_a_limit_together() -> None:
    """A WebSocket whose message has no room next to those of others closes with 1013, also if its
    fragments are small, and a message that is complete or lost makes room."""
    most = 4 * PIECE
    arrivals = Arrivals(most)
    part = Frame(Opcode.TEXT, b"x" * most).serialize(mask=True)[:-1]
    async with contextlib.AsyncExitStack() as stack:
        found = [await stack.enter_async_context(held(arrivals)) for _ in range(TOGETHER + 2)]
        (first, _), (second, _), *rest = found
        for protocol, _ in found[:-2]:
            protocol.data_received(part)
        small = Frame(Opcode.CONT, b"x", fin=False).serialize(mask=True)
        protocol, transport = rest[-1]
        protocol.data_received(Frame(Opcode.TEXT, b"x", fin=False).serialize(mask=True))
        protocol.data_received(small * (TOGETHER * PIECE // 64))
        for _ in range(TOGETHER * PIECE // 64):
            await asyncio.sleep(0)
        assert (await protocol.receive())["code"] == 1013
        assert transport.is_ended
        first.data_received(b"x")
        assert len((await first.receive())[PARTS]) == 4
        second.connection_lost(None)
        for protocol, transport in (rest[-2], (first, found[0][1])):
            protocol.data_received(part)
            protocol.data_received(b"x")
            assert len((await protocol.receive())[PARTS]) == 4
            assert not transport.is_ended
        for protocol, _ in rest[:-2]:
            protocol.connection_lost(None)
        assert not arrivals._of
        assert not arrivals._size


async def test_reading_pauses_only_for_an_app_that_is_behind() -> None:
    """A frame that the app waits for does not pause reading, and one that it leaves does."""
    async with held() as (protocol, transport):
        frame = Frame(Opcode.TEXT, b"{}").serialize(mask=True)
        receiving = asyncio.create_task(protocol.receive())
        await asyncio.sleep(0)
        protocol.data_received(frame)
        assert transport.is_read
        assert (await receiving)["text"] == "{}"
        protocol.data_received(frame)
        protocol.data_received(frame * 3)
        assert not transport.is_read
        for _ in range(4):
            assert (await protocol.receive())["text"] == "{}"
        assert transport.is_read


@pytest.mark.parametrize(
    ("header", "wrong"), [(b"Sec-WebSocket-Key", b"X-Key"), (b"Version: 13", b"Version: 8")]
)
def test_a_wrong_handshake_is_http(header: bytes, wrong: bytes) -> None:
    """A request that asks for a WebSocket without what it needs gets a 426 with an error object."""
    with begun() as (_, address, _):
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(HANDSHAKE.replace(header, wrong))
            data = b""
            while b"unsupported_endpoint" not in data:
                data += client.recv(4096) or b"unsupported_endpoint"
            assert data.startswith(b"HTTP/1.1 426")
