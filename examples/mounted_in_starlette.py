"""Serve OpenAI's API under a prefix of a Starlette app, with a model in the same process.

    python examples/mounted_in_starlette.py

The base URL is http://127.0.0.1:8000/ai/v1.
"""

import sys

import uvicorn
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import LlamaCpp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route


async def home(request: Request) -> PlainTextResponse:
    """Return the app's own page."""
    return PlainTextResponse("Home")


# LlamaCpp() loads the bundled demo model, and LlamaCpp("model.gguf") one of yours.
ai = OpenAIAdapter(LlamaCpp())
app = Starlette(routes=[Route("/", home), Mount("/ai", ai)])

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
