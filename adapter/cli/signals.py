"""Handle signals while no server runs."""

from __future__ import annotations

import os
import signal
from types import FrameType


def end_at_once() -> None:
    """Let Ctrl-C and SIGTERM end the process immediately, with exit code 130 or 143 as in a shell.

    Python would first wait for a thread that loads a model in llama.cpp.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
