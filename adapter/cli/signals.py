"""Signals before anything is served, and after."""

from __future__ import annotations

import os
import signal
from types import FrameType


def end_at_once() -> None:
    """Let Ctrl-C and SIGTERM end the process at once, with 130 and 143 as a shell would show them.

    Python would first wait for a thread that loads a model inside llama.cpp.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
