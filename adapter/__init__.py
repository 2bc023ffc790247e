"""OpenAI's API as an ASGI app and as middleware, over any backend.

from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_server import LlamaServer

app = OpenAIAdapter(LlamaServer("http://127.0.0.1:8080"))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .app import OpenAIAdapter, OpenAIMiddleware

__all__ = ["OpenAIAdapter", "OpenAIMiddleware"]


def __getattr__(name: str) -> object:
    # `latimer --help` needs neither class, and both import pydantic and Jinja.
    if name in __all__:
        from . import app

        return getattr(app, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
