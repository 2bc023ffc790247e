"""Frames of responses over a WebSocket, in tests with Starlette's client and with a real one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from latimer.adapter import OpenAIAdapter
from starlette.testclient import TestClient, WebSocketTestSession
from websockets.asyncio.client import ClientConnection
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol, Side, State

R = "/v1/responses"
ENDS = ("response.completed", "response.incomplete", "response.failed")
BODY: dict[str, Any] = {"model": "demo", "temperature": 0, "store": False}


def create(given: Any = "Hi", **body: Any) -> dict[str, Any]:
    """Return the frame that asks for a response."""
    return {"type": "response.create", **BODY, "input": given, **body}


def is_last(frame: dict[str, Any]) -> bool:
    """Return True for the last frame of an answer."""
    return frame["type"] in ENDS or (frame["type"] == "error" and "status" in frame)


def texts_in(frames: bytes) -> list[bytes]:
    """Return the texts of a server's frames, as the parser of a real client reads them."""
    client = Protocol(Side.CLIENT, state=State.OPEN, max_size=None)
    client.receive_data(frames)
    found = client.events_received()
    assert all(isinstance(one, Frame) and one.fin and one.opcode == Opcode.TEXT for one in found)
    assert client.parser_exc is None
    return [bytes(one.data) for one in found if isinstance(one, Frame)]


@contextlib.contextmanager
def connected(app: Any, path: str = R, **options: Any) -> Iterator[WebSocketTestSession]:
    """Open a WebSocket of an app, whose lifespan runs."""
    with TestClient(app) as client, client.websocket_connect(path, **options) as socket:
        yield socket


@contextlib.contextmanager
def adapting(backend: Any, **options: Any) -> Iterator[WebSocketTestSession]:
    """Open a WebSocket of an adapter over a backend, which accepts every model name."""
    with connected(OpenAIAdapter(backend, any_model=True, **options)) as socket:
        yield socket


def events(socket: WebSocketTestSession) -> list[Any]:
    """Return the frames of the next answer."""
    found = [socket.receive_json()]
    while not is_last(found[-1]):
        found.append(socket.receive_json())
    return found


def answer(socket: WebSocketTestSession, given: Any = "Hi", **body: Any) -> Any:
    """Ask for a response; return the last frame of the answer."""
    socket.send_json(create(given, **body))
    return events(socket)[-1]


async def answered(connection: ClientConnection, given: Any = "Hi", **body: Any) -> Any:
    """Ask for a response over a real connection; return the last frame of the answer."""
    await connection.send(json.dumps(create(given, **body)))
    while not is_last(frame := json.loads(await connection.recv())):
        pass
    return frame


def text_of(frame: Any) -> str:
    """Return the text of a response, which the last frame of the answer has."""
    return "".join(part["text"] for item in frame["response"]["output"] for part in item["content"])
