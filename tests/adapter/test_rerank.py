"""Tests of `POST /v1/rerank`, in the shape that Jina, Cohere and llama-server share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from support.embedding_reference import embedding_reference
from support.embeddings import ENGINES, MODELS, embedding

R = "/v1/rerank"
QUERY = "the capital of France"
DOCUMENTS = ["Hello world", "The capital of France is Paris.", "mira vipa kato", "Hello world"]
REFERENCE = embedding_reference(MODELS / "rank.gguf")

Ask = Callable[..., Any]


@pytest.fixture(scope="module", params=ENGINES)
async def ranker(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    """Return an engine with a model that ranks documents."""
    with embedding(request.param, "rank") as backend:
        yield backend
        await backend.aclose()


@pytest.fixture
def ask(ranker: Backend, client_of: Any) -> Ask:
    """Return a function that sends a request about the documents."""

    async def send(path: str = R, **body: Any) -> httpx2.Response:
        full = {"model": "rank", "query": QUERY, "documents": DOCUMENTS, **body}
        async with client_of(OpenAIAdapter(ranker, model_names=["rank"])) as client:
            reply: httpx2.Response = await client.post(path, json=full)
            return reply

    return send


async def scores(ranker: Backend) -> list[float]:
    """Return the reference's scores of the documents."""

    async def ids(text: str) -> Any:
        return await ranker.tokenize(text, add_special=False, parse_special=False)

    query = await ids(QUERY)
    pairs = [REFERENCE.pair(query, await ids(text)) for text in DOCUMENTS]
    return [float(REFERENCE.scores(pair)[0]) for pair in pairs]


@pytest.mark.parametrize("path", [R, "/rerank", "/v2/rerank", "/v1/v2/rerank"])
async def test_the_best_is_first(ask: Ask, ranker: Backend, path: str) -> None:
    """Results have the model's own scores and are sorted by them; equal ones keep their order."""
    reply = await ask(path)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert list(body) == ["id", "object", "model", "results", "usage", "meta"]
    assert (body["object"], body["model"]) == ("list", "rank")
    wanted = await scores(ranker)
    order = [result["index"] for result in body["results"]]
    assert sorted(order) == [0, 1, 2, 3]
    for result in body["results"]:
        assert list(result) == ["index", "relevance_score"]
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=0.01)
    found = [result["relevance_score"] for result in body["results"]]
    assert found == sorted(found, reverse=True)
    assert order.index(3) == order.index(0) + 1 or found[order.index(0)] != found[order.index(3)]


async def test_the_usage(ask: Ask) -> None:
    """The usage has two equal counts, which grow with the documents."""
    one, all_of = [
        (await ask(documents=documents)).json()["usage"] for documents in (DOCUMENTS[:1], DOCUMENTS)
    ]
    assert 0 < one["prompt_tokens"] < all_of["prompt_tokens"] == all_of["total_tokens"]


async def test_the_members_of_coheres_reply(ask: Ask) -> None:
    """A reply has an id of its own, and Cohere's search units: one for each 100 documents."""
    replies = [(await ask("/v2/rerank", documents=["a"] * count)).json() for count in (100, 101)]
    first, second = [UUID(reply["id"]) for reply in replies]
    assert first != second
    assert [reply["meta"] for reply in replies] == [
        {"api_version": {"version": "2"}, "billed_units": {"search_units": units}}
        for units in (1, 2)
    ]


async def test_fewer_results(ask: Ask) -> None:
    """`top_n` keeps the best results; more than there are is all."""

    async def order(**body: Any) -> list[int]:
        return [result["index"] for result in (await ask(**body)).json()["results"]]

    every = await order(documents=DOCUMENTS[:3])
    assert await order(documents=DOCUMENTS[:3], top_n=2) == every[:2]
    assert await order(documents=DOCUMENTS[:3], top_n=100) == every
    assert await order(documents=DOCUMENTS[:3], top_n=None) == every


async def test_documents_come_back(ask: Ask) -> None:
    """`return_documents` adds each document; documents may be objects with a text."""
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1], "title": "a"}]
    reply = await ask(documents=documents, return_documents=True)
    assert reply.headers["x-latimer-ignored"] == "documents[1].title"
    for result in reply.json()["results"]:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}


async def test_a_long_document_is_not_cut(ask: Ask) -> None:
    """A document that exceeds the context with the query is a 400 that names it."""
    reply = await ask(documents=["a", "kato " * 600])
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "documents[1]")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_a_model_that_only_ranks(
    ranker: Backend, client_of: Any, path: str, body: dict[str, Any]
) -> None:
    """Other tasks of a model that only ranks are a 404 or 400 that names the model."""
    async with client_of(OpenAIAdapter(ranker, model_names=["rank"])) as client:
        reply = await client.post(path, json={"model": "rank", **body})
    error = reply.json()["error"]
    status = 400 if path == "/v1/embeddings" else 404
    assert (reply.status_code, error["param"], error["code"]) == (status, "model", None)


async def test_a_model_for_chat(client: httpx2.AsyncClient) -> None:
    """A model that only generates answers with a 400 that names the model."""
    reply = await client.post(R, json={"model": "m", "query": "a", "documents": ["a"]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "model")
    assert error["message"].startswith("This is not a reranking model")
