"""Progress of a long command on standard error: one line that changes, or a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import click

# Seconds between two updates on a terminal, and between two lines elsewhere.
TERMINAL, ELSEWHERE = 0.2, 5.0


class Progress:
    """The progress of a command.

    Args:
        words: what is done, such as `exported`.
    """

    def __init__(self, words: str) -> None:
        self._words = words
        self._is_terminal = sys.stderr.isatty()
        self._pause = TERMINAL if self._is_terminal else ELSEWHERE
        self._next = time.monotonic() + self._pause
        self._shown = False

    def __call__(self, number: int, total: int | None = None) -> None:
        """Show a number of objects, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._pause
        of = f" of about {total:,}" if total else ""
        self._show(f"{number:,}{of} objects {self._words}")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if self._shown:
            self._show("")

    def _show(self, text: str) -> None:
        if self._is_terminal:
            # The line is written again from its beginning.
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self._shown = bool(text)
        else:
            click.echo(text, err=True)
