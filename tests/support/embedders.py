"""Engines that embed or rank, with the small models of `models/make_embeddings.py`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer

from support.servers import llama_server

MODELS = Path(__file__).parents[1] / "models"
ENGINES = ("llama_cpp", "llama_server")


@contextlib.contextmanager
def embedding(engine: str, model: str, context: int = 512) -> Iterator[Backend]:
    """Run an engine with a model that embeds, or that ranks documents."""
    path = MODELS / f"{model}.gguf"
    if engine == "llama_cpp":
        yield LlamaCpp(path, gpu_layers=0)
        return
    mode = "--reranking" if model == "rank" else "--embeddings"
    with llama_server(path, mode, "-b", "2048", "-ub", "2048", context=context) as address:
        yield LlamaServer(address)
