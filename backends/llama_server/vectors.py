"""llama-server's replies about embeddings and rankings, and the facts about both (sans-I/O)."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Any

import orjson

from ..base import TokenIds
from ..embeddings import is_memory, unit
from ..errors import EngineError, whole_of
from .events import ENGINE

# An id between the texts of one `/tokenize`. The server passes ids on unchanged, and no text has a
# negative one.
SEPARATOR = -1

EMBEDDINGS_OFF = "Start llama-server with --embeddings."
RERANKING_OFF = "Start llama-server with --reranking."
NOT_POOLED = (
    "Its embeddings are not pooled. Start llama-server with --pooling mean (or cls, or last)."
)
NO_VECTORS = (
    "It returns no vectors. If the model is a reranker, start llama-server with --reranking."
)
RANKS_ONLY = "Did you mean to use v1/rerank?"
TOO_OLD = "This llama-server has no endpoint for it. Update llama-server."


@dataclass(frozen=True, slots=True)
class Embedder:
    """Facts about a server's embeddings.

    Args:
        dimensions: the length of a vector; 0 if it returns none.
        hint: what to do for embeddings; empty if it returns vectors.
        rank_hint: what to do for rankings; empty if it ranks.
        prefix, suffix: the tokens that the model adds around a text.
    """

    dimensions: int = 0
    hint: str = ""
    rank_hint: str = RERANKING_OFF
    prefix: TokenIds = ()
    suffix: TokenIds = ()

    @property
    def ranks(self) -> bool:
        """True if the server scores documents."""
        return not self.rank_hint


def around(whole: TokenIds, plain: TokenIds) -> tuple[TokenIds, TokenIds]:
    """Return the tokens before and after a text in its ids with special tokens.

    Raises:
        ValueError: the text's own ids are not among them.
    """
    size = len(plain)
    for start in range(len(whole) - size + 1):
        if whole[start : start + size] == plain:
            return whole[:start], whole[start + size :]
    raise ValueError("special tokens change the tokens of a text")


def separated(texts: list[str]) -> list[int | str]:
    """Return the content of a `/tokenize` that tokenizes each text on its own."""
    return [part for text in texts for part in (SEPARATOR, text)]


def parted(value: Any, count: int, size: int) -> list[TokenIds]:
    """Return the ids of each of `count` texts that one `/tokenize` returned.

    Args:
        size: the number of tokens in the vocabulary.

    Raises:
        TypeError, ValueError: the value is not a list of ids, or has other separators.
    """
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        raise TypeError(f"expected a list of token ids, but got {type(value).__name__}")
    if min(value) != SEPARATOR or max(value) >= size or value[0] != SEPARATOR:
        raise ValueError("a token id is not in the vocabulary")
    if value.count(SEPARATOR) != count:
        raise ValueError(f"the ids of {value.count(SEPARATOR)} texts instead of {count}")
    found, start = [], 1
    for _ in range(count - 1):
        end = value.index(SEPARATOR, start)
        found.append(tuple(value[start:end]))
        start = end + 1
    return [*found, tuple(value[start:])]


def tested(data: bytes) -> tuple[int, str]:
    """Return the length of the vector of a test, and what to do if it is not a vector.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed.
    """
    (entry,) = orjson.loads(data)
    rows = entry["embedding"]
    if not rows or any(type(row) is not list or not row for row in rows):
        raise TypeError("expected rows of numbers")
    # JSON has no number that is not finite; the server sends null.
    if not {type(value) for row in rows for value in row} <= {float, int, type(None)}:
        raise TypeError("expected numbers")
    if len(rows) > 1:
        return 0, NOT_POOLED
    if is_memory(rows[0]):
        return 0, NO_VECTORS
    return len(unit(rows[0])), ""


def read_vectors(data: bytes, count: int, dimensions: int) -> list[array[float]]:
    """Return the vectors of a reply of `/embedding`, in the order of the inputs.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed, or a vector has another length.
    """
    found: dict[int, array[float]] = {}
    entries = orjson.loads(data)
    for entry in entries:
        (row,) = entry["embedding"]
        if len(row) != dimensions:
            raise ValueError(f"{len(row)} dimensions instead of {dimensions}")
        found[whole_of(entry["index"], 0, count - 1)] = unit(row)
    if len(entries) != count:
        raise ValueError(f"{len(entries)} vectors instead of {count}")
    return [found[index] for index in range(count)]


def read_scores(data: bytes, count: int) -> tuple[list[float], int]:
    """Return the scores of a reply of `/rerank` in the order of the documents, and its tokens.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed.
    """
    reply = orjson.loads(data)
    found: dict[int, float] = {}
    for entry in reply["results"]:
        score = entry["relevance_score"]
        if type(score) not in (float, int) or not math.isfinite(score):
            raise ValueError(f"{score!r} is not a score")
        found[whole_of(entry["index"], 0, count - 1)] = float(score)
    if len(reply["results"]) != count:
        raise ValueError(f"{len(reply['results'])} scores instead of {count}")
    return [found[index] for index in range(count)], whole_of(reply["usage"]["prompt_tokens"])


def untested(what: str, message: str) -> EngineError:
    """Return the error for a short test input that the server rejected."""
    return EngineError(f"{ENGINE} rejected a test of its {what}: {message}")
