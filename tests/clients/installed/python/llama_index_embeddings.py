"""LlamaIndex's `OpenAILikeEmbedding`, and `OpenAIEmbedding` with a name that OpenAI lacks."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.embeddings.openai_like import OpenAILikeEmbedding


@pytest.fixture(params=[OpenAILikeEmbedding, OpenAIEmbedding], ids=lambda kind: kind.__name__)
def model(request: pytest.FixtureRequest, embedding_url: str) -> Any:
    """Return each class as its documentation sets it up."""
    return request.param(model_name="demo", api_base=embedding_url, api_key="unused")


def test_single(model: Any, embedded: Any) -> None:
    """A query and a text have the right vectors."""
    embedded.check([model.get_text_embedding(text) for text in embedded.texts])
    embedded.check([model.get_query_embedding(text) for text in embedded.texts])


def test_batch(model: Any, embedded: Any) -> None:
    """Texts in several batches have the right vectors."""
    found = model.get_text_embedding_batch(embedded.texts * 5)
    for at in range(0, len(found), len(embedded.texts)):
        embedded.check(found[at : at + len(embedded.texts)])


async def test_async(model: Any, embedded: Any) -> None:
    """Eight asynchronous batches at once have the right vectors."""
    replies = await asyncio.gather(
        *(model.aget_text_embedding_batch(embedded.texts) for _ in range(8))
    )
    for reply in replies:
        embedded.check(reply)
    embedded.check_one(await model.aget_query_embedding(embedded.texts[0]), embedded.vectors[0])


def test_errors(model: Any) -> None:
    """A text beyond the context is OpenAI's exception, and is not tried again."""
    with pytest.raises(openai.BadRequestError) as caught:
        model.get_text_embedding_batch(["a", "word " * 5000])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
