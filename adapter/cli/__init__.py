"""The commands `latimer serve`, `latimer check`, `latimer conform` and `latimer store`."""

from .commands import main

__all__ = ["main"]
