"""The frames of a WebSocket at `/responses`: their lanes, and what a connection keeps of them.

A client's frame asks for a response. Frames of one lane are answered one after another, and lanes
at the same time (contract of responses over WebSocket, 2 to 6). No function here does I/O.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from ..errors import InvalidRequest, missing, unsupported, wrong_type

# OpenAI's limits of a connection: lanes with a name, and responses that run.
MOST_LANES, MOST_RUNNING = 32, 16
# Frames that wait for their turn; a client that sends more has not read the answers.
MOST_WAITING = 64
# The bytes of the latest responses of all connections.
MOST_KEPT = 64 << 20
# The name of the lane of frames without a `stream_id`.
DEFAULT = ""

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_SERVED = "response.create"
# A client says that it has processed a response, which needs no answer.
_SILENT = "response.processed"


@dataclass(slots=True, eq=False)
class Create:
    """A frame that asks for a response.

    Args:
        body: the body of the same request over HTTP, which streams.
        size: the size of the frame in bytes.
        lane: its lane; `DEFAULT` without a `stream_id`.
        generates: False to evaluate the prompt only.
        turns: the latest responses of the frame's connection.

    Attributes:
        has_succeeded: True if the response was completed, or is incomplete.
        write: sends the events in a part of the response's body (`Exchange.write`).
        write_frames: sends events that are frames; None if the server makes the frames, or if the
            events name a lane.
        offer: gets a function that sends more of them at once (`Exchange.push`), when the first
            ones were sent; None if the server has no such function.
    """

    body: dict[str, Any]
    size: int
    lane: str
    generates: bool
    turns: Turns
    has_succeeded: bool = False
    write: Callable[..., Awaitable[None]] | None = None
    write_frames: Callable[..., Awaitable[None]] | None = None
    offer: Callable[[Callable[[bytes], bool]], None] | None = None

    @property
    def previous(self) -> object:
        """The id of the response that it continues, as the client sent it."""
        return self.body.get("previous_response_id")


def lane_of(frame: Mapping[str, Any]) -> str:
    """Return the lane of a frame.

    Raises:
        InvalidRequest: its `stream_id` is invalid.
    """
    name = frame.get("stream_id")
    if name is None:
        return DEFAULT
    if not isinstance(name, str) or not _STREAM_ID.fullmatch(name):
        raise InvalidRequest(
            "The 'stream_id' field must be a non-empty string with at most 256 characters and may "
            "only contain letters, numbers, underscores, hyphens, and periods.",
            "stream_id",
            "invalid_stream_id",
        )
    return name


def create_of(frame: dict[str, Any], size: int, lane: str, turns: Turns) -> Create | None:
    """Return what a frame of a lane asks for; None if it needs no answer.

    Raises:
        InvalidRequest: the frame is of another type, or has a field that no WebSocket serves.
    """
    body = dict(frame)
    kind = body.pop("type", None)
    if kind is None:
        raise missing("type")
    if kind == _SILENT:
        return None
    if kind != _SERVED:
        shown = kind if isinstance(kind, str) and len(kind) <= 64 else "…"
        raise InvalidRequest(
            f"Invalid value: '{shown}'. Supported values are: '{_SERVED}' and '{_SILENT}'.",
            "type",
            "invalid_value",
        )
    body.pop("stream_id", None)
    generates = body.pop("generate", None)
    if generates is not None and not isinstance(generates, bool):
        raise wrong_type("generate", "a boolean", generates)
    if body.get("background"):
        raise unsupported("background", "Send the request with POST instead, or omit it.")
    if body.get("stream") is None or isinstance(body["stream"], bool):
        # A response over a WebSocket is always a stream.
        body["stream"] = True
    return Create(body, size, lane, generates is not False, turns)


class Lanes:
    """The frames of one connection that run or wait.

    Args:
        most: the bytes of frames that run or wait, unless there is only one.

    Attributes:
        waiting: the frames that wait, the first to come first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._names: set[str] = set()
        self._busy: set[str] = set()
        self.waiting: deque[Create] = deque()

    @property
    def is_idle(self) -> bool:
        """True if no frame runs or waits."""
        return not self._busy and not self.waiting

    def begins(self, frame: Create) -> bool:
        """Return True if a frame runs from now on, because no other one runs or waits.

        Most connections have one response at a time, which saves 80 instructions.
        """
        if self._busy or self.waiting or frame.lane:
            return False
        self._busy.add(frame.lane)
        self._size += frame.size
        return True

    def add(self, frame: Create) -> None:
        """Let a frame wait for its turn.

        Raises:
            InvalidRequest: the connection has too many lanes, or too many frames wait.
        """
        if frame.lane != DEFAULT and frame.lane not in self._names:
            if len(self._names) >= MOST_LANES:
                raise InvalidRequest(
                    "This WebSocket connection has reached its maximum number of distinct stream "
                    f"IDs ({MOST_LANES}). Reuse an existing stream_id or open a new WebSocket "
                    "connection.",
                    "stream_id",
                    "websocket_stream_limit_reached",
                )
            self._names.add(frame.lane)
        is_full = self._size + frame.size > self._most and not self.is_idle
        if is_full or len(self.waiting) >= MOST_WAITING:
            raise InvalidRequest(
                f"Too many requests wait on this WebSocket connection: at most {MOST_WAITING}, and "
                f"{self._most} bytes of all that run or wait. Read their responses first.",
                code="websocket_queue_full",
                status=429,
            )
        self._size += frame.size
        self.waiting.append(frame)

    def start(self) -> Sequence[Create]:
        """Return the frames whose turn it is, which run from now on."""
        found: list[Create] = []
        for frame in self.waiting:
            if len(self._busy) < MOST_RUNNING and frame.lane not in self._busy:
                self._busy.add(frame.lane)
                found.append(frame)
        for frame in found:
            self.waiting.remove(frame)
        return found

    def end(self, frame: Create) -> None:
        """Note that the response to a frame has ended."""
        self._busy.discard(frame.lane)
        self._size -= frame.size

    def clear(self) -> Sequence[Create]:
        """Return the frames that wait, which then wait no longer."""
        found = [*self.waiting]
        self.waiting.clear()
        self._size -= sum(frame.size for frame in found)
        return found


class Kept(NamedTuple):
    """A response that its connection can continue.

    Args:
        id: the id of the response.
        chain: the id of the first response that it continues, or its own.
        items: the items of each turn up to this one, as JSON lists; its output is in the last.
        is_stored: True if the store has it too, with all turns before it.
        size: the bytes of all its items.
    """

    id: str
    chain: str
    items: tuple[bytes, ...]
    is_stored: bool
    size: int


class KeptTurns:
    """The latest responses of the lanes of all connections; the longest unused are forgotten.

    Args:
        most: the bytes of all of them.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[int, str], Kept] = OrderedDict()
        self._numbers = count()
        self.size = 0

    def of_connection(self) -> Turns:
        """Return the place of a new connection."""
        return Turns(self, next(self._numbers))

    def put(self, key: tuple[int, str], kept: Kept) -> None:
        """Keep a response instead of the one before it."""
        before = self._kept.pop(key, None)
        if before is not None:
            self.size -= before.size
        if kept.size > self._most:
            return
        self._kept[key] = kept
        self.size += kept.size
        while self.size > self._most:
            self.drop(next(iter(self._kept)))

    def get(self, key: tuple[int, str]) -> Kept | None:
        """Return a response, if it is still kept."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
        return kept

    def drop(self, key: tuple[int, str]) -> None:
        """Forget a response."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self.size -= kept.size


class Turns:
    """The latest response of each lane of one connection; see `KeptTurns`."""

    def __init__(self, kept: KeptTurns, number: int) -> None:
        self._kept = kept
        self._number = number
        # The ids of the latest responses, by lane.
        self._ids: dict[str, str] = {}

    def keep(self, lane: str, kept: Kept) -> None:
        """Keep the latest response of a lane."""
        self._ids[lane] = kept.id
        self._kept.put((self._number, lane), kept)

    def find(self, name: object) -> Kept | None:
        """Return the response with an id, if it is the latest of a lane."""
        for lane, kept in self._ids.items():
            if kept == name:
                return self._kept.get((self._number, lane))
        return None

    def fail(self, frame: Create) -> None:
        """Forget the response that a failed frame has continued on its own lane."""
        latest = self._ids.get(frame.lane)
        if latest is not None and latest == frame.previous:
            self._drop(frame.lane)

    def clear(self) -> None:
        """Forget all responses: the connection has ended."""
        for lane in [*self._ids]:
            self._drop(lane)

    def _drop(self, lane: str) -> None:
        del self._ids[lane]
        self._kept.drop((self._number, lane))
