"""WebSocket connections of checks, and the frames on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from .check import Fail, Unsupported, expect
from .target import Api

R = "/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")
# The seconds for which a connection may send nothing while a check waits for a frame.
PATIENCE = 15.0
ASK: Mapping[str, Any] = {"store": False, "temperature": 0}


class Rejected(Fail):
    """A handshake that the server rejects."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"expected a WebSocket, but got status {status}: {body[:200]!r}")
        self.status = status
        self.body = body


class Frames:
    """A connection of a check.

    Args:
        connection: the open connection.
    """

    def __init__(self, api: Api, connection: ClientConnection) -> None:
        self._api = api
        self._connection = connection

    async def send(self, frame: Mapping[str, Any] | str | bytes) -> None:
        """Send one frame: an object, or a text or bytes unchanged."""
        data = json.dumps(frame) if isinstance(frame, Mapping) else frame
        try:
            await self._connection.send(data)
        except ConnectionClosed as closed:
            raise Fail(f"expected an open connection, but it closed: {closed}") from None

    async def create(self, given: Any = "Hello", **body: Any) -> None:
        """Ask for a response, which is not stored."""
        full = {"model": self._api.model, "input": given, "max_output_tokens": 16, **ASK, **body}
        await self.send({"type": "response.create", **full})

    async def next(self, seconds: float = PATIENCE) -> Any:
        """Return the object in the next frame."""
        try:
            data = await asyncio.wait_for(self._connection.recv(), seconds)
        except TimeoutError:
            raise Fail(f"expected a frame, but got none for {seconds:.0f} s") from None
        except ConnectionClosed as closed:
            raise Fail(f"expected a frame, but the connection closed: {closed}") from None
        expect(isinstance(data, str), "expected a text frame, but got a binary one")
        try:
            frame = json.loads(data)
        except ValueError:
            raise Fail(f"expected JSON in a frame, but got {data[:200]!r}") from None
        expect(isinstance(frame, dict), f"expected an object in a frame, but got {data[:200]!r}")
        return frame

    async def silent(self, seconds: float) -> Any:
        """Return the next frame, or None if there is none for some seconds."""
        try:
            return await asyncio.wait_for(self._connection.recv(), seconds)
        except TimeoutError:
            return None
        except ConnectionClosed as closed:
            raise Fail(f"expected an open connection, but it closed: {closed}") from None

    async def events(self) -> list[Any]:
        """Return the events of the next response, or its error."""
        found = [await self.next()]
        while not is_error(found[-1]) and found[-1].get("type") not in ENDS:
            found.append(await self.next())
        return found

    async def respond(self, given: Any = "Hello", **body: Any) -> Any:
        """Return the response object of a frame that the server must support."""
        await self.create(given, **body)
        return response_of(await self.events())

    async def error(self, code: str | None = None, status: int = 400) -> Any:
        """Return the error of the next frame, which must be one."""
        frame = await self.next()
        expect(is_error(frame), f"expected an error frame, but got {str(frame)[:200]}")
        error = frame["error"]
        expect(
            isinstance(error, dict) and isinstance(error.get("message"), str),
            f"expected an error object, but got {str(frame)[:200]}",
        )
        missing = {"type", "code", "message", "param"} - error.keys()
        words = [error.get(name) or "" for name in ("type", "code", "param")]
        valid = not missing and error["message"] and all(isinstance(one, str) for one in words)
        expect(valid, f"expected a type, a message, a code and a param, but got {error}")
        got = (frame.get("status"), error.get("code") if code else None)
        expect(got == (status, code), f"expected {status} {code}, but got {str(frame)[:300]}")
        return {**error, "stream_id": frame.get("stream_id")}


def is_error(frame: Mapping[str, Any]) -> bool:
    """Return True if a frame is the error of a request, not an event of a response."""
    return frame.get("type") == "error" and "sequence_number" not in frame


def response_of(events: Sequence[Any]) -> Any:
    """Return the response object at the end of its events."""
    last = events[-1]
    if is_error(last):
        raise Fail(f"expected a response, but got {str(last)[:300]}")
    expect(last["type"] != ENDS[2], f"expected a response, but got {str(last)[:300]}")
    return last["response"]


@asynccontextmanager
async def opened(
    api: Api, headers: Mapping[str, str] | None = None, bearer: str | None = None
) -> AsyncIterator[Frames]:
    """Open a connection, and close it at the end.

    Args:
        bearer: sent as `Authorization` instead of the client's own value.

    Raises:
        Unsupported: the server has no WebSocket here.
        Rejected: it rejects the handshake.
    """
    url = str(api.client.base_url).rstrip("/").replace("http", "ws", 1) + R
    sent = dict(headers or {})
    key = bearer or api.client.headers.get("authorization")
    if key:
        sent["Authorization"] = key
    try:
        connection = await connect(
            url, additional_headers=sent, max_size=None, proxy=None, ping_interval=None
        )
    except InvalidStatus as refused:
        status = refused.response.status_code
        if status in (404, 405, 426, 501):
            raise Unsupported(f"the server has no WebSocket at {R}: status {status}") from None
        raise Rejected(status, bytes(refused.response.body or b"")) from None
    except (InvalidHandshake, OSError, EOFError) as wrong:
        raise Fail(f"expected a WebSocket, but got {wrong!r}") from None
    try:
        yield Frames(api, connection)
    finally:
        await connection.close()
