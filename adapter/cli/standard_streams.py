"""Standard streams that nothing can go wrong with: closed, full, or with a reader that left.

What cannot be written is dropped, as nobody reads it.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys

# Bytes that a pipe takes at once when it takes any (PIPE_BUF on Linux; POSIX promises 512).
_PIECE = 512


def secure() -> None:
    """Make standard output and standard error streams that never raise, and never wait for logs.

    A stream that somebody else has put in their place stays.
    """
    _occupy()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Dropping(1, "w", closefd=False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Impatient(2, "w", closefd=False))


def _occupy() -> None:
    """Open the null device for each standard descriptor that is closed.

    The next file or socket would get its number otherwise, and what a library in C prints.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number is taken, which is this one.
            os.open(os.devnull, os.O_RDWR)


def _text(raw: io.RawIOBase) -> io.TextIOWrapper:
    # Buffered by line, so that a line is one write.
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)


class _Dropping(io.FileIO):
    """A file that drops what it cannot take."""

    def write(self, data: object) -> int:
        """Write all of the data, or drop the rest of it."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        with contextlib.suppress(OSError):
            self._write(view)
        return len(view)

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[super().write(view) or len(view) :]


class _Impatient(_Dropping):
    """A file that drops what it cannot take at once.

    A terminal that was stopped, or a full pipe that nobody reads, would stop the event loop.
    """

    def _write(self, view: memoryview) -> None:
        if not hasattr(select, "poll"):
            super()._write(view)
            return
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        while view:
            if not poll.poll(0):
                return
            super()._write(view[:_PIECE])
            view = view[_PIECE:]
