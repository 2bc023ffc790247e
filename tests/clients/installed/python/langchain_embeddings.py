"""LangChain's `OpenAIEmbeddings`, which sends token ids of cl100k_base by default."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

LONG = "word " * 5000


def model_of(url: str, **more: Any) -> OpenAIEmbeddings:
    """Return the model with only a name, an address and a key."""
    return OpenAIEmbeddings(model="demo", base_url=url, api_key="unused", **more)


def headers_of(url: str, embedded: Any, **more: Any) -> list[httpx.Headers]:
    """Return the headers of the replies to some texts."""
    found = []
    hooks = {"response": [lambda reply: found.append(reply.headers)]}
    with httpx.Client(event_hooks=hooks) as client:
        model_of(url, http_client=client, **more).embed_documents(embedded.texts)
    assert found
    return found


def test_default(cl100k_url: str, embedded: Any) -> None:
    """Without any setting of LangChain's, documents and queries have the right vectors."""
    model = model_of(cl100k_url)
    embedded.check(model.embed_documents(embedded.texts))
    embedded.check([model.embed_query(text) for text in embedded.texts])
    assert not [one for one in headers_of(cl100k_url, embedded) if "x-latimer-inexact" in one]


async def test_async(cl100k_url: str, embedding_url: str, embedded: Any) -> None:
    """Eight asynchronous calls at once have the right vectors, too."""
    for model in (model_of(cl100k_url), model_of(embedding_url, check_embedding_ctx_length=False)):
        replies = await asyncio.gather(*(model.aembed_documents(embedded.texts) for _ in range(8)))
        for reply in replies:
            embedded.check(reply)
        embedded.check_one(await model.aembed_query(embedded.texts[0]), embedded.vectors[0])


def test_texts(embedding_url: str, cl100k_url: str, embedded: Any) -> None:
    """With `check_embedding_ctx_length=False` it sends texts, which any Latimer embeds."""
    for url in (embedding_url, cl100k_url):
        model = model_of(url, check_embedding_ctx_length=False)
        embedded.check(model.embed_documents(embedded.texts))
        embedded.check([model.embed_query(text) for text in embedded.texts])
        for headers in headers_of(url, embedded, check_embedding_ctx_length=False):
            assert "x-latimer-inexact" not in headers


def test_batch(cl100k_url: str, embedded: Any) -> None:
    """2,500 documents are sent in parts, and their vectors are in order."""
    texts = [f"text {number}" for number in range(2_499)] + embedded.texts[:1]
    found = model_of(cl100k_url).embed_documents(texts)
    assert len(found) == 2_500
    embedded.check_one(found[1], embedded.vectors[embedded.texts.index("text 1")])
    embedded.check_one(found[-1], embedded.vectors[0])


def test_without_the_setting(embedding_url: str, embedded: Any) -> None:
    """Without the server's setting the ids are the model's own, and the reply's header says so."""
    model = model_of(embedding_url)
    with pytest.raises(openai.BadRequestError, match="not a token id of this model"):
        model.embed_documents(embedded.texts)
    low = embedded._replace(texts=["in a"])
    for headers in headers_of(embedding_url, low):
        assert headers["x-latimer-inexact"] == "input"


def test_dimensions(cl100k_url: str) -> None:
    """`dimensions` shortens the vectors of a model that is declared for it."""
    assert len(model_of(cl100k_url, dimensions=16).embed_query("a")) == 16


@pytest.mark.parametrize("more", [{}, {"check_embedding_ctx_length": False}], ids=["ids", "texts"])
def test_errors(cl100k_url: str, more: dict[str, Any]) -> None:
    """A text beyond the model's context is an exception with the counts, and is never cut."""
    with pytest.raises(openai.BadRequestError, match="maximum context length is 512") as caught:
        model_of(cl100k_url, **more).embed_documents(["a", LONG])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    with pytest.raises(openai.NotFoundError):
        OpenAIEmbeddings(model="another", base_url=cl100k_url, api_key="unused").embed_query("a")
