"""Answer the paths of OpenAI's API in front of an app, and pass everything else on to it.

python examples/as_middleware.py
"""

import sys

import uvicorn
from latimer.adapter import OpenAIMiddleware
from latimer.backends.llama_cpp import LlamaCpp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route


async def home(request: Request) -> PlainTextResponse:
    """Return the app's own page."""
    return PlainTextResponse("Home")


app = OpenAIMiddleware(Starlette(routes=[Route("/", home)]), LlamaCpp())

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
