"""Standard streams that do not fail if they are closed or full, or if their reader is gone.

Output that cannot be written is dropped, since nobody reads it.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import BinaryIO

# The bytes that a writable pipe accepts in one write (POSIX: PIPE_BUF is at least 512).
_PIECE = 512


def secure() -> None:
    """Replace standard output and standard error with streams that never raise.

    Standard error also never waits. A stream that is already replaced stays.
    """
    _occupy()
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text(_Dropping(1, "w", closefd=False))
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text(_Impatient(2, "w", closefd=False))


def strict_output() -> BinaryIO:
    """Return standard output for data that must not be dropped: writing can raise an OSError."""
    sys.stdout.flush()
    if isinstance(getattr(sys.stdout.buffer, "raw", None), _Dropping):
        return open(1, "wb", closefd=False)
    return sys.stdout.buffer


def _occupy() -> None:
    """Open the null device for each standard descriptor that is closed.

    Otherwise the next file or socket gets its number, and with it the output of C libraries.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` takes the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)


def _text(raw: io.RawIOBase) -> io.TextIOWrapper:
    # Buffered by line, so that a line is one write.
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)


class _Dropping(io.FileIO):
    """A file that drops the data that it cannot write."""

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
    """A file that drops the data that it cannot write immediately.

    A stopped terminal, or a full pipe that nobody reads, would block the event loop.
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
