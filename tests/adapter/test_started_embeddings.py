"""Tests that embeddings and rankings over llama-servers that Latimer starts are as in process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.engines import WrongSetup, backend_of
from latimer.adapter.settings import Settings
from latimer.backends.base import (
    Backend,
    Embedding,
    Generation,
    Prompt,
    Ranking,
    Text,
)
from latimer.backends.errors import ContextExceeded, NotServed
from latimer.backends.llama_cpp import DEMO_MODEL
from support.embeddings import MODELS, TEXTS, cosine
from support.jobs import run
from support.servers import command


@asynccontextmanager
async def started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, **settings: Any
) -> AsyncIterator[Backend]:
    """Yield the backend of settings, which has started its engine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = backend_of(Settings.load(None, backend=engine, threads=1, **settings))
    try:
        await found.model()
        yield found
    finally:
        await found.aclose()


def job(*texts: str) -> Embedding:
    """Return a job for texts, as the endpoint makes it."""
    return Embedding([Text(text, parse_special=False) for text in texts])


HELLO = Generation(Prompt(Text("Hello")), 4)


@pytest.mark.parametrize(
    ("name", "settings", "longest"),
    [
        ("bert-mean", {}, 500),
        ("last", {}, 2_000),
        ("bert-mean", {"pooling": "cls"}, 500),
        ("demo", {"embeddings": True}, 2_000),
        ("demo", {"pooling": "mean"}, 2_000),
    ],
)
async def test_vectors_are_those_in_process(
    name: str,
    settings: dict[str, Any],
    longest: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A file and its options have the same vectors, facts and longest input on both engines, and
    only a model that is made for chat chats."""
    model = str(DEMO_MODEL if name == "demo" else MODELS / f"{name}.gguf")
    both = []
    for engine in ("llama-server", "llama-cpp"):
        async with started(monkeypatch, tmp_path, engine, model=model, **settings) as backend:
            short = await backend.embed(job(*TEXTS))
            # Alone: llama-server computes what arrives together in one batch, and where that ends
            # within a text, the vector of 2,000 tokens differs by 0.0003.
            long = await backend.embed(job("a " * longest))
            both.append((short, long, await backend.embedding_model()))
            if name == "demo":
                assert (await run(backend, HELLO))[0]
            else:
                with pytest.raises(NotServed, match="v1/embeddings"):
                    await run(backend, HELLO)
    (*server, facts), (*own, expected) = both
    assert facts == expected
    for one, other in zip(server, own, strict=True):
        assert one.prompt_tokens == other.prompt_tokens
        for vector, same in zip(one.vectors, other.vectors, strict=True):
            assert cosine(list(vector), list(same)) > 0.9999


async def test_scores_are_those_in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The file of a reranker ranks on both engines, with the same scores, and nothing advises a
    larger batch for a document that is longer than the model's context."""
    model, documents = str(MODELS / "rank.gguf"), [text for text in TEXTS if "<" not in text]
    both = []
    for engine in ("llama-server", "llama-cpp"):
        async with started(monkeypatch, tmp_path, engine, model=model) as backend:
            both.append((await backend.rank(Ranking("the cat", documents))).scores)
            facts = await backend.embedding_model()
            assert facts is not None
            assert (facts.pooling, facts.generates) == ("rank", False)
            with pytest.raises(ContextExceeded) as caught:
                await backend.rank(Ranking("the cat", ["x", "x " * 600]))
            assert (caught.value.param, caught.value.hint) == ("documents[1]", "")
            with pytest.raises(NotServed, match="v1/rerank"):
                await run(backend, HELLO)
    assert both[0] == pytest.approx(both[1], abs=0.02)


async def test_a_batch_bounds_the_inputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With `batch`, a longer input is refused, and the advice is Latimer's option."""
    settings = {"model": str(MODELS / "rank.gguf"), "batch": 64}
    async with started(monkeypatch, tmp_path, "llama-server", **settings) as backend:
        with pytest.raises(ContextExceeded) as caught:
            await backend.rank(Ranking("the cat", ["x " * 100]))
        assert caught.value.context == 64
        assert caught.value.hint == "Start Latimer with a larger --batch for longer inputs."


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": str(MODELS / "bert-mean.gguf"), "embeddings": False}, "cannot generate text"),
        ({"model": str(MODELS / "bert-mean.gguf"), "mmproj": DEMO_MODEL}, "text only"),
        ({"pooling": "rank"}, "not a reranker"),
        ({"pooling": "mean", "embeddings": False}, "'pooling' requires embeddings"),
    ],
)
def test_options_that_contradict_the_file(settings: dict[str, Any], words: str) -> None:
    """Options that a file does not support are refused before a llama-server is started."""
    with pytest.raises(WrongSetup, match=words):
        backend_of(Settings.load(None, backend="llama-server", **settings))


@pytest.mark.parametrize(
    ("name", "task", "path", "body"),
    [
        ("bert-mean", "embeddings only", "embeddings", {"input": "x"}),
        ("rank", "reranking only", "rerank", {"query": "x", "documents": ["y", "z"]}),
    ],
)
def test_the_first_line_says_what_a_model_is_made_for(
    name: str, task: str, path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    """The file alone is enough: the first line, the list of models and the endpoint say the same,
    and chat is a 404 that names the endpoint."""
    arguments = (str(MODELS / f"{name}.gguf"), "--backend", "llama-server")
    with command(*arguments, XDG_STATE_HOME=str(tmp_path)) as (process, url):
        assert process.stderr is not None
        line = next(line for line in process.stderr if b"Latimer serves" in line)
        assert f", {task})" in line.decode()
        [model] = httpx2.get(f"{url}/v1/models").json()["data"]
        assert model["architecture"]["output_modalities"] == [path]
        assert httpx2.post(f"{url}/v1/{path}", json=body, timeout=60).status_code == 200
        chat = {"model": name, "messages": [{"role": "user", "content": "Hello"}]}
        reply = httpx2.post(f"{url}/v1/chat/completions", json=chat, timeout=60)
        assert reply.status_code == 404
        assert f"v1/{path}" in reply.json()["error"]["message"]
