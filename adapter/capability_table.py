"""The table that `latimer check` shows: what an engine can do with its model."""

from __future__ import annotations

from collections.abc import Awaitable

from ..backends.base import (
    Backend,
    Capabilities,
    Embedding,
    EmbeddingModel,
    Model,
    Ranking,
    Text,
)
from ..backends.errors import LatimerError, NotServed
from .store.config import OFF, Place
from .store.errors import StoreError, StoreUnavailable, in_words
from .store.store import Store


async def describe(backend: Backend) -> tuple[bool, list[tuple[str, str]]]:
    """Return True if a backend is reachable, and the rows of a table of its capabilities."""
    try:
        await backend.health()
        model = await backend.model()
        facts = await backend.embedding_model()
        vectors = [
            ("embeddings", await _embeddings(backend, facts)),
            ("rerank", await _rerank(backend, facts)),
        ]
    except LatimerError as error:
        rows = [("engine", backend.capabilities.engine)]
        return False, [*rows, ("reachable", f"no: {error.message}")]
    rows = [
        ("engine", backend.capabilities.engine),
        ("reachable", "yes"),
        ("model", model.name),
        ("fingerprint", model.fingerprint),
    ]
    if facts is not None and not facts.generates:
        task = "ranks documents" if facts.pooling == "rank" else "embeds"
        return True, [*rows, ("chat, completions", f"no: the model only {task}"), *vectors]
    return True, [*rows, *_generation(model, backend.capabilities), *vectors]


async def describe_store(place: Place | None) -> tuple[bool, tuple[str, str]]:
    """Return False if a store cannot be opened, and its row of the table; nothing is changed."""
    if place is None:
        return True, ("store", OFF)
    where = place.describe()
    if not place.durable:
        return True, ("store", where)
    store = Store(place)
    try:
        exists = await store.look()
    except (StoreError, StoreUnavailable) as error:
        return False, ("store", f"no: {where}: {in_words(error)}")
    return True, ("store", where if exists else f"{where}, new")


def _generation(model: Model, capabilities: Capabilities) -> list[tuple[str, str]]:
    return [
        ("context", f"{model.context} tokens"),
        ("chat template", "the model's own" if model.template else "none: Alpaca is used"),
        ("adds BOS", f"yes ({model.bos_token})" if model.adds_bos else "no"),
        ("native responses", "yes (oai_compat: false)" if capabilities.native else "no"),
        ("sampling extras", ", ".join(sorted(capabilities.extras))),
        (
            "messages",
            "control tokens are text"
            if capabilities.plain_text
            else "control tokens are text, split by a zero-width space",
        ),
        ("media", ", ".join(sorted(model.media)) or "-"),
        ("grammars", ", ".join(sorted(capabilities.grammars)) or "-"),
        (
            "not supported",
            "; ".join(f"{k}: {v}" for k, v in sorted(capabilities.refused.items())) or "-",
        ),
        ("approximated", ", ".join(sorted(capabilities.inexact)) or "-"),
    ]


async def _embeddings(backend: Backend, facts: EmbeddingModel | None) -> str:
    """Return what `check` says about embeddings; facts that are not known are omitted."""
    if facts is not None and facts.pooling == "rank":
        return "no: the model ranks documents"
    if facts is None:
        return await _refusal(backend.embed(Embedding([Text("a", parse_special=False)])))
    known = (
        f"{facts.dimensions} dimensions" if facts.dimensions else "",
        f"{facts.pooling} pooling" if facts.pooling else "",
        f"up to {facts.context} tokens" if facts.context else "",
        f"{', '.join(sorted(facts.inexact))} approximated" if facts.inexact else "",
    )
    return ", ".join(filter(None, known)) or "yes"


async def _rerank(backend: Backend, facts: EmbeddingModel | None) -> str:
    if facts is None or facts.pooling != "rank":
        return await _refusal(backend.rank(Ranking("a", ["a"])))
    return f"up to {facts.context} tokens" if facts.context else "yes"


async def _refusal(job: Awaitable[object]) -> str:
    """Return the reason why an engine refuses a job."""
    try:
        await job
    except LatimerError as error:
        return f"no: {error.hint if isinstance(error, NotServed) else error.message}"
    return "yes"
