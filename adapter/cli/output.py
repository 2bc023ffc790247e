"""The output of a command that is data: every line is written, or the command fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import click

from ..errors import printable
from .exits import EXIT_START
from .standard_streams import strict_output

UNFINISHED = ".unfinished"


class Output:
    """A file, or standard output.

    A file has its name only when it is whole, and only its owner may read it.

    Args:
        path: None for standard output.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._draft: Path | None = None
        self._file: BinaryIO

    def __enter__(self) -> Output:
        with self._errors():
            if self._path is None:
                self._file = strict_output()
            elif self._path.exists() and not self._path.is_file():
                # A pipe or a device.
                self._file = self._path.open("wb")
            else:
                self._draft = self._path.with_name(self._path.name + UNFINISHED)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                self._file = open(os.open(self._draft, flags, 0o600), "wb")
        return self

    def write(self, lines: Iterable[bytes]) -> None:
        """Write lines, which have no line ends."""
        with self._errors():
            for line in lines:
                self._file.write(line + b"\n")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        with self._errors():
            self._file.flush()
            if self._path is not None:
                self._file.close()
            if self._draft is not None and kind is None:
                self._draft.replace(self._path or self._draft)
        if self._draft is not None and kind is not None:
            self._draft.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # The reader, such as `head`, has enough.
            os._exit(0)
        except OSError as error:
            if self._draft is not None:
                self._draft.unlink(missing_ok=True)
            where = "standard output" if self._path is None else str(self._path)
            click.echo(printable(f"{where} cannot be written: {error.strerror}."), err=True)
            sys.exit(EXIT_START)
