"""llama-server through its native `POST /completion`."""

from .backend import LlamaServer

__all__ = ["LlamaServer"]
