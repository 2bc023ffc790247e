"""Tests of a llama-server's invalid replies about embeddings, and of the queue for its calls."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import httpx2
import orjson
import pytest
from latimer.backends.base import Embedding, Text
from latimer.backends.errors import Busy, EngineError, EngineUnavailable, NotServed
from latimer.backends.llama_server import LlamaServer
from latimer.backends.llama_server.vectors import around, parted
from latimer.backends.upstream import HttpxUpstream
from support.recordings import body

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

    client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://fake")
    return LlamaServer(HttpxUpstream(client), max_waiting=queue)


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


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_vectors_are_an_engine_error(name: str) -> None:
    """A malformed vector, one of zeros, and one of another length are never returned."""
    calls = 0

    def change(path: str, asked: Any) -> httpx2.Response | None:
        nonlocal calls
        calls += path == "/embedding" and asked != {}
        # The first call is the test.
        if path != "/embedding" or calls < 2:
            return None
        return httpx2.Response(200, content=WRONG[name])

    with pytest.raises(EngineError):
        await fake(change).embed(Embedding([Text("a")]))


@pytest.mark.parametrize(
    "name", ["null", "number", "empty", "no-list", "no-entry", "deep", "no-rows", "flat", "text",
             "huge"],
)  # fmt: skip
async def test_a_test_of_nonsense_is_an_engine_error(name: str) -> None:
    """A malformed response to the test of embeddings is an engine error, and is not kept."""
    wrong: list[bytes] = [WRONG[name]]

    def change(path: str, asked: Any) -> httpx2.Response | None:
        if path == "/embedding" and asked and wrong:
            return httpx2.Response(200, content=wrong.pop())
        return None

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
