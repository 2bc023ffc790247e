"""Requests of Open WebUI for its knowledge base: embeddings, and a reranker's scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from support.embedding_reference import cosine, embedding_reference
from support.embeddings import ENGINES, MODELS, embedding, ids_of, vector_of

RECORDED = json.loads((Path(__file__).parent / "recorded" / "open_webui.json").read_text())
EMBEDDINGS = [one for one in RECORDED if one["path"] == "/v1/embeddings"]
(RERANK,) = (one for one in RECORDED if one["path"] == "/v1/rerank")
BERT, RANK = MODELS / "bert-mean.gguf", MODELS / "rank.gguf"
CLOSE = 0.99999
# ggml looks values of GELU up in a table of F16 numbers.
SCORE_TOLERANCE = 0.01


@pytest.fixture(scope="module")
async def client(
    request: pytest.FixtureRequest, client_of: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of an engine with one of the models."""
    with embedding(*request.param) as backend:
        async with client_of(OpenAIAdapter(backend, model_names=["demo"])) as made:
            yield made
        await backend.aclose()


bert = pytest.mark.parametrize(
    "client", [(engine, "bert-mean") for engine in ENGINES], indirect=True, ids="-".join
)
rank = pytest.mark.parametrize(
    "client", [(engine, "rank") for engine in ENGINES], indirect=True, ids="-".join
)


async def sent(client: httpx2.AsyncClient, request: dict[str, Any]) -> httpx2.Response:
    """Return the reply to a recorded request."""
    reply = await client.post(request["path"], json=request["body"], headers=request["headers"])
    assert reply.status_code == 200, reply.text
    return reply


@bert
@pytest.mark.parametrize("request_", EMBEDDINGS, ids=lambda one: one["name"])
async def test_embeddings(client: httpx2.AsyncClient, request_: dict[str, Any]) -> None:
    """Vectors are lists of numbers and the right ones; a header names a field for the prefix."""
    reply = await sent(client, request_)
    assert reply.headers.get("x-latimer-ignored") == request_.get("ignored")
    vectors = [item["embedding"] for item in reply.json()["data"]]
    for text, vector in zip(request_["body"]["input"], vectors, strict=True):
        assert cosine(vector, vector_of(BERT, text)) > CLOSE


@pytest.mark.slow
@bert
async def test_a_document_in_300_pieces(client: httpx2.AsyncClient) -> None:
    """Open WebUI sends each piece of a document by itself, and all at once; each is embedded."""
    texts = [f"text {number}" for number in range(300)]
    requests = [
        {**EMBEDDINGS[0], "body": {**EMBEDDINGS[0]["body"], "input": [text]}} for text in texts
    ]
    replies = await asyncio.gather(*(sent(client, request) for request in requests))
    for text, reply in zip(texts[::50], replies[::50], strict=True):
        assert cosine(reply.json()["data"][0]["embedding"], vector_of(BERT, text)) > CLOSE


@rank
async def test_rerank(client: httpx2.AsyncClient) -> None:
    """Every document has a result with its index and the model's own score."""
    results = (await sent(client, RERANK)).json()["results"]
    reference = embedding_reference(RANK)

    def plain(text: str) -> list[int]:
        return list(ids_of(RANK, text, add_special=False))

    documents = RERANK["body"]["documents"]
    assert sorted(one["index"] for one in results) == list(range(len(documents)))
    for one in results:
        pair = reference.pair(plain(RERANK["body"]["query"]), plain(documents[one["index"]]))
        score = float(reference.scores(pair)[0])
        assert one["relevance_score"] == pytest.approx(score, abs=SCORE_TOLERANCE)
