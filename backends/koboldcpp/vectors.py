"""koboldcpp's replies about embeddings, and the facts about its embedding model (sans-I/O)."""

from __future__ import annotations

import sys
from array import array
from base64 import b64decode
from dataclasses import dataclass
from typing import Any

from ..embeddings import unit
from ..errors import whole_of

NOT_STARTED = "Start koboldcpp with --embeddingsmodel."
NOT_POOLED = (
    "Its embedding model does not pool tokens, so every vector is that of the first token. Start "
    "koboldcpp with an embedding model."
)
NO_RANKS = "Use llama-server or the in-process engine with a reranking model."
NO_VECTORS = "Its embedding model returns no vectors. A reranking model does not work there."
TOO_LONG = (
    "it returned no vector for this input. Shorter input works, so this one is probably longer "
    "than the context of its embedding model (--embeddingsmaxctx)"
)


@dataclass(frozen=True, slots=True)
class Embedder:
    """Facts about an embedding model: the length of its vectors, or what to do if it has none."""

    dimensions: int = 0
    hint: str = ""


def read_vectors(reply: Any, count: int) -> tuple[list[array[float] | None], int]:
    """Return the vectors of a reply, None for a failed text, and the number of tokens.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed.
    """
    found: dict[int, array[float] | None] = {}
    entries = reply["data"]
    for entry in entries:
        vector = array("f", b64decode(entry["embedding"], validate=True))
        if sys.byteorder == "big":
            vector.byteswap()
        # The engine has six decimals of each number.
        found[whole_of(entry["index"], 0, count - 1)] = unit(vector) if any(vector) else None
    if len(entries) != count:
        raise ValueError(f"{len(entries)} vectors instead of {count}")
    return [found[index] for index in range(count)], whole_of(reply["usage"]["prompt_tokens"])
