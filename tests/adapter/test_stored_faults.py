"""Tests of chat with `store: true` while the store fails, over the demo model."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.store import database, queue
from latimer.adapter.store.records import Record
from latimer.adapter.store.store import Store
from support.clients import client_of
from support.engines.echo import Echo
from support.stored import PIXEL, opened, record

PATH = "/v1/chat/completions"
SECRET = "Rumpelstiltskin"
BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 3,
    "store": True,
}


@asynccontextmanager
async def client(file: Path, required: bool = False) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an adapter that stores in a file."""
    app = OpenAIAdapter(Echo(context=256), store=str(file), store_required=required)
    await app.open_store()
    async with client_of(app) as made:
        yield made
    await app.aclose()


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Lock a file for writing, as another process does."""
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("COMMIT")
        other.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "PATIENCE", 0.1)
    monkeypatch.setattr(queue, "FIRST_PAUSE", 0.05)


async def everything(http: httpx2.AsyncClient) -> list[str]:
    """Return the ids of the stored chat completions, when the store works again."""
    end = time.monotonic() + 10
    while (reply := await http.get(PATH)).status_code == 503:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    return [one["id"] for one in reply.json()["data"]]


async def test_chat_is_answered_while_the_file_is_locked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chat waits for nothing, lists are a 503, `/health` names the state, and all is written."""
    file = tmp_path / "s.db"
    async with client(file) as http:
        old = (await http.post(PATH, json=BODY)).json()["id"]
        assert await everything(http) == [old]
        with locked(file):
            made = [(await http.post(PATH, json=BODY)).json()["id"] for _ in range(3)]
            reply = await http.get(PATH)
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "store_unavailable"
            assert (await http.get(f"{PATH}/{old}")).status_code == 200
            health = (await http.get("/health")).json()
            assert health["store"] == {"status": "unavailable", "waiting": 3, "lost": 0}
        assert await everything(http) == [old, *made]
    assert SECRET not in caplog.text


async def test_errors_of_a_store_in_memory_name_no_database(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store in memory that takes an object too late says so, and does not speak of a database."""
    gate, write = asyncio.Event(), Store.write

    async def late(store: Store, records: Sequence[Record]) -> Sequence[Record]:
        await gate.wait()
        return await write(store, records)

    monkeypatch.setattr(Store, "write", late)
    app = OpenAIAdapter(Echo(context=256))
    async with client_of(app) as http:
        assert (await http.post(PATH, json=BODY)).is_success
        reply = await http.get(PATH)
        assert reply.status_code == 503
        gate.set()
    await app.aclose()
    for text in (caplog.text, reply.text):
        assert "this process is too busy" in text
        assert "database" not in text


async def test_a_missing_image_is_a_503(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages whose image is gone are a 503, not an empty image; the completion is returned."""
    # Writing the first object includes imports, which take time on a busy machine.
    monkeypatch.setattr(queue, "PATIENCE", 5)
    file = tmp_path / "s.db"
    one = record(SECRET, image=PIXEL)
    async with opened(str(file)) as store:
        store.keep(one)
    shutil.rmtree(tmp_path / "s.media")
    async with client(file) as http:
        reply = await http.get(f"{PATH}/{one.id}/messages")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "store_unavailable"
        assert "an image, audio or file of the request is missing" in reply.text
        assert (await http.get("/health")).json()["store"]["status"] == "unavailable"
        assert (await http.get(f"{PATH}/{one.id}")).status_code == 200
    assert SECRET not in caplog.text


async def test_a_full_queue_is_in_a_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain response whose completion is lost says so, and `/health` counts it."""
    monkeypatch.setattr(queue, "MOST", 1)
    file = tmp_path / "s.db"
    async with client(file) as http:
        with locked(file):
            first, second = [await http.post(PATH, json=BODY) for _ in range(2)]
            assert "x-latimer-ignored" not in first.headers
            assert second.headers["x-latimer-ignored"] == "store"
            health = (await http.get("/health")).json()
            assert health["store"] == {"status": "full", "waiting": 1, "lost": 1}
        assert await everything(http) == [first.json()["id"]]


async def test_a_required_store_that_fails(tmp_path: Path) -> None:
    """A plain response is a 503, a stream ends with an error event, and neither is ever listed."""
    file = tmp_path / "s.db"
    async with client(file, required=True) as http:
        old = (await http.post(PATH, json=BODY)).json()["id"]
        with locked(file):
            stream = await http.post(PATH, json={**BODY, "stream": True})
            assert stream.status_code == 200
            assert "store_unavailable" in stream.text
            start = time.monotonic()
            plain = await http.post(PATH, json=BODY)
            assert time.monotonic() - start < 0.6
            assert plain.status_code == 503
            assert plain.json()["error"]["code"] == "store_unavailable"
            assert (await http.get("/health")).status_code == 503
        assert await everything(http) == [old]
        assert (await http.post(PATH, json=BODY)).status_code == 200


async def test_a_response_that_a_required_store_does_not_take_says_so(tmp_path: Path) -> None:
    """A stream ends with a failed response whose `store` is false, also one in the background."""
    file = tmp_path / "s.db"
    body = {"model": "demo", "input": SECRET, "stream": True, "max_output_tokens": 16}
    async with client(file, required=True) as http:
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        with locked(file):
            text = (await http.post("/v1/responses", json=body)).text
            last = json.loads(text.rpartition("data: ")[2])
            assert (last["type"], last["response"]["store"]) == ("response.failed", False)
        assert await everything(http) == []


async def test_a_failed_response_in_the_background_says_if_it_is_stored(tmp_path: Path) -> None:
    """The event of a response that fails before its text, and is not stored, has `store: false`."""
    file = tmp_path / "s.db"
    body = {"model": "demo", "input": "x" * 300, "background": True, "stream": True}
    async with client(file) as http:
        for lock, stored in ((nullcontext(), True), (locked(file), False)):
            with lock:
                text = (await http.post("/v1/responses", json=body)).text
                last = json.loads(text.rpartition("data: ")[2])["response"]
                assert (last["status"], last["store"]) == ("failed", stored)
                kept = (await http.get(f"/v1/responses/{last['id']}")).json()
                assert kept == last


@pytest.mark.parametrize("required", [False, True])
async def test_responses_while_the_store_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: bool
) -> None:
    """A stored response is continued, and the tokens of an input are counted."""
    monkeypatch.setattr(database, "_FILE", (*database._FILE, "PRAGMA busy_timeout=50"))
    file = tmp_path / "store.db"
    path, body = "/v1/responses", {"model": "demo", "input": "Hi"}
    async with client(file, required) as http:
        first = (await http.post(path, json=body)).json()
        with locked(file):
            reply = await http.post(path, json=body)
            assert reply.status_code == (503 if required else 200)
            more = {"store": False, "previous_response_id": first["id"]}
            second = await http.post(path, json={**body, **more})
            count = await http.post(f"{path}/input_tokens", json=body)
    assert second.status_code == 200, second.text
    assert second.json()["usage"]["input_tokens"] > first["usage"]["total_tokens"]
    assert count.json()["input_tokens"] == first["usage"]["input_tokens"]
