"""uvicorn's protocol of WebSockets, for large messages and an orderly shutdown."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from typing_extensions import override
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode
from websockets.http11 import Request
from websockets.utils import apply_mask

from ..arrivals import Arrivals
from ..errors import Overloaded
from ..handshake import ARRIVALS, FRAMES, PARTS
from ..request import PUSH
from ..text_frames import LONG, SHORT, TEXT
from .timeouts import ReadProtocol

# Seconds for a client to answer the end of its connection.
_CLOSING = 2.0
# The bytes of a frame that the parser reads in one step; a multiple of the length of a mask.
PIECE = 65_536
# The pieces of what arrives that are parsed in one step: most frames are two, a head and a text.
_PIECES = 64
# The bytes that a fragment takes in memory, in addition to its text.
_FRAGMENT = 64

# The bits of a frame's first two bytes (RFC 6455, 5.2).
_FIN, _OPCODE, _CONTROL, _MASKED, _LENGTH = 0x80, 0x0F, 0x08, 0x80, 0x7F
_MASK = 4
# The largest frame whose text is unmasked without a parser.
_SMALL = 16_384


class Splitter:
    """Splits large frames of a client into fragments, as their bytes arrive.

    A parser unmasks a frame in one step, and a step of 20 MB would block the event loop.

    Args:
        most: the largest message in bytes; the parser refuses a larger frame by its head.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # The bytes of a head that is incomplete; those that are left of a frame and of its piece.
        self._head = b""
        self._left = self._piece = 0
        self._mask = b""
        self._is_last = False

    @property
    def is_in_frame(self) -> bool:
        """True if a frame has begun whose rest has not arrived yet."""
        return bool(self._left or self._head)

    def whole(self, data: bytes) -> bytes | None:
        """Return the text of a frame of at most 16 KiB that is all that has arrived, unmasked.

        Most frames are such texts, and a parser takes thirty calls for each. None for other bytes,
        which `split` gets.
        """
        if self._left or self._head or not _MASK + 2 <= len(data) <= _SMALL or data[0] != TEXT:
            return None
        short, start = data[1] - _MASKED, 2 + _MASK
        size = short
        if short == SHORT:
            size, start = int.from_bytes(data[2:4], "big"), 4 + _MASK
        if len(data) != start + size or short == LONG or size > self._most:
            return None
        return apply_mask(data[start:], data[start - _MASK : start])

    def split(self, data: bytes) -> Iterator[bytes]:
        """Yield the bytes for the parser."""
        at = 0
        while at < len(data):
            if not self._left:
                self._head += data[at : at + 1]
                at += 1
                if len(self._head) == _length_of(self._head):
                    yield self._begun()
                    self._head = b""
                continue
            if not self._piece:
                yield self._fragment(0)
            taken = data[at : at + self._piece]
            at += len(taken)
            self._left -= len(taken)
            self._piece -= len(taken)
            yield taken

    def _begun(self) -> bytes:
        """Return the head of a frame, or of its first fragment."""
        head = self._head
        size = head[1] & _LENGTH
        if size >= SHORT:
            size = int.from_bytes(head[2 : 4 if size == SHORT else 10], "big")
        self._left = self._piece = size
        is_control = head[0] & _CONTROL
        if size <= PIECE or size > self._most or is_control or not head[1] & _MASKED:
            return head
        self._mask, self._is_last = head[-_MASK:], bool(head[0] & _FIN)
        return self._fragment(head[0] & ~_FIN)

    def _fragment(self, first: int) -> bytes:
        """Return the head of a fragment; all but the first have no opcode."""
        self._piece = size = min(self._left, PIECE)
        if size == self._left and self._is_last:
            first |= _FIN
        return bytes((first, _MASKED | LONG)) + size.to_bytes(8, "big") + self._mask


def _length_of(head: bytes) -> int:
    """Return the length of a head, as far as it is known."""
    if len(head) < 2:
        return 2
    more = {SHORT: 2, LONG: 8}.get(head[1] & _LENGTH, 0)
    return 2 + more + (_MASK if head[1] & _MASKED else 0)


class SocketProtocol(ReadProtocol, WebSocketsSansIOProtocol):
    """One connection of a client that has opened a WebSocket.

    Args:
        closed: called when the connection has closed.
    """

    def __init__(self, *arguments: Any, closed: Callable[[], None], **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._closed = closed
        self.close_timeout = _CLOSING
        self._splitter = Splitter(self.config.ws_max_size)
        # What has arrived and is not parsed yet.
        self._arrived: deque[Iterator[bytes]] = deque()
        # True while the client reads too slowly; a flag costs no call.
        self._is_full = False
        # What the app adds to the offer of frames (`ARRIVALS`).
        self._offer: dict[str, tuple[Arrivals, str]] = {}
        # The fragments of an incomplete message that are counted, and their bytes.
        self._seen = self._counted = 0

    @override
    def handle_connect(self, event: Request) -> None:
        """Offer the app to write the frames that it has made."""
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["extensions"][FRAMES] = self._offer

    @override
    def data_received(self, data: bytes) -> None:
        """Parse what arrives, or keep it until the app has read what is parsed already."""
        if not self.handshake_initiated:
            super().data_received(data)
            return
        if self._may_parse() and not self._arrived and self.conn.current_size is None:
            text = self._splitter.whole(data)
            if text is not None:
                self.frames, self.curr_msg_data_type = [text], "text"
                self.send_receive_event_to_app()
                return
        self._arrived.append(self._splitter.split(data))
        self._parse()

    def _may_parse(self) -> bool:
        """Return True if the app and the client have read what they got."""
        return self.queue.empty() and not self._is_full and not self.transport.is_closing()

    def _parse(self) -> None:
        """Parse a few frames: a client can send thousands of small ones at once.

        The others wait until the app has read these, and the client has read their answers.
        """
        # After the end only the client's answer to it is left to read.
        if self.close_sent or self._may_parse():
            pieces = [*islice(self._arrived[0], _PIECES)]
            if self.conn.parser_exc is None:
                super().data_received(b"".join(pieces))
                if self.frames and ARRIVALS in self._offer:
                    self._count()
            if len(pieces) < _PIECES:
                self._arrived.popleft()
            if self._arrived and (self.close_sent or self.queue.empty()):
                self.loop.call_soon(self._go_on)
        if self._arrived:
            self._pause()
        elif self.close_sent or self.queue.empty():
            self._resume()
            if self.conn.parser_exc is not None and not self._splitter.is_in_frame:
                self._end()

    def _count(self) -> None:
        """Count what has arrived of an incomplete message; without room, the connection ends."""
        arrivals, key = self._offer[ARRIVALS]
        new = self.frames[self._seen :]
        size = sum(map(len, new)) + _FRAGMENT * len(new)
        try:
            arrivals.add(key, None, size, is_first=False)
        except Overloaded as error:
            self.conn.fail(CloseCode.TRY_AGAIN_LATER, error.message)
            self.conn.parser_exc = error
            self.handle_parser_exception()
        else:
            self._seen += len(new)
            self._counted += size

    def _forget(self) -> None:
        """Make room for others: a message is complete, or its connection ends."""
        if self._counted:
            arrivals, key = self._offer[ARRIVALS]
            arrivals.remove(key, self._counted, bodies=0)
            self._seen = self._counted = 0

    def _end(self) -> None:
        """Have the client close the connection, whose answer to the end is not parsed."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _go_on(self) -> None:
        if self._arrived:
            self._parse()

    def _pause(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._is_full = True

    @override
    def resume_writing(self) -> None:
        self._is_full = False
        super().resume_writing()
        self._go_on()

    @override
    async def receive(self) -> Any:
        """Return the next message; reading continues when all that has arrived is parsed."""
        message = await self.queue.get()
        if self.queue.empty():
            if self._arrived:
                # Neither the queue nor the transport makes the app wait.
                await asyncio.sleep(0)
                self._go_on()
            else:
                self._resume()
        return message

    @override
    def send_receive_event_to_app(self) -> None:
        """Pass a message on; a large one in parts, which the app joins in a thread.

        Unlike uvicorn's, this does not pause reading, which takes two system calls for each message
        of an app that waits for it. `_parse` pauses if more arrives before the app takes it.
        """
        frames, self.frames = self.frames, []
        if self._counted:
            self._forget()
        if self.close_sent:
            return
        event: Any = {"type": "websocket.receive"}
        if self.curr_msg_data_type == "bytes":
            event["bytes"] = b"".join(frames)
        elif len(frames) > 1:
            event[PARTS] = frames
        else:
            try:
                event["text"] = frames[0].decode()
            except UnicodeDecodeError:
                self.conn.send_close(CloseCode.INVALID_DATA)
                self.handle_parser_exception()
                return
        self.queue.put_nowait(event)

    @override
    def handle_parser_exception(self) -> None:
        """Say why the connection ends; `_parse` drops what the client still sends.

        A socket that is closed with unread data is reset, and its client loses the reason.
        """
        self.frames = []
        self._forget()
        end = self.conn.close_sent
        assert end is not None
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": end.code, "reason": end.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = self.disconnected = True
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.end_reading()
        self._arrived.clear()
        self._forget()
        self._closed()

    @override
    async def send(self, message: Any) -> None:
        """Send a message, or frames as they are, as every token takes this path.

        A refused handshake is complete, although uvicorn logs that it is not.
        """
        frames = message.get(FRAMES)
        if frames is None:
            await super().send(message)
            if self.close_sent:
                self.handshake_complete = True
            return
        if self._is_full:
            await self.writable.wait()
        if self.close_sent or self.transport.is_closing():
            raise ClientDisconnected
        self.transport.write(frames)
        message[PUSH] = self.push

    def push(self, frames: bytes) -> bool:
        """Send frames at once (`PUSH`); a client that has left gets none.

        Returns:
            False if the client reads too slowly, or has left; `send` must send the next ones.
        """
        if self.close_sent or self.transport.is_closing():
            return False
        self.transport.write(frames)
        return not self._is_full

    @override
    def shutdown(self) -> None:
        """Leave an open connection to the app, which lets responses end; see `OpenAIAdapter`."""
        if self.close_sent or not self.handshake_complete:
            super().shutdown()
