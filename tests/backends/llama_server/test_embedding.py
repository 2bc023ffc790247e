"""Tests of embeddings over real llama-servers, and of its invalid replies."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
from latimer.backends.base import Embedding, EmbeddingModel, Generation, Prompt, Ranking, Text
from latimer.backends.errors import (
    ContextExceeded,
    EmptyPrompt,
    EngineUnavailable,
    NotServed,
    UnknownToken,
)
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from support.embeddings import MODELS, TEXTS, backend_of, cosine, is_unit, posted
from support.jobs import run
from support.servers import swapped_llama_server


@pytest.fixture(scope="module")
async def mean() -> AsyncIterator[tuple[LlamaServer, str]]:
    """A backend of an encoder with mean pooling, in batches of at most 64 tokens."""
    async with backend_of(
        MODELS / "bert-mean.gguf", "--embeddings", "-b", "64", "-ub", "64"
    ) as made:
        yield made


@pytest.mark.parametrize("name", ["bert-cls", "last"])
async def test_vectors_are_those_of_the_server(name: str) -> None:
    """Vectors of texts and of their ids equal the server's own, with unit length and in order."""
    async with backend_of(MODELS / f"{name}.gguf", "--embeddings") as (backend, address):
        # The server itself parses the control tokens that a text spells.
        texts = [text for text in TEXTS if "<" not in text]
        job = Embedding([Text(text) for text in texts])
        own = posted(address, "/v1/embeddings", {"input": texts})["data"]
        found = (await backend.embed(job)).vectors
        assert all(map(is_unit, found))
        for vector, entry in zip(found, own, strict=True):
            assert cosine(vector, entry["embedding"]) > 0.99999
        ids = [
            await backend.tokenize(text, add_special=True, parse_special=False) for text in texts
        ]
        again = await backend.embed(Embedding(ids))
        assert again.prompt_tokens == sum(map(len, ids))
        for vector, other in zip(found, again.vectors, strict=True):
            assert cosine(vector, other) > 0.99999


@pytest.mark.parametrize("name", ["spm", "bpe", "bert-mean", "last"])
async def test_many_texts_have_the_tokens_of_single_ones(name: str) -> None:
    """Texts of one call have the ids of separate calls, with the model's special tokens, and the
    count omits these."""
    options = ("--embeddings", "--pooling", "last")
    async with backend_of(MODELS / f"{name}.gguf", *options) as (backend, _address):
        sent: list[Any] = []
        inner = backend.server.upstream

        class Watched:
            address = inner.address
            aclose = inner.aclose

            @asynccontextmanager
            async def send(self, method: str, path: str, data: Any = None) -> AsyncIterator[Any]:
                if path == "/embedding":
                    sent.extend(orjson.loads(data)["content"])
                async with inner.send(method, path, data) as reply:
                    yield reply

        await backend.embed(Embedding([Text("x")]))
        backend.server.upstream = Watched()
        found = await backend.embed(Embedding([Text(text) for text in TEXTS]))
        backend.server.upstream = inner
        for text, ids in zip(TEXTS, sent, strict=True):
            single = await backend.tokenize(text, add_special=True, parse_special=False)
            assert tuple(ids) == single, text
        plain = [
            len(await backend.tokenize(text, add_special=False, parse_special=False))
            for text in TEXTS
        ]
        assert found.prompt_tokens == sum(plain)


async def test_facts_of_an_encoder(mean: tuple[LlamaServer, str]) -> None:
    """An encoder reports its dimensions and its context, and that it does not generate."""
    backend, _address = mean
    assert await backend.embedding_model() == EmbeddingModel(64, None, 512, generates=False)


async def test_an_encoder_refuses_to_generate(mean: tuple[LlamaServer, str]) -> None:
    """A generation, and the vocabulary that it needs, name the endpoint for embeddings."""
    backend, _address = mean
    for work in (run(backend, Generation(Prompt(Text("a")), 1)), backend.specials()):
        with pytest.raises(NotServed) as caught:
            await work
        assert (caught.value.task, caught.value.hint) == (
            "generate",
            "Did you mean to use v1/embeddings?",
        )


async def test_eight_jobs_of_many_inputs_keep_their_order(mean: tuple[LlamaServer, str]) -> None:
    """600 inputs of one job, and of eight jobs at once, have the server's vectors in order."""
    backend, address = mean
    texts = [f"{TEXTS[index % 5]} {index}" for index in range(600)]
    alone = (await backend.embed(Embedding([Text(text) for text in texts]))).vectors
    own = posted(address, "/v1/embeddings", {"input": texts})["data"]
    for vector, entry in zip(alone, own, strict=True):
        assert cosine(vector, entry["embedding"]) > 0.99999
    parts = [texts[start : start + 75] for start in range(0, 600, 75)]
    found = await asyncio.gather(
        *(backend.embed(Embedding([Text(text) for text in part])) for part in parts)
    )
    together = [vector for part in found for vector in part.vectors]
    for vector, other in zip(alone, together, strict=True):
        assert cosine(vector, other) > 0.99999


@pytest.mark.parametrize("count", [1, 3])
async def test_long_inputs_name_their_limit(mean: tuple[LlamaServer, str], count: int) -> None:
    """An input beyond the batch or the context is an error with the field and both numbers."""
    backend, _address = mean
    inputs = [Text("x"), Text("y"), Text("x " * 62)][-count:]
    param = "input" if count == 1 else "input[2]"
    await backend.embed(Embedding(inputs))
    inputs[-1] = Text("x " * 63)
    with pytest.raises(ContextExceeded) as caught:
        await backend.embed(Embedding(inputs))
    assert (caught.value.context, caught.value.prompt_tokens, caught.value.param) == (64, 65, param)
    assert "--ubatch-size" in caught.value.hint
    inputs[-1] = Text("x " * 511)
    with pytest.raises(ContextExceeded) as caught:
        await backend.embed(Embedding(inputs))
    facts = (caught.value.context, caught.value.prompt_tokens, caught.value.param)
    assert facts == (512, 513, param)
    assert not caught.value.hint


async def test_odd_inputs_are_refused_by_name(mean: tuple[LlamaServer, str]) -> None:
    """An id beyond the vocabulary and an input without tokens name their input."""
    backend, _address = mean
    size = (await backend.model()).sizes["n_vocab"]
    await backend.embed(Embedding([(size - 1,), (0,)]))
    with pytest.raises(UnknownToken) as unknown:
        await backend.embed(Embedding([(5,), (size,)]))
    assert (unknown.value.param, unknown.value.size) == ("input[1]", size)
    with pytest.raises(EmptyPrompt) as empty:
        await backend.embed(Embedding([Text("a"), ()]))
    assert empty.value.param == "input[1]"
    with pytest.raises(EmptyPrompt) as alone:
        await backend.embed(Embedding([()]))
    assert alone.value.param == "input"


async def test_a_text_of_whitespace_has_a_vector(mean: tuple[LlamaServer, str]) -> None:
    """A text without tokens is embedded with the special tokens that the model adds."""
    backend, _address = mean
    special = await backend.tokenize("", add_special=True, parse_special=False)
    found = await backend.embed(Embedding([Text(" \n", False), special]))
    assert cosine(*found.vectors) > 0.99999
    assert found.prompt_tokens == len(special)


async def test_a_cancelled_job_ends_its_calls(mean: tuple[LlamaServer, str]) -> None:
    """After the cancellation of a job its calls have ended, and others run at once."""
    backend, address = mean
    job = Embedding([Text("x " * 60)] * 2000)
    task = asyncio.create_task(backend.embed(job))
    while not any(slot["is_processing"] for slot in _slots(address)):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(2):
        await backend.embed(Embedding([Text("x")]))
        while any(slot["is_processing"] for slot in _slots(address)):
            await asyncio.sleep(0.01)


def _slots(address: str) -> Any:
    with urllib.request.urlopen(f"{address}/slots") as reply:  # noqa: S310
        return json.load(reply)


async def test_an_embedding_model_refuses_rankings(mean: tuple[LlamaServer, str]) -> None:
    """A server without a reranker refuses documents and says how to start one."""
    with pytest.raises(NotServed) as caught:
        await mean[0].rank(Ranking("x", ["y"]))
    facts = caught.value.task, caught.value.hint
    assert facts == ("rank", "Start llama-server with --reranking.")


async def test_generations_begin_beside_a_large_job() -> None:
    """Generations begin and end while a large job is computed, on one slot and on several."""
    job = Embedding([Text("the cat sat on the mat " * 10)] * 1000)
    for slots in (1, 4):
        options = ("--embeddings", "--pooling", "mean")
        async with backend_of(DEMO_MODEL, *options, slots=slots) as (backend, _address):
            await backend.embedding_model()
            large = asyncio.create_task(backend.embed(job))
            await asyncio.sleep(0.1)
            for _ in range(3):
                await run(backend, Generation(Prompt(Text("The capital")), 4))
            assert not large.done()
            large.cancel()


async def test_a_job_for_another_model_is_not_sent(mean: tuple[LlamaServer, str]) -> None:
    """A job with the fingerprint of another model raises an error."""
    with pytest.raises(EngineUnavailable, match="another model"):
        await mean[0].embed(Embedding([Text("x")], fingerprint="fp_other"))


async def test_a_restart_changes_what_is_served() -> None:
    """After a restart the server is asked again if it has embeddings, and how they are pooled."""
    with swapped_llama_server() as place:
        place.start(DEMO_MODEL)
        backend = LlamaServer(place.address)
        job = Embedding([Text("x")])
        with pytest.raises(NotServed) as off:
            await backend.embed(job)
        assert (await backend.embedding_model(), off.value.hint) == (
            None,
            "Start llama-server with --embeddings.",
        )
        place.start(DEMO_MODEL, "--embeddings", "--pooling", "none")
        assert await _recovered(backend) is None
        with pytest.raises(NotServed) as loose:
            await backend.embed(job)
        assert "--pooling mean" in loose.value.hint
        place.start(DEMO_MODEL, "--embeddings", "--pooling", "mean")
        assert await _recovered(backend) == EmbeddingModel(192, None, 512)
        assert is_unit((await backend.embed(job)).vectors[0])
        await backend.aclose()


async def _recovered(backend: LlamaServer) -> EmbeddingModel | None:
    """Return the facts once the backend has noticed a restart."""
    backend.server.watch.doubt()
    return await backend.embedding_model()
