"""A parser for server-sent events (sans-I/O).

Lines end with LF, CRLF or CR only. U+2028 and similar characters may appear in a data line, and
splitting on them corrupts events (WHATWG HTML, section 9.2.5).
"""

from __future__ import annotations

import re

from .errors import EngineError

_COMMENTS = re.compile(rb"^:[^\r\n]*\n", re.MULTILINE)
_BLANK_LINES = re.compile(rb"\n{3,}")
# Other valid fields, which are skipped.
_OTHER_FIELDS = frozenset({b"event", b"id", b"retry"})
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventParser:
    """A parser of chunks of any size into whole events; it skips comments and other fields.

    Args:
        max_event_size: the largest number of buffered bytes of an event.

    Attributes:
        is_idle: True if no event has begun.
    """

    __slots__ = ("_begun", "_data", "_limit", "_size", "is_idle")

    def __init__(self, max_event_size: int = 4 * 1024 * 1024) -> None:
        # An incomplete line; it grows in place.
        self._begun = bytearray()
        self._data: list[bytes] = []
        # The size of the lines in `_data`, with their ends.
        self._size = 0
        self._limit = max_event_size
        self.is_idle = True

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of each event that the chunk completes, lines joined by LF.

        Raises:
            EngineError: an event is larger than allowed.
        """
        if (
            self.is_idle
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and b"\r" not in chunk
        ):
            # Engines usually send whole events of one line each. One search in the joined events is
            # faster than a search in each, or than counting line ends.
            events = chunk[6:-2].split(b"\n\ndata: ")
            if b"\n" not in b"".join(events):
                return events
        events, self.is_idle = [], False
        # A CR at the end may be half of a CRLF. An incomplete line is not searched again.
        ends = _LINE_END.search(chunk) is not None or self._begun.endswith(b"\r")
        self._begun += chunk
        if ends:
            self._begun[:] = self._lines(bytes(self._begun), events)
        if len(self._begun) + self._size > self._limit:
            raise EngineError(f"The engine sent an event of more than {self._limit} bytes.")
        self.is_idle = not self._begun and not self._data
        return events

    def _lines(self, buffer: bytes, events: list[bytes]) -> bytes:
        """Read whole lines; return the bytes after the last one."""
        # The buffer starts with a line. Removing all comments and blank lines together is faster.
        buffer = _BLANK_LINES.sub(b"\n\n", _COMMENTS.sub(b"", buffer))
        start = 0
        if b"\r" not in buffer:
            while (end := buffer.find(b"\n", start)) >= 0:
                self._line(buffer[start:end], events)
                start = end + 1
        else:
            for match in _LINE_END.finditer(buffer):
                # A CR at the very end may be half of a CRLF: wait for the next byte.
                if match.group() == b"\r" and match.end() == len(buffer):
                    break
                self._line(buffer[start : match.start()], events)
                start = match.end()
        return buffer[start:]

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._size = 0
            return
        name, _, value = line.partition(b":")
        if name != b"data":
            if name and name not in _OTHER_FIELDS:
                # It may be a data line with a corrupt start, and skipping it would lose text.
                raise EngineError(f"The engine sent an invalid event line: {line[:100]!r}.")
            return
        self._data.append(value.removeprefix(b" "))
        self._size += len(line) + 1
