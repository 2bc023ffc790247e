"""Tests that invalid responses of llama-server always raise an `EngineError`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from latimer.backends.base import Generation, Prompt, Stops, Text
from latimer.backends.errors import EngineError, EngineUnavailable
from latimer.backends.llama_server.translate import to_error
from support.engines.recorded import RecordedServer
from support.jobs import run
from support.recordings import body

PROPS = orjson.loads(body("llama_server", "props"))
DEEP = b"[" * 200_000
NONSENSE: dict[str, bytes] = {
    "null": b"null",
    "number": b"7",
    "huge": b"1e400",
    "list": b"[[1]]",
    "text": b'"x"',
    "empty": b"",
    "deep": DEEP,
    "deep-inside": b'{"tokens":' + b"[" * 900 + b"]" * 900 + b"}",
    "not-utf-8": b'{"tokens":[1],"prompt":"\xff"}',
    "negative": b'{"tokens":[-1],"prompt":5,"content":7}',
    "large": b'{"tokens":[1180591620717411303424],"prompt":{},"content":[]}',
    "nan": b'{"tokens":[NaN]}',
}


JOBS = {
    "/props": Generation(Prompt(Text("a")), 1),
    "/completion": Generation(Prompt(Text("a")), 1),
    "/tokenize": Generation(Prompt(Text("a", parse_special=False)), 1),
    "/infill": Generation(Prompt(Text("a"), suffix="b"), 1),
}


@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.parametrize("path", JOBS)
async def test_nonsense_is_an_engine_error(path: str, name: str) -> None:
    """An invalid response to any call of a job raises an engine error."""
    with pytest.raises(EngineError):
        await run(RecordedServer({path: NONSENSE[name]}).backend, JOBS[path])


@pytest.mark.parametrize("name", NONSENSE)
async def test_a_vocabulary_of_nonsense_is_an_engine_error(name: str) -> None:
    """An invalid response to the call for the vocabulary raises an engine error."""
    backend = RecordedServer({"/completion": NONSENSE[name]}).backend
    for ask in (backend.token_bytes, backend.special_tokens, backend.server.facts):
        with pytest.raises(EngineError):
            await ask()


@pytest.mark.parametrize(
    "entry",
    [
        {"id": -1, "bytes": [1]},
        {"id": 9, "bytes": [1]},
        {"id": 0, "bytes": 10**12},
        {"id": 0, "bytes": [300]},
        {"id": "0", "bytes": [1]},
        {"id": 0, "bytes": [32]},
    ],
    ids=["negative", "beyond", "zeros", "no-byte", "text", "no-letter"],
)
async def test_odd_pieces_are_an_engine_error(entry: dict[str, Any]) -> None:
    """A vocabulary entry with an invalid id or invalid bytes raises an engine error."""
    reply = {"completion_probabilities": [{"top_logprobs": [entry]}]}
    with pytest.raises(EngineError):
        await RecordedServer({"/completion": orjson.dumps(reply)}).backend.server.facts()


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_slots": 10**12},
        {"total_slots": 0},
        {"total_slots": "4"},
        {"default_generation_settings": {"n_ctx": -1}},
        {"default_generation_settings": {"n_ctx": 0}},
        {"default_generation_settings": {"n_ctx": 2**62}},
        {"default_generation_settings": {"n_ctx": 1.5}},
        {"default_generation_settings": []},
        {"model_path": 5},
        {"model_alias": ["x"]},
        {"chat_template": {"a": 1}},
        {"modalities": [1]},
        {"media_marker": 9},
        {"bos_token": 1},
    ],
    ids=str,
)
async def test_odd_facts_are_an_engine_error(wrong: dict[str, Any]) -> None:
    """Model facts of a wrong type or size raise an engine error."""
    with pytest.raises(EngineError, match="is not llama-server"):
        await RecordedServer({"/props": orjson.dumps({**PROPS, **wrong})}).backend.model()


@pytest.mark.parametrize("tokens", [[], [-5], [2**31], [True]], ids=str)
async def test_odd_tokens_are_the_engines_fault(tokens: list[int]) -> None:
    """Invalid token ids from the engine raise an engine error, not an error of the request."""
    backend = RecordedServer({"/tokenize": orjson.dumps({"tokens": tokens})}).backend
    with pytest.raises(EngineError):
        await backend.tokenize("a", add_special=False, parse_special=True)
    with pytest.raises(EngineError):
        await run(backend, JOBS["/tokenize"])


FINAL = {"stop": True, "stop_type": "eos", "tokens_predicted": 1, "tokens_evaluated": 1}


@pytest.mark.parametrize(
    "event",
    [
        {**FINAL, "tokens_predicted": 10**15},
        {**FINAL, "tokens_evaluated": -1},
        {**FINAL, "timings": {"cache_n": "x"}},
        {**FINAL, "timings": 5},
        {**FINAL, "stop_type": "word"},
        {"stop": 1},
        [],
        {"error": 7},
        {"error": {"message": [[]]}},
    ],
    ids=str,
)
async def test_odd_events_are_an_engine_error(event: Any) -> None:
    """An event with impossible counts or fields raises an engine error."""
    data = b"data: " + orjson.dumps(event) + b"\n\n"
    with pytest.raises(EngineError):
        await run(RecordedServer({"/completion": data}).backend, JOBS["/completion"])


def _stream(*events: Any) -> bytes:
    return b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)


def _token(count: int) -> dict[str, Any]:
    return {"stop": False, "content": "a", "tokens": [5], "tokens_predicted": count}


STREAMS: dict[str, list[dict[str, Any]]] = {
    "flood": [_token(count) for count in range(1, 40)],
    "flood-of-one": [_token(1)] * 40,
    "leap": [_token(40)],
    "unknown-reason": [_token(1), {**FINAL, "stop_type": "x"}],
    "no-reason": [_token(1), {**FINAL, "stop_type": "none"}],
    "end-of-nothing": [{**FINAL, "tokens_predicted": 0}],
    "fewer-than-sent": [_token(1), _token(2), {**FINAL, "tokens_predicted": 1}],
    "fewer-than-told": [_token(3), {**FINAL, "tokens_predicted": 2}],
    "more-than-asked": [_token(1), {**FINAL, "stop_type": "limit", "tokens_predicted": 5}],
    "after-the-end": [_token(1), FINAL, _token(2)],
    "two-ends": [_token(1), FINAL, FINAL],
}


@pytest.mark.parametrize("data", [b"null", b"", b"{},{}"])
@pytest.mark.parametrize("first", [b"", _stream(_token(1))], ids=["first", "later"])
async def test_an_event_of_nothing_is_an_engine_error(data: bytes, first: bytes) -> None:
    """An empty event raises an engine error, because its text would be missing."""
    last = _stream({**FINAL, "tokens_predicted": 3})
    answer = first + b"data: " + data + b"\n\n" + last
    with pytest.raises(EngineError):
        await run(
            RecordedServer({"/completion": answer}).backend,
            replace(JOBS["/completion"], max_tokens=4),
        )


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("read", ["together", "joined", "apart"])
async def test_counts_that_cannot_be_are_an_engine_error(name: str, read: str) -> None:
    """A stream whose token counts contradict its events or the request raises an engine error."""
    apart = read == "apart"
    job = Generation(Prompt(Text("a")), 4, stops=Stops(("b",) if apart else ()))
    job.is_joined = read == "joined"
    data = _stream(*STREAMS[name], *([] if "end" in name else [FINAL]))

    async def chunks() -> AsyncIterator[bytes]:
        for event in data.split(b"\n\n") if apart else [data]:
            yield event + b"\n\n"

    with pytest.raises(EngineError):
        await run(RecordedServer({"/completion": chunks()}).backend, job)


async def test_data_after_a_stop_sequence_is_an_engine_error() -> None:
    """Events after a last one that cut the text raise an engine error, also in one chunk."""
    stop = {**FINAL, "stop_type": "word", "stopping_word": "b", "tokens_predicted": 2}
    data = _stream(_token(1), {**_token(2), "content": ""}, stop, _token(3))
    job = Generation(Prompt(Text("a")), 4, stops=Stops(("b",)))
    with pytest.raises(EngineError, match="data after its last event"):
        await run(RecordedServer({"/completion": data}).backend, job)


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("wrong", [{"content": 5}, {"content": None}, {"tokens_predicted": "1"}])
async def test_odd_texts_are_an_engine_error(wrong: dict[str, Any], is_joined: bool) -> None:
    """A text or a count of another type raises an engine error, joined with others or not."""
    job = Generation(Prompt(Text("a")), 4, is_joined=is_joined)
    data = _stream({**_token(1), **wrong}, FINAL)
    with pytest.raises(EngineError):
        await run(RecordedServer({"/completion": data}).backend, job)


@pytest.mark.parametrize("data", [b"", b"null", b"<html>", DEEP, b'{"error":{"code":503}}'])
def test_a_503_is_unavailable_whatever_it_says(data: bytes) -> None:
    """A response with status 503 and any body means unavailable."""
    assert isinstance(to_error(503, data), EngineUnavailable)


async def test_a_server_that_loads_is_unavailable() -> None:
    """Health and model raise `EngineUnavailable` while the server loads its model."""
    loading = b'{"error":{"code":503,"message":"Loading model","type":"unavailable_error"}}'
    backend = RecordedServer({"/health": loading, "/props": loading}, 503).backend
    for ask in (backend.health, backend.model):
        with pytest.raises(EngineUnavailable, match="Loading model"):
            await ask()
