"""Engines with the small models for embeddings, and comparisons of vectors."""

from __future__ import annotations

import json
import math
import urllib.request
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from latimer.backends.base import Backend, TokenIds
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_cpp.vocabulary import Vocabulary
from latimer.backends.llama_server import LlamaServer
from numpy.typing import NDArray

from support.embedding_reference import embedding_reference
from support.servers import llama_server

# The engines that `embedding` runs.
ENGINES = ("llama_cpp", "llama_server")
MODELS = Path(__file__).parents[1] / "models"
# Texts with spaces, line ends, spelled control tokens, several scripts, and characters that some
# tokenizers drop.
TEXTS = [
    "the cat sat on the mat", " the cat", "the  cat ", "a\n\nb", "x", "<s>[CLS]</s><|im_end|>[SEP]",
    "été Ünïcode naïve", "日本語のテキスト", "🎉!", "1234567890", "don't", "\ta", "- a, b; c!",
    "word " * 40,
]  # fmt: skip


@asynccontextmanager
async def backend_of(
    model: Path, *options: str, slots: int = 4, context: int = 512
) -> AsyncIterator[tuple[LlamaServer, str]]:
    """Run a server, and yield a backend of it and its address."""
    with llama_server(model, *options, slots=slots, context=context) as address:
        made = LlamaServer(address)
        yield made, address
        await made.aclose()


@contextmanager
def embedding(engine: str, name: str) -> Iterator[Backend]:
    """Run an engine with one of the models that embed or rank; the caller closes the backend."""
    path = MODELS / f"{name}.gguf"
    if engine == "llama_cpp":
        yield LlamaCpp(path, gpu_layers=0, threads=1)
        return
    mode = "--reranking" if name == "rank" else "--embeddings"
    with llama_server(path, mode, "-b", "2048", "-ub", "2048", context=512) as address:
        yield LlamaServer(address)


@cache
def _vocabulary(model: Path) -> tuple[LoadedModel, Vocabulary]:
    loaded = LoadedModel(model, Options(gpu_layers=0))
    return loaded, Vocabulary(loaded)


def ids_of(
    model: Path, text: str, add_special: bool = True, parse_special: bool = False
) -> TokenIds:
    """Return the ids of a text, with the special tokens that the tokenizer adds by default."""
    _, vocabulary = _vocabulary(model)
    return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)


@cache
def vector_of(model: Path, text: str) -> NDArray[np.float64]:
    """Return the reference's vector of a text."""
    return embedding_reference(model).vector(ids_of(model, text))


def posted(address: str, path: str, payload: Any) -> Any:
    """Return the server's own reply."""
    request = urllib.request.Request(address + path, json.dumps(payload).encode())  # noqa: S310
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        return json.load(reply)


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors."""
    dot = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return dot / math.hypot(*one) / math.hypot(*other)


def is_unit(vector: Sequence[float]) -> bool:
    """Return True for 32-bit floats of unit length."""
    return isinstance(vector, array) and vector.typecode == "f" and abs(
        math.hypot(*vector) - 1
    ) < 1e-6  # fmt: skip
