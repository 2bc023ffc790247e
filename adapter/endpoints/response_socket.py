"""`GET /v1/responses` as a WebSocket (contract of responses over WebSocket).

Each frame that asks for a response is a request of its own: it passes through the app like a POST,
and the events of its stream are the frames of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from ...backends import offload
from ...backends.errors import LatimerError
from ..errors import Header, InvalidRequest, ShuttingDown, render, unexpected
from ..handshake import ARRIVALS, FRAMES, PARTS, shared_scope, subprotocol_of
from ..request import FRAME, PUSH, object_of
from ..responses.lanes import DEFAULT, Create, Lanes, create_of, lane_of
from ..service import Service
from ..text_frames import frames_of, with_end

log = logging.getLogger("latimer")

_STEER = "response.steer"
# The frames of a connection may take so many times the size of the largest body.
_BODIES = 2
# The headers of an error that its frame has, too: when to send the request again.
_SHOWN = frozenset((b"retry-after", b"retry-after-ms"))
# The start of the headers that the first frame of a response has, too: what had no effect, and
# which engine answers.
_NOTES = b"x-latimer-"
# The start of an event and what is between two, if each is a line of data; and what finds the texts
# of any events.
_DATA = b"data: "
_BETWEEN = b"\n\n" + _DATA
_TEXT = re.compile(rb"^data: (.*)", re.MULTILINE)


class _End(NamedTuple):
    """The reason for which a connection closes, once no response runs.

    Args:
        error: what frames get from now on that ask for a response.
        is_sent: True if the client gets the error before the end, too.
    """

    code: int
    reason: str
    error: LatimerError
    is_sent: bool = False


def _shutdown() -> _End:
    return _End(1001, "The server is shutting down.", ShuttingDown())


def expiry(seconds: float) -> _End:
    """Return the end of a connection that has lived for its time."""
    minutes = f"{seconds / 60:g} minutes"
    error = InvalidRequest(
        f"Responses websocket connection limit reached ({minutes}). Create a new websocket "
        "connection to continue.",
        code="websocket_connection_limit_reached",
    )
    return _End(1000, f"The connection is {minutes} old.", error, is_sent=True)


async def serve_frames(
    socket: WebSocket, service: Service, app: ASGIApp, receive: Receive, send: Send
) -> None:
    """Answer the frames of a WebSocket until it closes.

    Args:
        app: the app that answers the requests of the frames.
        receive, send: pass messages of the connection. Every frame and token takes this path, and
            the checks of `WebSocket` would be a coroutine more.
    """
    scope = socket.scope
    if FRAMES in (scope.get("extensions") or ()):
        key = scope["state"]["key_digest"] or ""
        scope["extensions"][FRAMES][ARRIVALS] = service.arrivals, key
    await socket.accept(subprotocol_of(scope))
    await _Connection(socket, service, app, receive, send).run()


class _Connection:
    """A WebSocket that is open; see `service.Socket`.

    Attributes:
        raw_send: sends a message of the connection.
        takes_frames: True if the server writes the frames that it gets.
        is_gone: True if the client has left, or the connection has closed.
        gone: the same, as an event.
    """

    def __init__(
        self, socket: WebSocket, service: Service, app: ASGIApp, receive: Receive, send: Send
    ) -> None:
        self._socket = socket
        self._shared = shared_scope(socket.scope)
        self._receive = receive
        self.raw_send = send
        self.takes_frames = FRAMES in (socket.scope.get("extensions") or ())
        self._service = service
        # A character takes at most four bytes.
        self._short = min(offload.SMALL, service.max_body) // 4
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._lanes = Lanes(_BODIES * service.max_body)
        self._turns = service.kept.of_connection()
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: _End | None = None
        self.gone = asyncio.Event()
        self.is_gone = False

    @property
    def is_idle(self) -> bool:
        """True if no response runs or waits."""
        return self._lanes.is_idle

    def drain(self) -> None:
        """Close the connection when what runs has ended; from any thread."""
        self._loop.call_soon_threadsafe(self._begin_end, _shutdown())

    async def run(self) -> None:
        """Answer frames until the connection closes."""
        service, seconds = self._service, self._service.socket_lifetime
        service.sockets.add(self)
        timer = self._loop.call_later(seconds, self._begin_end, expiry(seconds))
        if service.is_draining:
            self._begin_end(_shutdown())
        self._reader = self._loop.create_task(self._read())
        try:
            await asyncio.wait([self._reader])
            if not self._reader.cancelled():
                self._reader.result()
        except asyncio.CancelledError:
            if not service.has_ended:
                raise
            await self._shut_down()
        except Exception:
            log.exception("a WebSocket failed")
            await self._close(1011, "")
        finally:
            timer.cancel()
            service.sockets.discard(self)
            self._reader.cancel()
            self.leave()
            self._lanes.clear()
            await self._settle()
            self._turns.clear()

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self.leave()
                return
            lane = DEFAULT
            try:
                text: str | None = message.get("text")
                if text is not None and len(text) <= self._short:
                    # Most frames are short, which saves them two calls.
                    data = text.encode()
                    frame, size = object_of([data]), len(data)
                else:
                    frame, size = await self._parsed(message)
                if frame.get("stream_id") is not None:
                    lane = lane_of(frame)
                if frame.get("type") == _STEER:
                    await self.send(_not_steered(frame))
                    continue
                create = create_of(frame, size, lane, self._turns)
                if create is None:
                    continue
                if self._end is not None:
                    await self._send_error(self._end.error, lane)
                    continue
                if self._lanes.begins(create):
                    self._later(self._respond(create))
                    continue
                self._lanes.add(create)
            except LatimerError as error:
                await self._send_error(error, lane)
                # A flood of wrong frames leaves the event loop to others.
                await asyncio.sleep(0)
                continue
            except _TooLarge:
                await self._close(1009, f"A message may have {self._service.max_body} bytes.")
                return
            self._run_next()

    async def _parsed(self, message: Message) -> tuple[dict[str, Any], int]:
        """Return the object in a text frame, and the size of the frame in bytes.

        Raises:
            InvalidRequest: there is none.
            _TooLarge: the frame is larger than a body may be.
        """
        text, parts = message.get("text"), message.get(PARTS, ())
        if text is None and not parts:
            raise InvalidRequest("Expected a text frame with a JSON object, but got a binary one.")
        size = len(text or "") + sum(map(len, parts))
        most = self._service.max_body
        if size > most:
            raise _TooLarge
        if size <= offload.SMALL:
            return _object(text, parts, most)
        return await offload.run(size, _object, text, parts, most)

    def _run_next(self) -> None:
        """Begin the responses whose turn it is."""
        for frame in self._lanes.start():
            self._later(self._respond(frame))

    async def _respond(self, frame: Create) -> None:
        answer = _Answer(self, frame)
        frame.write = answer.write
        if self.takes_frames and not frame.lane:
            frame.write_frames = answer.write_frames
        try:
            shared = self._shared
            own = {"headers": [*shared["headers"]], "state": {**shared["state"]}, FRAME: frame}
            await self._app({**shared, **own}, answer.receive, answer.send)
        except Exception:
            # The app has logged it.
            await answer.fail()
        finally:
            self._lanes.end(frame)
            frame.offer = None
            if not frame.has_succeeded:
                self._turns.fail(frame)
            if self._lanes.waiting:
                self._run_next()
            if self._end is not None:
                self._close_when_idle(self._end)

    async def send(self, text: str) -> None:
        """Send a frame, unless the client has left."""
        if self.is_gone:
            return
        try:
            await self.raw_send({"type": "websocket.send", "text": text})
        except (OSError, RuntimeError):
            self.leave()

    def leave(self) -> None:
        """Note that the client has left: servers raise one error or another then."""
        self.is_gone = True
        self.gone.set()

    async def _send_error(self, error: LatimerError, lane: str) -> None:
        status, body, headers = render(error)
        await self.send(_error_frame(status, body, headers, lane))

    def _begin_end(self, end: _End) -> None:
        """Close the connection when what runs has ended; what waits is refused."""
        if self._end is None:
            self._end = end
            refused = self._lanes.clear()
            for frame in refused:
                self._later(self._send_error(end.error, frame.lane))
            self._close_when_idle(end)

    def _close_when_idle(self, end: _End) -> None:
        if self._lanes.is_idle and not self.is_gone:
            self._later(self._finish(end))

    def _later(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, end: _End) -> None:
        if end.is_sent:
            await self._send_error(end.error, DEFAULT)
        await self._close(end.code, end.reason)

    async def _close(self, code: int, reason: str) -> None:
        if self.is_gone:
            return
        self.leave()
        with suppress(WebSocketDisconnect, WebSocketDisconnected):
            await self._socket.close(code, reason)
        self._reader.cancel()

    async def _shut_down(self) -> None:
        """Let the responses that run end with the reason, and close the connection."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        for one in self._tasks:
            one.cancel()
        await self._settle()
        end = _shutdown()
        await self._close(end.code, end.reason)

    async def _settle(self) -> None:
        """Wait until nothing runs; a cancellation ends what runs."""
        try:
            while self._tasks:
                await asyncio.wait([*self._tasks])
        except asyncio.CancelledError:
            for one in self._tasks:
                one.cancel()
            raise


class _TooLarge(Exception):
    """A frame that is larger than a body may be."""


class _Answer:
    """The response to a frame: the events of its stream, or its error."""

    def __init__(self, connection: _Connection, frame: Create) -> None:
        self._connection, self._frame = connection, frame
        lane = frame.lane
        self._send = connection.raw_send
        self._lane = lane
        self._takes_frames = connection.takes_frames
        # The end of every event of a lane names it, and that of the first event has the notes.
        self._end = b',"stream_id":"%b"}' % lane.encode() if lane else b""
        self._notes = b""
        self._is_read = False
        self._status = 0
        self._headers: Sequence[Header] = ()
        self._body = b""

    async def receive(self) -> Message:
        """Return what the app gets of the request: no body, and then the end of the connection."""
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._connection.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send what the app answers."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
            notes: dict[str, str] = {}
            for name, value in self._headers:
                if name.startswith(_NOTES):
                    notes[name.decode()] = value.decode()
            if notes:
                self._notes = b',"headers":%b}' % orjson.dumps(notes)
            return
        body = message.get("body", b"")
        if self._status == 200:
            # A middleware may have changed the body.
            events = [b"%b%b\n\n" % (_DATA, text) for text in _TEXT.findall(body)]
            if events:
                await self.write(b"".join(events))
            return
        self._body += body
        if not message.get("more_body", False):
            frame = _error_frame(self._status, orjson.loads(self._body), self._headers, self._lane)
            await self._connection.send(frame)

    async def write(self, body: bytes, _more: bool = True) -> None:
        """Send the events in a part of a stream's body, as `SocketEncoder` makes them.

        A token is one call here.
        """
        if self._connection.is_gone:
            return
        texts = body[len(_DATA) : -2].split(_BETWEEN)
        if self._notes:
            texts[0] = texts[0][:-1] + self._notes
            self._notes = b""
        if self._end:
            texts = [text[:-1] + self._end for text in texts]
        try:
            if self._takes_frames:
                await self._send({"type": "websocket.send", FRAMES: frames_of(texts)})
            else:
                for text in texts:
                    await self._send({"type": "websocket.send", "text": text.decode()})
        except (OSError, RuntimeError):
            self._connection.leave()

    async def write_frames(self, frames: bytes, _more: bool = True) -> None:
        """Send the events in a part of a stream's body, as `FrameEncoder` makes them.

        A token is one call here.
        """
        if self._connection.is_gone:
            return
        if self._notes:
            frames = with_end(frames, self._notes)
            self._notes = b""
        try:
            message = {"type": "websocket.send", FRAMES: frames}
            await self._send(message)
            if self._frame.offer is not None and PUSH in message:
                self._frame.offer(message[PUSH])  # type: ignore[arg-type]
                self._frame.offer = None
        except (OSError, RuntimeError):
            self._connection.leave()

    async def fail(self) -> None:
        """Send the error of an unexpected exception."""
        status, body = unexpected()
        await self._connection.send(_error_frame(status, body, (), self._lane))


def _object(text: str | None, parts: Sequence[bytes], most: int) -> tuple[dict[str, Any], int]:
    data = b"".join(parts) if text is None else text.encode()
    if len(data) > most:
        raise _TooLarge
    return object_of([data]), len(data)


def _error_frame(status: int, body: Mapping[str, Any], headers: Sequence[Header], lane: str) -> str:
    """Return the frame of an error."""
    frame: dict[str, Any] = {"type": "error", "status": status}
    if lane:
        frame["stream_id"] = lane
    frame["error"] = body["error"]
    shown = {name.decode(): value.decode() for name, value in headers if name in _SHOWN}
    if shown:
        # Codex reads them next to the error, and OpenAI's SDKs in it.
        frame["headers"] = shown
        frame["error"] = {**body["error"], "headers": shown}
    return orjson.dumps(frame).decode()


def _not_steered(frame: Mapping[str, Any]) -> str:
    """Return the answer to a frame that would steer a response which runs."""
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "This server does not steer responses. Send the input in the next response.",
    }
    steer = {name: frame.get(name, "") for name in ("previous_response_id", "input")}
    answer = {"type": f"{_STEER}.failed", "sequence_number": 0, "steer": steer, "error": error}
    return orjson.dumps(answer).decode()
