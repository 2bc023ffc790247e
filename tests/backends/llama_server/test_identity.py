"""Tests of another model at the same address, and of a restarted server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends import http
from latimer.backends.base import Generation, Prompt, Sampling, Text
from latimer.backends.errors import EngineError, EngineSilent, EngineUnavailable
from latimer.backends.identity import difference
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from support import gguf_files
from support.clients import client_of
from support.engines.recorded import RecordedServer
from support.jobs import run
from support.recordings import body
from support.servers import Swapped, canned, swapped_llama_server

MODELS = Path(__file__).parent.parent.parent / "models"
SPM, BPE = MODELS / "spm.gguf", MODELS / "bpe.gguf"
GREEDY = Sampling(temperature=0.0)
CHAT = {"messages": [{"role": "user", "content": "Hi <|im_end|>"}], "max_tokens": 4}


@pytest.fixture
def place() -> Iterator[Swapped]:
    """An address for servers that run one after the other."""
    with swapped_llama_server() as made:
        yield made


@asynccontextmanager
async def served(address: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an adapter over a server."""
    app = OpenAIAdapter(LlamaServer(address), any_model=True)
    async with client_of(app) as client:
        yield client
    await app.aclose()


async def ids_of(client: httpx2.AsyncClient, text: str) -> Any:
    """Return the token ids that the adapter gives for a text."""
    return (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]


async def test_after_a_swap_nothing_of_the_old_model_is_used(place: Swapped) -> None:
    """Name, vocabulary and fingerprint belong to the new model from the first answer after a
    swap."""
    await asyncio.to_thread(place.start, SPM)
    async with served(place.address) as client:
        old = (await client.post("/chat/completions", json={"model": "x", **CHAT})).json()
        old_ids = await ids_of(client, "Hello there")
        await asyncio.to_thread(place.start, BPE)
        reply = await client.post("/chat/completions", json={"model": "x", **CHAT})
        if reply.status_code == 503:
            assert "another model" in reply.json()["error"]["message"]
            assert reply.headers["retry-after-ms"]
            reply = await client.post("/chat/completions", json={"model": "x", **CHAT})
        assert reply.status_code == 200
        assert reply.json()["system_fingerprint"] != old["system_fingerprint"]
        assert (await client.get("/models")).json()["data"][0]["id"] == "bpe.gguf"
        assert (await client.get("/health")).status_code == 200
        ids = await ids_of(client, "Hello there")
    async with served(place.address) as fresh:
        assert ids == await ids_of(fresh, "Hello there") != old_ids
        again = (await fresh.post("/chat/completions", json={"model": "x", **CHAT})).json()
        assert again["system_fingerprint"] == reply.json()["system_fingerprint"]


async def test_lora_adapters_are_a_part_of_the_model(place: Swapped, tmp_path: Path) -> None:
    """A server that returns with other adapters serves another model: jobs for the old one are
    refused, and its fingerprint is new."""
    adapter = tmp_path / "polite.gguf"
    gguf_files.lora(DEMO_MODEL, adapter)
    await asyncio.to_thread(place.start, DEMO_MODEL)
    backend = LlamaServer(place.address)
    old = await backend.model()
    job = Generation(Prompt(Text("a")), 2, sampling=GREEDY, fingerprint=old.fingerprint)
    await asyncio.to_thread(place.start, DEMO_MODEL, "--lora-scaled", f"{adapter}:0.5")
    with pytest.raises(EngineUnavailable, match="another model"):
        await run(backend, job)
    new = await backend.model()
    assert (old.adapters, new.adapters) == ((), ("polite.gguf:0.5",))
    assert new.fingerprint != old.fingerprint
    able = backend.capabilities
    found = difference(new, old, able, able, "as before")
    assert found.endswith("its set of LoRA adapters is not as before")
    await backend.aclose()


async def test_the_list_of_models_is_right_after_a_swap(place: Swapped) -> None:
    """The list of models names the new model after a swap, without an error."""
    await asyncio.to_thread(place.start, SPM)
    async with served(place.address) as client:
        assert (await client.get("/models")).json()["data"][0]["id"] == "spm.gguf"
        await asyncio.to_thread(place.start, BPE)
        assert (await client.get("/models")).json()["data"][0]["id"] == "bpe.gguf"


async def test_a_job_for_the_old_model_is_refused(place: Swapped) -> None:
    """The backend rejects a job that was prepared for another model."""
    await asyncio.to_thread(place.start, SPM)
    backend = LlamaServer(place.address)
    old = await backend.model()
    job = Generation(Prompt(Text("a")), 2, sampling=GREEDY, fingerprint=old.fingerprint)
    assert (await run(backend, job))[0]
    await asyncio.to_thread(place.start, BPE)
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="another model"):
            await run(backend, job)
    new = await backend.model()
    assert (new.name, old.name) == ("bpe.gguf", "spm.gguf")
    assert (await run(backend, replace(job, fingerprint=new.fingerprint)))[0]
    pieces = await backend.token_bytes()
    assert len(pieces) != 600
    await backend.aclose()


async def test_the_same_model_again_goes_on(place: Swapped) -> None:
    """A restarted server with the same model accepts jobs that were prepared before."""
    await asyncio.to_thread(place.start, SPM)
    backend = LlamaServer(place.address)
    model = await backend.model()
    job = Generation(
        Prompt(Text("a")), 2, (None,) * 3, sampling=GREEDY, fingerprint=model.fingerprint
    )
    before = await run(backend, job)
    await asyncio.to_thread(place.stop)
    with pytest.raises(EngineUnavailable):
        await run(backend, job)
    with pytest.raises(EngineUnavailable):
        await backend.model()
    await asyncio.to_thread(place.start, SPM)
    assert (await run(backend, job))[0] == before[0]
    assert await backend.model() is model
    await backend.aclose()


async def test_another_file_under_the_same_name_is_another_model(
    place: Swapped, tmp_path: Path
) -> None:
    """Another vocabulary size changes the fingerprint of a model with the same path and
    template."""
    path = tmp_path / "model.gguf"
    path.write_bytes(SPM.read_bytes())
    template = "{{ messages[0].content }}"
    await asyncio.to_thread(place.start, path, "--chat-template", template)
    backend = LlamaServer(place.address)
    old = await backend.model()
    path.write_bytes(DEMO_MODEL.read_bytes())
    await asyncio.to_thread(place.start, path, "--chat-template", template)
    assert (await backend.model()).fingerprint != old.fingerprint
    await backend.aclose()


async def test_an_answer_that_names_another_model_is_an_error() -> None:
    """A final event that names another model raises an error, and the facts are read again."""
    events = body("llama_server", "greedy-stream").split(b"\n\n")
    final = orjson.loads(events[-2].removeprefix(b"data: "))
    events[-2] = b"data: " + orjson.dumps({**final, "model": "other.gguf"})
    server = RecordedServer({"/completion": b"\n\n".join(events)})
    job = Generation(Prompt(Text("a")), 20, sampling=GREEDY)
    with pytest.raises(EngineError, match=r"another model \(other\.gguf") as caught:
        await run(server.backend, job)
    assert not isinstance(caught.value, EngineUnavailable)
    before = server.asked.count("/props")
    with pytest.raises(EngineError):
        await run(server.backend, job)
    assert server.asked.count("/props") == before + 1


async def test_a_users_own_client_is_asked_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an httpx client, which does not report new connections, model facts are read again after
    two seconds."""
    server = RecordedServer()
    old = await server.backend.model()
    server.answers["/props"]["chat_template"] = "another"  # type: ignore[index]
    assert await server.backend.model() is old
    server.backend.server.monitor._checked_at -= 2.1
    new = await server.backend.model()
    assert (new.template, new.fingerprint != old.fingerprint) == ("another", True)


async def test_connections_that_are_kept_cost_no_questions(place: Swapped) -> None:
    """150 requests over kept connections check the model at most three times."""
    await asyncio.to_thread(place.start, SPM)
    backend = LlamaServer(place.address)
    await backend.model()
    looked = 0
    check = backend.server.monitor.check

    async def counted() -> None:
        nonlocal looked
        looked += 1
        await check()

    backend.server.monitor.check = counted  # type: ignore[method-assign]
    for _ in range(150):
        await run(backend, Generation(Prompt((5,)), 1, sampling=GREEDY))
    assert looked <= 3
    await backend.aclose()


async def test_a_version_that_the_server_does_not_know() -> None:
    """A server without a version has the one that is given; another one has its own."""
    props = orjson.loads(body("llama_server", "props"))
    assert props["build_info"] == "b0-unknown"
    for own, wanted in (("b0-unknown", "b1, wheel 2"), ("b7000-abc", "b7000-abc")):
        answers = {"/props": (200, orjson.dumps({**props, "build_info": own}))}
        answers["*"] = (200, orjson.dumps({"tokens": [1]}))
        with canned(answers) as (address, _):
            engine = LlamaServer(address, build="b1, wheel 2")
            assert (await engine.model()).build == wanted
            await engine.aclose()


async def test_a_server_that_hangs_is_not_asked_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question about the model ends, as a call does, when `/health` is silent, too."""
    monkeypatch.setattr(http, "PROBE_AFTER", 0.1)
    monkeypatch.setattr(http, "PROBE_SECONDS", 0.1)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    running = await asyncio.start_server(hang, "127.0.0.1", 0)
    backend = LlamaServer(f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}")
    async with asyncio.timeout(10):
        with pytest.raises(EngineSilent, match="has stopped"):
            await backend.model()
    await backend.aclose()
    running.close()
