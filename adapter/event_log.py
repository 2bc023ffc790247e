"""The events of a response that runs in the background, for readers that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

_END = b"\n\n"
# Comments keep a connection open; they are not events of the response.
_COMMENT = b":"


class EventLog:
    """A growing list of numbered events.

    Attributes:
        size: the bytes of all events.
        has_ended: True if no event follows.
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._news = asyncio.Event()
        self.size = 0
        self.has_ended = False

    @property
    def count(self) -> int:
        """The number of events so far."""
        return len(self._events)

    def add(self, data: bytes) -> None:
        """Add whole events; JSON contains no line ends, so each empty line ends an event."""
        new = [part + _END for part in data.split(_END) if part and not part.startswith(_COMMENT)]
        self._events += new
        self.size += sum(map(len, new))
        if new:
            self._wake()

    def after(self, number: int) -> bytes:
        """Return the events after the one with a number."""
        return b"".join(self._events[number + 1 :])

    def end(self) -> None:
        """End the log; its readers then end."""
        self.has_ended = True
        self._wake()

    async def read(self, after: int, seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the events after the one with a number, as they are added.

        Args:
            seconds: the time without an event after which it yields nothing, as empty bytes, so
                that the reader can show that it is there; 0 for never.
        """
        at = after + 1
        while True:
            new = self._events[at:]
            if new:
                at += len(new)
                yield b"".join(new)
            elif self.has_ended:
                return
            else:
                try:
                    async with asyncio.timeout(seconds or None):
                        await self._news.wait()
                except TimeoutError:
                    yield b""

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
