"""The terminal of the commands: exit codes, signals, standard streams, output and progress.

Exit codes: 0 success, 1 a failed check, 2 wrong usage, 3 failed to start. Standard streams do not
fail if they are closed or full, or if their reader is gone: output that cannot be written is
dropped, since nobody reads it. The `output` of a command that is data is written, or the command
fails.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

import click

from ..errors import printable
from ..hub.names import in_units

EXIT_CHECK, EXIT_START = 1, 3
UNFINISHED = ".unfinished"
# What a server prints after a SIGHUP that can change nothing.
NO_FILE = "Latimer has no settings file to read again after SIGHUP; --config FILE names one."
# The bytes that a writable pipe accepts in one write (POSIX: PIPE_BUF is at least 512).
_PIECE = 512
_END = ord("\n")
# Seconds between two updates of a progress on a terminal, and between two lines elsewhere.
TERMINAL, ELSEWHERE = 0.2, 5.0


class WrongUse(click.ClickException):
    """An error in the settings of a command, with a message of one line."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


# The event of lines that a server prints once, and what a process is muted of.
START, ALL = "start", "all"
_muted = ""
_is_json = False
_LEVELS = ("debug", "info", "warning", "error")
_least = "debug"


def mute(what: str) -> None:
    """Print no more lines with `say` in this process, or none of the start, which were printed."""
    global _muted
    _muted = what


def print_json() -> None:
    """Print lines as JSON from now on, as the request log does."""
    global _is_json
    _is_json = True


def limit_log(level: str) -> None:
    """Print no lines below a level with `say` from now on, except for people on a terminal."""
    global _least
    _least = level


def say(line: str, event: str = "server", level: str = "info", **fields: Any) -> None:
    """Print a line for people, on standard error.

    Args:
        event, level: its event and level, where lines are JSON; `fields` are its other fields.
    """
    is_log = _is_json or not sys.stderr.isatty()
    if is_log and _LEVELS.index(level) < _LEVELS.index(_least):
        return
    if _muted != ALL and not (_muted == START and event == START):
        _print(line, level, event, fields)


def is_read() -> bool:
    """Return True if a person reads the lines of the start on a terminal."""
    return not _muted and not _is_json and sys.stderr.isatty()


def fail(message: str) -> NoReturn:
    """Print why the server cannot start, and end the process."""
    _print(f"Latimer cannot start: {message}", "error", "server", {})
    sys.exit(EXIT_START)


def _print(line: str, level: str, event: str, fields: Mapping[str, Any]) -> None:
    text = printable(line)
    if _is_json:
        # Commands that print text do not wait for its imports.
        from ..request_log import json_line

        text = json_line(line, level, event, fields)
    click.echo(text, err=True)


def end_at_once() -> None:
    """Let Ctrl-C and SIGTERM end the process immediately, with exit code 130 or 143 as in a shell.

    Python would first wait for a thread that loads a model in llama.cpp.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end_process)


def outlives_hangups() -> bool:
    """Return True if a SIGHUP without a settings file does not end this process.

    Programs that rotate logs send it. The hangup of a terminal ends the programs on it.
    """
    return os.name == "posix" and not os.isatty(0)


def _end_process(number: int, _frame: FrameType | None) -> None:
    # Engines that were started, if any.
    groups = sys.modules.get("latimer.backends.fleet.groups")
    if groups is not None:
        groups.kill_all()
    os._exit(128 + number)


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

    A stopped terminal, or a full pipe that nobody reads, would block the event loop. After a line
    that is there in part, such as on a full disk, the next one begins on a line of its own.
    """

    # True after data of which only the beginning was written; the bytes that are left to write.
    _is_cut, _left = False, 0

    def write(self, data: object) -> int:
        """Write all of the data, or drop the rest of it."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        whole = memoryview(b"\n" + view.tobytes()) if self._is_cut else view
        self._left = len(whole)
        with contextlib.suppress(OSError):
            self._write(whole)
        done = len(whole) - self._left
        if done:
            self._is_cut = self._left > 0 and whole[done - 1] != _END
        return len(view)

    def _write(self, view: memoryview) -> None:
        poll = select.poll() if hasattr(select, "poll") else None
        if poll is not None:
            poll.register(self.fileno(), select.POLLOUT)
        while view:
            if poll is not None and not poll.poll(0):
                return
            # The method of the file itself, which raises.
            count = io.FileIO.write(self, view[:_PIECE]) or 0
            if not count:
                return
            self._left -= count
            view = view[count:]


@contextlib.contextmanager
def output(path: Path | None) -> Iterator[BinaryIO]:
    """Open a file for writing, or standard output if there is no path.

    A file has its name only when it is whole, and only its owner may read it. If it cannot be
    written, the process ends.
    """
    draft: Path | None = None
    try:
        if path is None:
            file = strict_output()
        elif path.exists() and not path.is_file():
            # A pipe or a device.
            file = path.open("wb")
        else:
            draft = path.with_name(path.name + UNFINISHED)
            number = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            file = open(number, "wb")  # noqa: SIM115 (closed below)
        yield file
        file.flush()
        if path is not None:
            file.close()
            if draft is not None:
                draft.replace(path)
    except BrokenPipeError:
        # The reader, such as `head`, has enough.
        os._exit(0)
    except OSError as error:
        say(f"{'standard output' if path is None else path} cannot be written: {error.strerror}.")
        sys.exit(EXIT_START)
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def progress(words: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows a number of objects, if it is time to.

    Args:
        words: what is done with them, such as `exported`.
    """
    is_terminal = sys.stderr.isatty()
    pause = TERMINAL if is_terminal else ELSEWHERE
    following = time.monotonic() + pause
    is_shown = False

    def show(number: int) -> None:
        nonlocal following, is_shown
        now = time.monotonic()
        if now >= following:
            following, is_shown = now + pause, is_terminal
            # On a terminal, the line is written again from its beginning.
            start = "\r\x1b[K" if is_terminal else ""
            click.echo(f"{start}{number:,} objects {words}", err=True, nl=not is_terminal)

    try:
        yield show
    finally:
        if is_shown:
            click.echo("\r\x1b[K", err=True, nl=False)


class Download:
    """The progress of downloads on standard error: on a terminal one line that changes."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._label = ""
        self._begun = self._following = 0.0
        self._first = 0

    def say(self, line: str) -> None:
        """Print a line."""
        say(line)

    def show(self, label: str, done: int, total: int) -> None:
        """Show how much of a file is there, if it is time to."""
        now = time.monotonic()
        if label != self._label:
            self._label, self._begun, self._first = label, now, done
            self._following = now + TERMINAL
            if done < total:
                say(f"Downloads {label}. Ctrl-C keeps what is there; the next start continues it.")
        if now < self._following and done < total:
            return
        self._following = now + (TERMINAL if self._is_terminal else ELSEWHERE)
        rate = (done - self._first) / max(now - self._begun, 0.001)
        left = f", {(total - done) / rate:.0f} s left" if rate and done < total else ""
        line = (
            f"{printable(label)}: {100 * done // max(total, 1)} %, {in_units(done)} of "
            f"{in_units(total)}, {in_units(int(rate))}/s{left}"
        )
        start = "\r\x1b[K" if self._is_terminal else ""
        ends = not self._is_terminal or done >= total
        click.echo(start + line, err=True, nl=ends)
