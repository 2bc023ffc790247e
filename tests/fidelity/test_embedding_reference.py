"""Tests that the float64 reference of embeddings and a real llama-server agree on each model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import httpx2
import pytest
from conftest import MODELS
from support.embedding_reference import (
    CLS,
    LAST,
    MEAN,
    RANK,
    EmbeddingReference,
    cosine,
    embedding_reference,
)
from support.servers import llama_server
from tokenizers import BertWordPieceTokenizer

pytestmark = pytest.mark.slow

# The batch covers the longest input, as llama-server requires for embeddings.
BATCH = ("-b", "2048", "-ub", "2048")
CLOSE = 0.99999
# ggml looks values of GELU up in a table of F16 numbers.
SCORE_TOLERANCE = 0.01
POOLINGS = {"bert-mean": MEAN, "bert-cls": CLS, "last": LAST, "rank": RANK}
QUERY = "the capital of France"
DOCUMENTS = (
    "Hello world",
    "mira vipa kato",
    "The cat sits on the mat",
    "The capital of France is Paris.",
    "of capital Paris France the is",
    "text 1",
    "the quick brown fox " * 10,
    "kato " * 225,
)
TEXTS = (
    *DOCUMENTS,
    "a",
    "tostra mira! é über 12",
    "Don't stop; e-mail me@example.com (at 10:30)?",
    "ÉTÉ, Über, naïve façade",
    "one\ttwo\nthree  four ",
    "中文 and 😀 no such piece",
    "",
)


class Served(NamedTuple):
    """A llama-server with the reference of its model."""

    client: httpx2.AsyncClient
    reference: EmbeddingReference
    pooling: int

    async def post(self, path: str, **body: Any) -> Any:
        """Return the JSON of a successful reply."""
        reply = await self.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def vectors(self, *inputs: Sequence[int]) -> list[list[float]]:
        """Return the vectors of inputs in one request."""
        found = await self.post("/embedding", content=inputs, embd_normalize=2)
        return [one["embedding"][0] for one in sorted(found, key=lambda one: one["index"])]

    async def ids(self, text: str) -> list[int]:
        """Return a text's ids without special tokens, from llama.cpp's vocabulary."""
        found = await self.post("/tokenize", content=text, add_special=False)
        return [int(token) for token in found["tokens"]]

    async def scores(self, *documents: str) -> list[float]:
        """Return the scores of documents in one request, in their order."""
        found = (await self.post("/rerank", query=QUERY, documents=documents))["results"]
        return [one["relevance_score"] for one in sorted(found, key=lambda one: one["index"])]

    async def expected_scores(self) -> list[float]:
        """Return the reference's scores of the documents."""
        query = await self.ids(QUERY)
        pairs = [self.reference.pair(query, await self.ids(text)) for text in DOCUMENTS]
        return [float(self.reference.scores(pair)[0]) for pair in pairs]


async def serve(path: Path, pooling: int, *options: str) -> AsyncIterator[Served]:
    """Run a llama-server whose context is that of the embedding models."""
    context = 2048 if path.stem in ("last", "demo-f32") else 512
    with llama_server(path, *options, *BATCH, slots=4, context=context) as address:
        async with httpx2.AsyncClient(base_url=address, timeout=60) as client:
            yield Served(client, embedding_reference(path), pooling)


@pytest.fixture(
    scope="module",
    params=["bert-mean", "bert-cls", "last", "demo", "bert-mean --pooling last"],
)
async def served(request: pytest.FixtureRequest, demo_f32: Path) -> AsyncIterator[Served]:
    """Return a server of embeddings for each model, and with another pooling than the model's."""
    name, *options = request.param.split()
    path = demo_f32 if name == "demo" else MODELS / f"{name}.gguf"
    if name == "demo":
        options = ["--pooling", "last"]
    pooling = LAST if options else POOLINGS[name]
    async for one in serve(path, pooling, "--embeddings", *options):
        yield one


@pytest.fixture(scope="module")
async def ranked() -> AsyncIterator[Served]:
    """Return a server of scores."""
    async for one in serve(MODELS / "rank.gguf", RANK, "--reranking"):
        yield one


def inputs(lengths: Sequence[int]) -> list[list[int]]:
    """Return inputs of random ids that every vocabulary has."""
    rng = random.Random(5)
    return [[rng.randrange(5, 600) for _ in range(length)] for length in lengths]


def test_each_model_names_its_pooling() -> None:
    """The file of each model names the pooling that the model is made for."""
    for name, pooling in POOLINGS.items():
        assert embedding_reference(MODELS / f"{name}.gguf").pooling == pooling


@pytest.mark.parametrize("length", [1, 7, 500, 1500])
async def test_a_vector_alone(served: Served, length: int) -> None:
    """A vector of a short or long input is the reference's, and has unit length."""
    (ids,) = inputs([min(length, served.reference.context - 1)])
    (found,) = await served.vectors(ids)
    assert cosine(found, served.reference.vector(ids, served.pooling)) > CLOSE
    assert sum(number * number for number in found) == pytest.approx(1, abs=1e-5)


async def test_vectors_at_once(served: Served) -> None:
    """Eight requests at once and one request for eight inputs return the reference's vectors."""
    asked = inputs([1, 2, 3, 40, 90, 200, 400, 500])
    together = await asyncio.gather(*(served.vectors(ids) for ids in asked))
    in_one = await served.vectors(*asked)
    for ids, (one,), other in zip(asked, together, in_one, strict=True):
        expected = served.reference.vector(ids, served.pooling)
        assert min(cosine(one, expected), cosine(other, expected)) > CLOSE


@pytest.mark.parametrize("name", ["bert-mean", "bert-cls", "last"])
def test_vectors_differ(name: str) -> None:
    """Vectors of other ids, of another order, and of another pooling are not close."""
    reference = embedding_reference(MODELS / f"{name}.gguf")
    one, other = inputs([20, 20])
    vector = reference.vector(one)
    others = [reference.vector(other), reference.vector(one[::-1])]
    others += [reference.vector(one, pooling) for pooling in {MEAN, CLS, LAST} - {POOLINGS[name]}]
    assert max(cosine(vector, each) for each in others) < 0.95


async def test_scores(ranked: Served) -> None:
    """Scores in one request and in eight at once are the reference's, and are far apart."""
    expected = await ranked.expected_scores()
    together = await ranked.scores(*DOCUMENTS)
    alone = [one for (one,) in await asyncio.gather(*(ranked.scores(text) for text in DOCUMENTS))]
    assert together == pytest.approx(expected, abs=SCORE_TOLERANCE)
    assert alone == pytest.approx(expected, abs=SCORE_TOLERANCE)
    ordered = sorted(expected)
    apart = [high - low for low, high in pairwise(ordered)]
    assert min(apart) > 10 * SCORE_TOLERANCE
    assert ordered[-1] - ordered[0] > 2


async def test_wordpiece(ranked: Served) -> None:
    """llama.cpp and HuggingFace's `tokenizers` agree on the ids of ordinary texts."""
    fields = gguf.GGUFReader(MODELS / "rank.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    vocabulary = {
        piece if kind == gguf.TokenType.CONTROL
        else piece[1:] if piece.startswith("▁")
        else "##" + piece: token
        for token, (piece, kind) in enumerate(zip(tokens, kinds, strict=True))
    }  # fmt: skip
    tokenizer = BertWordPieceTokenizer(vocabulary)
    for text in TEXTS:
        assert await ranked.ids(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
        whole = await ranked.post("/tokenize", content=text, add_special=True)
        assert whole["tokens"] == tokenizer.encode(text).ids
