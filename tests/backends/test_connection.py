"""Tests of unusual HTTP responses and of the hook for new connections."""

from __future__ import annotations

import pytest
from latimer.backends.errors import EngineError, EngineUnavailable
from support.engines.wire import OK, Peer, ask, server


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 4\r\n\r\nbody", 204),
        (b"HTTP/1.1 302 Found\r\nLocation: http://x/\r\nContent-Length: 0\r\n\r\n", 302),
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nx", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", None),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", None),
        (b"HTTP/9.9 banana\r\n\r\n", None),
    ],
    ids=range(9),
)
async def test_odd_answers_are_read_or_errors(data: bytes, status: int | None) -> None:
    """The client follows no redirect, rejects upgrades, and reports broken framing as an engine
    error."""

    async def answer(peer: Peer, _request: bytes) -> None:
        await peer.send(data)

    async with server(answer) as (client, _):
        for _ in range(2):
            if status is None:
                with pytest.raises(EngineError):
                    await ask(client)
                continue
            async with client.send("GET", "/") as reply:
                assert (reply.status, await reply.read()) == (status, b"")


async def test_a_new_connection_is_asked_about_before_a_request() -> None:
    """An error that the hook for new connections raises reaches the caller and no request is sent.
    Reused connections do not call the hook."""
    hooked = 0
    sent: list[bytes] = []

    async def answer(peer: Peer, request: bytes) -> None:
        sent.append(request)
        await peer.send(OK)

    async def hook() -> None:
        nonlocal hooked
        hooked += 1
        if hooked == 3:
            raise EngineUnavailable("another")

    async with server(answer) as (client, peers):
        client.on_connect = hook
        for _ in range(3):
            await ask(client)
        assert (hooked, len(peers)) == (1, 1)
        prepared = client.send("GET", "/late")
        client.refuse(EngineUnavailable("was made before"))
        with pytest.raises(EngineUnavailable, match="was made before"):
            async with prepared:
                pass
        client.refuse(EngineUnavailable("was made before"))
        with pytest.raises(EngineUnavailable, match="another"):
            await ask(client)
        assert (hooked, len(sent)) == (3, 3)
