"""Tests of rankings over a real llama-server, and of its invalid replies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from latimer.backends.base import Embedding, EmbeddingModel, Ranking, Text
from latimer.backends.errors import ContextExceeded, EngineUnavailable, NotServed
from latimer.backends.llama_server import LlamaServer
from latimer.backends.llama_server.vectors import read_scores
from support.embeddings import MODELS, TEXTS, backend_of, posted


@pytest.fixture(scope="module")
async def ranking() -> AsyncIterator[tuple[LlamaServer, str]]:
    """A backend of a reranker, in batches of at most 64 tokens."""
    options = ("--reranking", "-b", "64", "-ub", "64")
    async with backend_of(MODELS / "rank.gguf", *options) as made:
        yield made


async def test_scores_are_those_of_the_server(ranking: tuple[LlamaServer, str]) -> None:
    """Scores equal the server's own, in the order of the documents, over several calls."""
    backend, address = ranking
    documents = [f"{TEXTS[index % 4]} {index}" for index in range(150)]
    found = await backend.rank(Ranking("the cat", documents))
    own = posted(address, "/rerank", {"query": "the cat", "documents": documents})
    scores = {entry["index"]: entry["relevance_score"] for entry in own["results"]}
    assert found.scores == pytest.approx([scores[index] for index in range(150)], abs=0.02)
    assert found.prompt_tokens == own["usage"]["prompt_tokens"]
    assert await backend.embedding_model() == EmbeddingModel(0, "rank", 512, generates=False)


async def test_long_documents_are_named(ranking: tuple[LlamaServer, str]) -> None:
    """A document beyond the batch is an error with its field, also among others."""
    backend, _address = ranking
    for documents in (["x " * 80], ["a", "b", "x " * 80, "c"]):
        with pytest.raises(ContextExceeded) as caught:
            await backend.rank(Ranking("a", documents))
        error = caught.value
        assert error.param == f"documents[{documents.index('x ' * 80)}]"
        assert (error.context, error.prompt_tokens) == (64, 84)
        assert "--ubatch-size" in error.hint


async def test_a_reranker_refuses_embeddings(ranking: tuple[LlamaServer, str]) -> None:
    """A reranker refuses inputs to embed and names the endpoint for documents."""
    with pytest.raises(NotServed) as caught:
        await ranking[0].embed(Embedding([Text("x")]))
    assert (caught.value.task, caught.value.hint) == ("embed", "Did you mean to use v1/rerank?")


async def test_a_query_for_another_model_is_not_sent(ranking: tuple[LlamaServer, str]) -> None:
    """A ranking with the fingerprint of another model raises an error."""
    with pytest.raises(EngineUnavailable, match="another model"):
        await ranking[0].rank(Ranking("x", ["y"], fingerprint="fp_other"))


@pytest.mark.parametrize(
    "reply",
    [
        {"results": [], "usage": {"prompt_tokens": 1}},
        {"results": [{"index": 0, "relevance_score": None}], "usage": {"prompt_tokens": 1}},
        {"results": [{"index": 0, "relevance_score": "1"}], "usage": {"prompt_tokens": 1}},
        {"results": [{"index": 1, "relevance_score": 1.0}], "usage": {"prompt_tokens": 1}},
        {"results": [{"index": 0, "relevance_score": 1.0}] * 2, "usage": {"prompt_tokens": 1}},
        {"results": [{"index": 0, "relevance_score": 1.0}], "usage": {"prompt_tokens": -1}},
        {"results": [{"index": 0, "relevance_score": 1.0}]},
        [],
    ],
    ids=str,
)
def test_wrong_scores_are_malformed(reply: Any) -> None:
    """A reply without exactly one finite score of each document is malformed."""
    with pytest.raises((LookupError, TypeError, ValueError)):
        read_scores(orjson.dumps(reply), 1)
