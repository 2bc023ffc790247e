"""OpenAI's API as an ASGI app and as middleware, over any backend.

from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_server import LlamaServer

app = OpenAIAdapter(LlamaServer("http://127.0.0.1:8080"))
"""

from .app import OpenAIAdapter, OpenAIMiddleware

__all__ = ["OpenAIAdapter", "OpenAIMiddleware"]
