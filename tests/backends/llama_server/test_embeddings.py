"""Tests of embeddings over real llama-servers, and of its invalid replies."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import orjson
import pytest
from latimer.backends.base import Embedding, EmbeddingModel, Generation, Prompt, Ranking, Text
from latimer.backends.errors import (
    Busy,
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    EngineUnavailable,
    NotServed,
    UnknownToken,
)
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer, embeddings
from latimer.backends.llama_server.embeddings import around, parted, read_scores
from support.embeddings import MODELS, TEXTS, backend_of, cosine, is_unit, posted
from support.jobs import run
from support.recordings import body
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


async def test_a_server_that_generates_for_others_is_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A list of models does not wait for a server that embeds nothing while others use it. Its
    facts are complete when it has shown them."""
    monkeypatch.setattr(embeddings, "PATIENCE", 0.2)
    options = ("--embeddings", "--pooling", "last")
    async with backend_of(DEMO_MODEL, *options) as (backend, address):
        job = {"prompt": "Hello", "n_predict": 1_000, "ignore_eos": True, "cache_prompt": False}

        async def generate() -> None:
            async with httpx2.AsyncClient(timeout=None) as client:
                while True:
                    await client.post(f"{address}/completion", json=job)

        places = (await backend.model()).places
        others = [asyncio.create_task(generate()) for _ in range(3 * places)]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(5):
            facts = await backend.embedding_model()
        assert facts is not None
        assert (facts.dimensions, facts.generates) == (None, True)
        for other in others:
            other.cancel()
        async with asyncio.timeout(20):
            while facts is None or facts.dimensions is None:
                facts = await backend.embedding_model()


@pytest.mark.parametrize("name", ["spm", "bpe", "bert-mean", "last"])
async def test_many_texts_have_the_tokens_of_single_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of one call have the ids of separate calls, with the model's special tokens, and the
    count omits these."""
    options = ("--embeddings", "--pooling", "last")
    async with backend_of(MODELS / f"{name}.gguf", *options) as (backend, _address):
        sent: list[Any] = []
        await backend.embed(Embedding([Text("x")]))
        send = backend.server.client.send

        def watched(method: str, path: str, data: Any = None) -> Any:
            if path == "/embedding":
                sent.extend(orjson.loads(data)["content"])
            return send(method, path, data)

        monkeypatch.setattr(backend.server.client, "send", watched)
        found = await backend.embed(Embedding([Text(text) for text in TEXTS]))
        monkeypatch.undo()
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
    for work in (run(backend, Generation(Prompt(Text("a")), 1)), backend.special_tokens()):
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
    backend.server.monitor.invalidate()
    return await backend.embedding_model()


PROPS = orjson.loads(body("llama_server", "props"))
VECTOR = [0.6, 0.8]
Answer = Callable[[str, Any], httpx2.Response | None]


def fake(change: Answer, slots: int = 4, queue: int = 8) -> LlamaServer:
    """Return a backend of a server with two dimensions, with some responses replaced."""

    async def answer(request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        asked: Any = orjson.loads(request.content or b"null")
        changed = change(path, asked)
        if changed is not None:
            return changed
        if path == "/props":
            return httpx2.Response(200, json={**PROPS, "total_slots": slots})
        if path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"meta": {"n_vocab": 100}}]})
        if path == "/tokenize":
            content = asked["content"]
            parts = content if isinstance(content, list) else [content]
            ids = [5 if isinstance(part, str) else part for part in parts]
            return httpx2.Response(200, json={"tokens": ids})
        if path == "/embedding":
            if asked == {}:
                return httpx2.Response(400, json={"error": {"message": "no", "type": "x"}})
            await asyncio.sleep(0.001)
            rows = [
                {"index": index, "embedding": [VECTOR]} for index in range(len(asked["content"]))
            ]
            return httpx2.Response(200, json=rows)
        return httpx2.Response(501, json={"error": {"message": "no", "type": "x"}})

    client = httpx2.MockTransport(answer)
    return LlamaServer("http://fake", client=client, max_waiting=queue)


def only(path: str, content: bytes, status: int = 200) -> Answer:
    """Return a change of the responses to one path."""

    def change(asked: str, _body: Any) -> httpx2.Response | None:
        return httpx2.Response(status, content=content) if asked == path else None

    return change


def row(*entries: Any) -> bytes:
    """Return a response of `/embedding` with a row for each entry."""
    return orjson.dumps([{"index": 0, "embedding": [list(entries)]}])


WRONG = {
    "null": b"null",
    "number": b"7",
    "empty": b"",
    "no-list": b'{"embedding":[0.6,0.8]}',
    "no-entry": b"[]",
    "deep": b"[" * 200_000,
    "no-rows": b'[{"index":0,"embedding":[]}]',
    "flat": b'[{"index":0,"embedding":[0.6,0.8]}]',
    "text": row("a", "b"),
    "huge": b'[{"index":0,"embedding":[[1e400,1]]}]',
    "short": row(1.0),
    "long": row(0.6, 0.8, 0.0),
    "zero": row(0.0, 0.0),
    "infinite": row(None, 1.0),
    "unpooled": b'[{"index":0,"embedding":[[0.6,0.8],[0.6,0.8]]}]',
    "two": orjson.dumps([{"index": 0, "embedding": [VECTOR]}] * 2),
    "other-index": orjson.dumps([{"index": 1, "embedding": [VECTOR]}]),
    "negative-index": orjson.dumps([{"index": -1, "embedding": [VECTOR]}]),
}


MALFORMED = (
    "null", "number", "empty", "no-list", "no-entry", "deep", "no-rows", "flat", "text", "huge",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "before"), [*((name, 1) for name in WRONG), *((name, 0) for name in MALFORMED)]
)
async def test_wrong_vectors_are_an_engine_error(name: str, before: int) -> None:
    """A malformed vector, one of zeros, and one of another length are never returned, neither after
    the test of embeddings nor by it, and the next job is computed."""
    calls = 0

    def change(path: str, asked: Any) -> httpx2.Response | None:
        nonlocal calls
        if path != "/embedding" or not asked:
            return None
        calls += 1
        return httpx2.Response(200, content=WRONG[name]) if calls == before + 1 else None

    backend = fake(change)
    with pytest.raises(EngineError):
        await backend.embed(Embedding([Text("a")]))
    assert (await backend.embed(Embedding([Text("a")]))).vectors[0] == array("f", VECTOR)


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("/embedding", 400, EngineError),
        ("/embedding", 404, NotServed),
        ("/embedding", 500, EngineError),
        ("/embedding", 503, EngineUnavailable),
        ("/rerank", 503, EngineUnavailable),
        ("/rerank", 500, EngineError),
    ],
)
async def test_failed_tests_are_not_the_clients_fault(
    path: str, status: int, error: type[Exception]
) -> None:
    """A rejected test is an engine error; a server without the endpoint has no embeddings."""
    kind = {400: "invalid_request_error", 503: "unavailable_error"}.get(status, "server_error")
    reply = orjson.dumps({"error": {"message": "no", "type": kind}})
    with pytest.raises(error):
        await fake(only(path, reply, status)).embed(Embedding([Text("a")]))


@pytest.mark.parametrize(
    "entries", [(0.0,) * 4, (None, 0.0, None, 0.0), (0.9, 0.0, 1e-40, -0.0), (1.0, None, None, 0.0)]
)
async def test_unused_memory_is_not_a_vector(entries: tuple[float | None, ...]) -> None:
    """A reranker started with --embeddings returns unused memory and is refused with a hint."""
    backend = fake(only("/embedding", row(*entries)))
    assert await backend.embedding_model() is None
    with pytest.raises(NotServed, match="--reranking"):
        await backend.embed(Embedding([Text("a")]))


def test_special_tokens_are_found_around_a_text() -> None:
    """The tokens before and after a text's own are those that the model adds."""
    assert around((1, 7, 8, 2), (7, 8)) == ((1,), (2,))
    assert around((7,), (7,)) == ((), ())
    with pytest.raises(ValueError, match="change the tokens"):
        around((1, 9, 2), (7,))


@pytest.mark.parametrize(
    "value",
    [None, [], [5], [-1], [-1, 5, -1, 6, -1], [-2, 5, -1], [-1, 100, -1], [5, -1, -1], [-1, "5"],
     [-1, True, -1]],
    ids=str,
)  # fmt: skip
def test_wrong_separators_are_malformed(value: Any) -> None:
    """Ids of two texts have two separators, and no other id outside the vocabulary."""
    assert parted([-1, 5, 6, -1], 2, 100) == [(5, 6), ()]
    with pytest.raises((TypeError, ValueError)):
        parted(value, 2, 100)


def watched(queue: int) -> tuple[LlamaServer, list[int]]:
    """Return a backend of one place, and the list of the first id of each of its calls."""
    calls: list[int] = []

    def change(path: str, asked: Any) -> httpx2.Response | None:
        if path == "/embedding" and asked:
            calls.append(asked["content"][0][0])
        return None

    return fake(change, slots=1, queue=queue), calls


async def test_facts_do_not_wait_for_a_place() -> None:
    """While all places are taken the facts are unknown, and they are read when one is free."""
    backend = fake(lambda _path, _asked: None, slots=1)
    await backend.model()
    await backend.server.turns.take()
    async with asyncio.timeout(1):
        facts = await backend.embedding_model()
    assert facts is not None
    assert facts.dimensions is None
    backend.server.turns.release()
    again = await backend.embedding_model()
    assert again is not None
    assert again.dimensions == 2


@pytest.mark.parametrize("generations", [0, 1, 3])
async def test_a_large_job_runs_few_calls_at_a_time(generations: int) -> None:
    """Two calls of a large job run at a time, and one while another request is computed."""
    backend = fake(lambda _path, _asked: None)
    await backend.embed(Embedding([(1,)]))
    turns = backend.server.turns
    job = asyncio.create_task(backend.embed(LONG))
    most = 0
    while not job.done():
        await asyncio.sleep(0)
        most = max(most, turns.taken)
    assert (most, turns.taken) == (2, 0)
    for _ in range(generations):
        await turns.take()
    await backend.embed(LONG)
    job = asyncio.create_task(backend.embed(LONG))
    most = 0
    while not job.done():
        await asyncio.sleep(0)
        most = max(most, turns.taken - generations)
    assert most == (1 if generations else 2)


# A call of its own for each input.
LONG = Embedding([(2,) * 2048] * 20)


async def test_a_short_job_waits_for_one_call_of_a_long_one() -> None:
    """A short job that starts during a long one is computed after one more of its calls."""
    backend, calls = watched(queue=2)
    long = asyncio.create_task(backend.embed(LONG))
    while calls.count(2) < 3:
        await asyncio.sleep(0)
    await backend.embed(Embedding([(3,)]))
    assert calls.count(2) <= 5
    assert len((await long).vectors) == calls.count(2) == 20


async def test_only_new_jobs_are_rejected_as_busy() -> None:
    """A full queue rejects a new job; the calls of a job that was admitted all run."""
    backend, calls = watched(queue=1)
    long = asyncio.create_task(backend.embed(LONG))
    while calls.count(2) < 3:
        await asyncio.sleep(0)
    with pytest.raises(Busy):
        await backend.embed(Embedding([(3,)]))
    assert len((await long).vectors) == 20
    assert 3 not in calls


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


async def test_a_job_for_another_model_is_not_sent(
    mean: tuple[LlamaServer, str], ranking: tuple[LlamaServer, str]
) -> None:
    """Inputs and a query with the fingerprint of another model raise an error."""
    for work in (
        mean[0].embed(Embedding([Text("x")], fingerprint="fp_other")),
        ranking[0].rank(Ranking("x", ["y"], fingerprint="fp_other")),
    ):
        with pytest.raises(EngineUnavailable, match="another model"):
            await work


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
