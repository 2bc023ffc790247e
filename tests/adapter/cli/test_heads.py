"""Tests of heads of requests: which are refused, and what their clients get then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from latimer.adapter.cli.protocol import MOST_HEAD
from support.servers import serving

from .test_protocol import NOW, Waiting, answer, connected, port_of


async def test_a_refused_head_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    """The log says why a head was refused, for example that of a load balancer's check."""
    with serving(Waiting) as address:
        await answer(port_of(address), b"GET / HTTP/1.1\r\n\r\n")
    assert "no 'Host' headers" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 5000000\r\n\r\n", 400),
        (b"POST / HTTP/2.0\r\nHost: a\r\nContent-Length: 5000000\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: a\r\na: %b\r\n\r\n" % (b"b" * MOST_HEAD), 431),
        (b"POST / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n"
         b"Transfer-Encoding: gzip\r\n\r\n", 400),
        (b"\x16\x03\x01" + b"x" * MOST_HEAD, 400),
    ],
    ids=["no host", "version", "large", "upgrade", "not HTTP"],
)  # fmt: skip
async def test_a_refused_head_resets_no_client(
    head: bytes, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client that sends a body to its end gets the error of its head, and nothing fails."""
    with serving(Waiting) as address:
        for before in (b"", NOW):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
            if before:
                writer.write(before)
                assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
            data = head
            for _ in range(50):
                writer.write(data + b"x" * 100_000)
                await writer.drain()
                data = b""
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 %d " % status)
            assert answer.count(b"HTTP/1.1 ") == 1
            writer.close()
            await writer.wait_closed()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /now HTTP/1.0\r\n\r\n",
        b"GET /now HTTP/1.1\r\nhOST:\r\n\r\n",
        b"POST /now HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: Chunked \r\n\r\n0\r\nHost: b\r\n\r\n",
    ],
)
async def test_heads_that_http_allows_are_served(request_: bytes) -> None:
    """Old clients without a host, an empty host, chunks with trailers, and spaces after a value are
    served."""
    with serving(Waiting) as address:
        for sent in (request_, NOW + request_):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
            writer.write(sent)
            for _ in range(sent.count(b"/now")):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
            writer.close()


async def test_a_client_of_http_1_0_gets_no_chunks() -> None:
    """A body without a length goes to an old client as it is, up to the end of the connection."""
    may_end = asyncio.Event()

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await may_end.wait()
            await send({"type": "http.response.body", "body": b"one ", "more_body": True})
            await send({"type": "http.response.body", "body": b"two"})

    async with connected(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        may_end.set()
        assert await reader.read() == b"one two"
