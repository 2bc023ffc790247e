"""Tests of the table of `latimer check`."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter.capability_table import describe
from latimer.adapter.config import Settings
from latimer.adapter.discovery import backend_of
from support.embeddings import ENGINES, MODELS, embedding


async def table_of(backend: Any) -> dict[str, str]:
    """Return the rows of the table of an engine that is reachable."""
    reachable, rows = await describe(backend)
    assert reachable
    return dict(rows)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_model_that_embeds(engine: str) -> None:
    """The table has the dimensions and the longest input, and nothing about generation."""
    with embedding(engine, "bert-mean") as backend:
        rows = await table_of(backend)
        await backend.aclose()
    assert rows["embeddings"].startswith("64 dimensions, ")
    assert rows["embeddings"].endswith("up to 512 tokens")
    assert rows["rerank"].startswith("no: ")
    assert rows["chat, completions"].startswith("no: ")
    assert not {"grammars", "sampling extras", "chat template"} & rows.keys()


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_model_that_ranks(engine: str) -> None:
    """The table says that a model ranks, and why it does not embed."""
    with embedding(engine, "rank") as backend:
        rows = await table_of(backend)
        await backend.aclose()
    assert rows["rerank"] == "up to 512 tokens"
    assert rows["embeddings"].startswith("no: ")


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"embeddings": True}, "192 dimensions, last pooling, up to 2048 tokens"),
        ({"embeddings": True, "pooling": "mean"}, "192 dimensions, mean pooling, up to 2048 tok…"),
        ({"model": str(MODELS / "bert-mean.gguf"), "pooling": "cls"}, "64 dimensions, cls pool…"),
        ({}, "no: …"),
    ],
)
async def test_settings_reach_the_engine(settings: dict[str, Any], row: str) -> None:
    """`embeddings` and `pooling` change what the in-process engine does."""
    backend = backend_of(Settings.load(None, **settings))
    found = (await table_of(backend))["embeddings"]
    await backend.aclose()
    assert found.startswith(row.removesuffix("…"))


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server", "koboldcpp"])
async def test_a_model_for_chat(engine: str, make_backend: Any) -> None:
    """The table of a model for chat says what would make the engine embed, or what to use."""
    backend = make_backend(engine)
    rows = await table_of(backend)
    await backend.aclose()
    assert "context" in rows
    for name in ("embeddings", "rerank"):
        assert rows[name].startswith("no: ")
        assert len(rows[name]) > len("no: ")
