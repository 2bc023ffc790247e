"""Exit codes of the commands: 0 success, 1 a failed check, 2 wrong usage, 3 failed to start."""

from __future__ import annotations

import click

from ..errors import printable

EXIT_CHECK, EXIT_START = 1, 3


class WrongUse(click.ClickException):
    """An error in the settings of a command, with a message of one line."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
