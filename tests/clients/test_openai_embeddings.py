"""Tests of embeddings with the official `openai` client, against float64 arithmetic."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import openai
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import LlamaCpp
from openai import AsyncOpenAI, OpenAI
from openai.types import CreateEmbeddingResponse
from support.embedding_reference import cosine, embedding_reference
from support.embeddings import ENGINES, MODELS, embedding, ids_of, vector_of
from support.servers import serving

pytestmark = pytest.mark.slow

CLOSE = 0.99999
TEXTS = [
    "the capital of France", "mira vipa kato", "été, naïve", "日本語 🎉", "a [SEP] b <s>",
    "x\n\ny ", "the quick brown fox " * 12,
]  # fmt: skip
CHAT = "chat-f32"


class Served(NamedTuple):
    """The address of a Latimer, and the file of its model."""

    url: str
    model: Path


@pytest.fixture(
    scope="module",
    params=[
        *((engine, name) for engine in ENGINES for name in ("bert-mean", "bert-cls", "last")),
        ("llama_cpp", CHAT),
    ],
    ids="-".join,
)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Serve each engine with each model, and a chat model that also embeds."""
    engine, name = request.param
    if name == CHAT:
        path: Path = request.getfixturevalue("demo_f32")
        chat = LlamaCpp(path, gpu_layers=0, threads=1, embeddings=True)
        with serving(lambda: OpenAIAdapter(chat, model_names=["m"])) as address:
            yield Served(address, path)
        return
    with (
        embedding(engine, name) as backend,
        serving(lambda: OpenAIAdapter(backend, model_names=["m"], matryoshka=True)) as address,
    ):
        yield Served(address, MODELS / f"{name}.gguf")


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    """Return the synchronous client; its strict validation rejects any vector in base64."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def check(reply: CreateEmbeddingResponse, texts: Sequence[str], model: Path) -> None:
    """Check that the vectors are those of the texts, in order."""
    assert [item.index for item in reply.data] == list(range(len(texts)))
    for item, text in zip(reply.data, texts, strict=True):
        assert cosine(item.embedding, vector_of(model, text)) > CLOSE


def test_texts(client: OpenAI, served: Served) -> None:
    """One text and several have the right vectors, in base64 by default and as numbers."""
    check(client.embeddings.create(model="m", input=TEXTS[0]), TEXTS[:1], served.model)
    reply = client.embeddings.create(model="m", input=TEXTS)
    check(reply, TEXTS, served.model)
    numbers = client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
    check(numbers, TEXTS, served.model)
    assert reply.model == "m"
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == numbers.usage.prompt_tokens > 0


def test_ids(client: OpenAI, served: Served) -> None:
    """The model's own ids, one list or several, have the vectors of their texts."""
    lists = [list(ids_of(served.model, text)) for text in TEXTS]
    check(client.embeddings.create(model="m", input=lists), TEXTS, served.model)
    check(client.embeddings.create(model="m", input=lists[1]), TEXTS[1:2], served.model)
    raw = client.embeddings.with_raw_response.create(model="m", input=[[5, 6, 7]])
    assert raw.headers["x-latimer-inexact"] == "input"
    (item,) = raw.parse().data
    assert cosine(item.embedding, embedding_reference(served.model).vector([5, 6, 7])) > CLOSE


def test_dimensions(client: OpenAI, served: Served) -> None:
    """Vectors are cut and scaled for a model that is declared for it, and never for another."""
    if served.model.stem.startswith("demo"):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="m", input=TEXTS, dimensions=16)
        assert (caught.value.param, caught.value.code) == ("dimensions", "unsupported_parameter")
        return
    reply = client.embeddings.create(model="m", input=TEXTS, dimensions=16)
    for item, text in zip(reply.data, TEXTS, strict=True):
        assert len(item.embedding) == 16
        assert cosine(item.embedding, vector_of(served.model, text)[:16]) > CLOSE


def test_a_raw_response(client: OpenAI, served: Served) -> None:
    """The raw response of an ordinary request reports no field without effect."""
    raw = client.embeddings.with_raw_response.create(model="m", input=TEXTS, user="u")
    assert not [name for name in raw.headers if name.startswith("x-latimer-i")]
    check(raw.parse(), TEXTS, served.model)


async def test_eight_at_once(served: Served) -> None:
    """Eight requests at the same time have the vectors that each has alone."""
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        groups = [[f"{number}", f"{number} {TEXTS[2]}"] for number in range(8)]
        replies = await asyncio.gather(
            *(client.embeddings.create(model="m", input=group) for group in groups)
        )
    for group, reply in zip(groups, replies, strict=True):
        check(reply, group, served.model)


@pytest.mark.parametrize("count", [130, 2_048])
def test_batches(client: OpenAI, served: Served, count: int) -> None:
    """Every vector of a batch is in its place."""
    texts = [f"text {number}" for number in range(count)]
    found = client.embeddings.create(model="m", input=texts).data
    assert [item.index for item in found] == list(range(count))
    for number in (1, count // 2, count - 1):
        assert cosine(found[number].embedding, vector_of(served.model, texts[number])) > CLOSE


def test_errors(client: OpenAI, served: Served) -> None:
    """A text that is too long, an empty input and too many are errors that name them."""
    for given, param, code in (
        (["a", "kato " * 3_000], "input[1]", "context_length_exceeded"),
        ("kato " * 3_000, "input", "context_length_exceeded"),
        (["a", ""], "input[1]", "empty_string"),
        ("", "input", "empty_string"),
        (["a"] * 2_049, "input", "array_above_max_length"),
        ([[10**6]], "input[0]", "invalid_value"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="m", input=given)
        assert (caught.value.param, caught.value.code) == (param, code), given
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="another", input="a")
