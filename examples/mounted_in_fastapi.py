"""Serve OpenAI's API under a prefix of a FastAPI app, with an API key.

    python examples/mounted_in_fastapi.py

The base URL is http://127.0.0.1:8000/ai/v1.
"""

import sys

import uvicorn
from fastapi import FastAPI
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import LlamaCpp

app = FastAPI()
app.mount("/ai", OpenAIAdapter(LlamaCpp(), api_keys=["secret"]))


@app.get("/")
def home() -> dict[str, str]:
    """Return the app's own page."""
    return {"page": "home"}


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
