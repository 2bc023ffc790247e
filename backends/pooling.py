"""The purpose of a model's file, and the pooling of its embeddings, for both llama.cpp engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path

from .base import Pooling
from .errors import EngineError, NotServed

# Pooling types by their numbers in GGUF files.
_POOLINGS: dict[str, Pooling] = {"1": "mean", "2": "cls", "3": "last", "4": "rank"}
# The architecture without a decoder (`llama_model_has_decoder`).
_ENCODER = "t5encoder"
# The bytes of a file that its metadata and the names of its tensors may take.
_MOST_HEADER = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Purpose:
    """The facts about generation and embeddings in the metadata of a model's file.

    Args:
        pooling: how the vectors of an input's tokens become one, if the file says it.
        is_causal: True if each token sees the tokens before it only.
        can_generate: True if the model is causal and has a decoder.
    """

    pooling: Pooling | None
    is_causal: bool
    can_generate: bool

    @property
    def only_embeds(self) -> bool:
        """True for a model that is made for embeddings or reranking only."""
        return self.pooling is not None or not self.can_generate


def purpose_of(fact: Callable[[str], str]) -> Purpose:
    """Return what a model is made for.

    Args:
        fact: returns a value of the file's metadata as text, which is empty without one.
    """
    architecture = fact("general.architecture")
    is_causal = fact(f"{architecture}.attention.causal").lower() != "false"
    pooling = _POOLINGS.get(fact(f"{architecture}.pooling_type"))
    return Purpose(pooling, is_causal, is_causal and architecture != _ENCODER)


def check_pooling(embeddings: bool | None, pooling: Pooling | None) -> None:
    """Raise `EngineError` if the two options contradict each other."""
    if pooling is not None and embeddings is False:
        raise EngineError(
            "'pooling' requires embeddings, and 'embeddings' is false. Omit one of the two."
        )


def pooling_of(
    path: Path,
    purpose: Purpose,
    embeddings: bool | None,
    pooling: Pooling | None,
    mmproj: Path | None,
) -> Pooling | None:
    """Return the pooling of a model's embeddings; None if it does not embed.

    The default of a causal model is `last`, since only its last token has seen all others.

    Args:
        path: the model's file.
        embeddings, pooling, mmproj: the options of the engine.

    Raises:
        EngineError: the options contradict each other or the model.
    """
    check_pooling(embeddings, pooling)
    if embeddings is None:
        embeddings = purpose.only_embeds or pooling is not None
    if not embeddings and not purpose.can_generate:
        raise EngineError(
            f"{path} is an embedding model, which cannot generate text. Omit --no-embeddings."
        )
    if not embeddings:
        return None
    if mmproj is not None and purpose.only_embeds:
        raise EngineError(f"{path} is an embedding model, which takes text only. Omit --mmproj.")
    if pooling == "rank" and purpose.pooling != "rank" and not _has_classifier(path):
        raise EngineError("The model is not a reranker, so it does not support pooling 'rank'.")
    return pooling or purpose.pooling or ("last" if purpose.is_causal else "mean")


def not_generated(engine: str, pooling: Pooling | None) -> NotServed:
    """Return the error for a generation with a model that only embeds."""
    own = "rerank" if pooling == "rank" else "embeddings"
    return NotServed("generate", engine, f"Did you mean to use v1/{own}?")


def _has_classifier(path: Path) -> bool:
    """Return True if a file has a tensor that scores a query and a document.

    llama.cpp does not report tensors, and scores without one would be meaningless.
    """
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return any(
            data.find(len(name).to_bytes(8, "little") + name, 0, _MOST_HEADER) >= 0
            for name in (b"cls.weight", b"cls.output.weight")
        )
