"""Requests over a bare socket, for checks of the bytes that arrive and of their timing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from .check import Fail
from .target import Api

CLOSE: Mapping[str, str] = {"Connection": "close"}


@dataclass(frozen=True, slots=True)
class RawReply:
    """A reply as sent: status, lower-case headers, and the body without chunked encoding."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@asynccontextmanager
async def connected(
    api: Api,
    method: str,
    path: str,
    body: Mapping[str, Any] | bytes,
    bearer: str | None = None,
    headers: Mapping[str, str] = CLOSE,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send a request on a new connection, which closes on exit even if the reply is incomplete.

    Args:
        bearer: sent as `Authorization` instead of the client's own value.
        headers: further headers.
    """
    host, port, prefix = api.address
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    key = bearer or api.client.headers.get("authorization")
    content = ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    lines = [
        f"{method} {prefix}{path} HTTP/1.1",
        f"Host: {host}:{port}",
        *(content if data else []),
        *(f"{name}: {value}" for name, value in headers.items()),
        *([f"Authorization: {key}"] if key else []),
    ]
    tls = api.client.base_url.scheme == "https"
    reader, writer = await asyncio.open_connection(host, port, ssl=tls or None)
    try:
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def exchange(
    api: Api, method: str, path: str, body: Mapping[str, Any] | bytes, bearer: str | None = None
) -> RawReply:
    """Send a request and read the complete reply; see `connected`."""
    async with connected(api, method, path, body, bearer) as (reader, _writer):
        data = await reader.read()
    return parsed(data)


def parsed(data: bytes) -> RawReply:
    """Return the reply of which these are all bytes."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        raise Fail(f"expected an HTTP response, but got {data[:200]!r}")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        rest = _unchunked(rest)
    return RawReply(int(status.split()[1]), headers, rest)


def _unchunked(data: bytes) -> bytes:
    body = b""
    while data:
        size, line, data = data.partition(b"\r\n")
        if not line:
            # A reply that is still arriving, or was cut off.
            break
        length = int(size.split(b";")[0], 16)
        if not length:
            break
        body += data[:length]
        data = data[length + 2 :]
    return body
