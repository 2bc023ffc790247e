"""koboldcpp through its native API."""

from .backend import KoboldCpp

__all__ = ["KoboldCpp"]
