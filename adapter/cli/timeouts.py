"""Timeouts of a client's connection, which tests can change.

Unix sockets have none: their peers are other workers of this server, or its operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any

from typing_extensions import override

if sys.platform != "win32":
    import fcntl
    import termios

log = logging.getLogger("latimer")

# Seconds for the head of a request, from its first byte on or from that of the connection; and
# without progress of its body.
REQUEST = 60.0
# Seconds between looks at a connection, at most.
LOOK = 5.0
# At the end of the server: the seconds in which an idle connection may bring a last request, and
# those for the rest of a head that has begun.
LAST, LAST_HEAD = 0.1, 1.0
# Seconds without progress after which a connection closes whose client does not read. A client's
# system confirms what a slow one reads in steps, on Linux of some 350 KB.
UNREAD = 300.0
# The parts of this time after each of which the progress is measured.
_LOOKS = 6


def unread(transport: asyncio.Transport) -> int:
    """Return the bytes that were written and that the client's machine has not confirmed.

    The buffer of the transport alone would shrink in large steps only: the kernel accepts the next
    bytes when a third of its own buffer is free, which can be megabytes.
    """
    size = transport.get_write_buffer_size()
    connection = transport.get_extra_info("socket")
    if sys.platform != "win32" and connection is not None:
        # A closed connection has nothing left.
        with contextlib.suppress(OSError, ValueError):
            queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
            size += int.from_bytes(queued, sys.byteorder)
    return size


class ReadProtocol(asyncio.Protocol):
    """A protocol that aborts its connection when the client reads nothing for `UNREAD` seconds.

    The requests of the connection then end as if the client had disconnected. A timer exists only
    while data waits that the client could have read.
    """

    transport: asyncio.Transport
    client: tuple[str, int] | None
    # The latest request, whose client is the one behind trusted proxies.
    scope: Any
    _reading: asyncio.TimerHandle | None = None
    # The unconfirmed bytes at the last look, and the looks since then.
    _unconfirmed = _looks = 0

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self.await_reading()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self.end_reading()

    def await_reading(self) -> None:
        """Abort the connection if the client does not read what is written, or at most slowly."""
        if self._reading is None and self.client is not None:
            self._unconfirmed, self._looks = unread(self.transport), 0
            self._look_later()

    def end_reading(self) -> None:
        """End the timer."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._reading = loop.call_later(UNREAD / _LOOKS, self._look)

    def _look(self) -> None:
        """Abort the connection after a number of looks without progress."""
        self._reading = None
        left = unread(self.transport)
        self._looks = 0 if left < self._unconfirmed else self._looks + 1
        self._unconfirmed = left
        if self._looks >= _LOOKS:
            self._cut()
        elif self.transport.get_write_buffer_size():
            self._look_later()

    def _cut(self) -> None:
        """Abort the connection; the line of its request says only that the client has left."""
        client = self.client if self.scope is None else self.scope["client"]
        address = client[0] if client else ""
        log.info(
            "the connection of the client %s was closed: it has read nothing for %g s", address,
            UNREAD, extra={"event": "client_cut", "fields": {"client": address, "seconds": UNREAD}},
        )  # fmt: skip
        self.transport.abort()
