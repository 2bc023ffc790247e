"""Tests of responses in the background over replicas: two adapters that share a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.responses import replicas
from latimer.adapter.responses.items import item_id, mark_of, new_response_id, place_of
from latimer.adapter.responses.replicas import Replicas
from latimer.adapter.store.records import time_of
from support.clients import client_of
from support.engines.echo import Echo
from support.stored import error_of

R = "/v1/responses"
MARKS = ("aaaaaaaa", "bbbbbbbb")
# It runs until it is cancelled.
ENDLESS: dict[str, Any] = {
    "model": "demo",
    "input": "Count to 12.",
    "background": True,
    "ignore_eos": True,
    "max_output_tokens": 1500,
}


class Actors:
    """The members of a deployment as one replica sees them; `running` has the marks of all."""

    def __init__(self, mark: str, running: set[str]) -> None:
        self.mark = mark
        self._running = running

    async def join(self) -> None:
        """Ray knows its replicas."""

    async def running(self) -> set[str]:
        """Return the marks of the replicas that run."""
        return self._running

    async def leave(self) -> None:
        """Ray knows its replicas."""


class Deployment:
    """Two replicas, and what Ray would say about their processes.

    Args:
        store: the setting `store` of both.
    """

    def __init__(self, store: str) -> None:
        self.running = {*MARKS}
        self.apps = [self._replica(mark, store) for mark in MARKS]

    def _replica(self, mark: str, store: str) -> OpenAIAdapter:
        engine = Echo(", ".join(map(str, range(1, 13))), context=2048, pause=0.001)
        keys = ["one", "two"]
        app = OpenAIAdapter(engine, any_model=True, store=store, api_keys=keys)
        shared = None if store == "memory" else app.service.store
        app.service.background.elsewhere = Replicas(Actors(mark, self.running), shared)
        return app


Pair = tuple[Deployment, httpx2.AsyncClient, httpx2.AsyncClient]


@asynccontextmanager
async def deployed(store: str) -> AsyncIterator[Pair]:
    """Yield a deployment, and a client of each of its replicas with the same key."""
    made = Deployment(store)
    for app in made.apps:
        await app.open_store()
    async with client_of(made.apps[0]) as first, client_of(made.apps[1]) as second:
        for client in (first, second):
            client.headers["authorization"] = "Bearer one"
        yield made, first, second
    for app in made.apps:
        await app.aclose()


@pytest.fixture(params=["sqlite", "postgresql"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Yield two replicas over each kind of store that several processes can share."""
    sqlite = request.param == "sqlite"
    store = str(tmp_path / "store.db") if sqlite else request.getfixturevalue("postgresql_url")
    async with deployed(store) as made:
        yield made


async def begun(client: httpx2.AsyncClient, **body: Any) -> str:
    """Create a response in the background, and return its path."""
    reply = await client.post(R, json={**ENDLESS, **body})
    assert reply.status_code == 200, reply.text
    return f"{R}/{reply.json()['id']}"


async def ended(client: httpx2.AsyncClient, path: str) -> Any:
    """Retrieve a response until it has ended."""
    async with asyncio.timeout(30):
        while True:
            found = (await client.get(path)).json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


def test_an_id_has_the_mark_of_its_replica() -> None:
    """The mark is in the id of a response, and the ids of its items are as without it."""
    response, created_at = new_response_id(MARKS[0])
    assert len(response) == len("resp_") + 48
    assert mark_of(response) == MARKS[0]
    assert time_of(response) == created_at
    place = place_of(item_id("msg_", response, 3))
    assert place is not None
    assert place.response == response
    assert mark_of("resp_1") == mark_of("msg_" + "0" * 48) == ""


async def test_another_replica_sees_that_a_response_runs(pair: Pair) -> None:
    """It is `in_progress` there, and can be neither continued nor streamed."""
    _, first, second = pair
    path = await begun(first)
    found = await second.get(path)
    assert (found.status_code, found.json()["status"]) == (200, "in_progress")
    body = {"model": "demo", "input": "x", "previous_response_id": path.rpartition("/")[2]}
    status, message, *_ = error_of(await second.post(R, json=body))
    assert (status, "its status is 'in_progress'" in message) == (400, True)
    reply = await second.get(path, params={"stream": "true"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "replica_unavailable")
    assert reply.headers["retry-after"] == "1"
    assert (await first.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert (await ended(second, path))["status"] == "cancelled"


async def test_another_replica_ends_a_response(pair: Pair) -> None:
    """It is cancelled or deleted where it runs, and both replicas then say so."""
    made, first, second = pair
    path, other = await begun(first), await begun(first)
    assert (await second.post(f"{path}/cancel")).json()["status"] == "cancelled"
    assert (await second.delete(other)).json()["deleted"] is True
    for client in (first, second):
        assert (await client.get(path)).json()["status"] == "cancelled"
        assert (await client.get(other)).status_code == 404
    await made.apps[0].service.background.aclose()
    database = await made.apps[0].service.store.open()  # type: ignore[union-attr]
    kinds = "SELECT kind FROM latimer_objects"
    found = await database.read(lambda one: one.exec_driver_sql(kinds).scalars().all())
    assert found == ["response"]


async def test_a_replica_that_does_not_answer_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that its replica does not end is a 503 after some time, and still runs."""
    _, first, second = pair
    path = await begun(first)
    monkeypatch.setattr(replicas, "PATIENCE", 0.05)
    reply = await second.post(f"{path}/cancel")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "replica_unavailable")
    assert (await second.get(path)).json()["status"] == "in_progress"
    assert (await first.post(f"{path}/cancel")).json()["status"] == "cancelled"


async def test_another_replica_has_what_has_ended(pair: Pair) -> None:
    """A response that ended is retrieved, continued and deleted through the other replica."""
    _, first, second = pair
    path = await begun(first, ignore_eos=False, max_output_tokens=64)
    found = await ended(second, path)
    assert found["status"] == "completed"
    reply = await second.get(f"{path}?stream=true")
    assert reply.status_code == 400
    assert "another server made it" in reply.json()["error"]["message"]
    body = {"model": "demo", "input": "x", "previous_response_id": found["id"], "stream": False}
    assert (await second.post(R, json=body)).status_code == 200
    assert (await second.delete(path)).json()["deleted"] is True
    for client in (first, second):
        assert (await client.get(path)).status_code == 404


async def test_a_response_fails_with_its_replica(pair: Pair) -> None:
    """When the process has ended, the next request gets `failed` with the reason, for good."""
    made, first, second = pair
    path = await begun(first)
    made.running.discard(MARKS[0])
    found = (await second.get(path)).json()
    assert found["status"] == "failed"
    assert found["error"]["code"] == "server_error"
    assert "was killed" in found["error"]["message"]
    assert (await second.post(f"{path}/cancel")).json() == found
    body = {"model": "demo", "input": "x", "previous_response_id": found["id"]}
    assert (await second.post(R, json=body)).status_code == 400
    (item,) = (await second.get(f"{path}/input_items")).json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "Count to 12."}]
    assert (await second.delete(path)).status_code == 200
    assert (await second.get(path)).status_code == 404


async def test_a_response_of_another_key_is_not_found(pair: Pair) -> None:
    """Another key finds a response neither while it runs nor after its replica has ended."""
    made, first, second = pair
    path = await begun(first)
    second.headers["authorization"] = "Bearer two"
    for mark in MARKS:
        assert (await second.get(path)).status_code in (404, 503)
        made.running.discard(mark)
    assert (await second.get(path)).status_code == 404


async def test_a_response_that_ends_leaves_no_row(pair: Pair) -> None:
    """A response that is cancelled or deleted is not `in_progress` for other replicas."""
    made, first, second = pair
    paths = [await begun(first) for _ in range(2)]
    await first.post(f"{paths[0]}/cancel")
    await first.delete(paths[1])
    await made.apps[0].service.background.aclose()
    made.running.discard(MARKS[0])
    assert (await second.get(paths[0])).json()["status"] == "cancelled"
    assert (await second.get(paths[1])).status_code == 404


async def test_without_a_shared_store_a_response_is_lost_with_its_replica() -> None:
    """Until then, another replica asks to repeat the request; afterwards the 404 has the reason."""
    async with deployed("memory") as (made, first, second):
        path = await begun(first)
        assert (await first.get(path)).status_code == 200
        assert (await second.get(path)).status_code == 503
        made.running.discard(MARKS[0])
        status, message, *_ = error_of(await second.get(path))
        assert (status, "lost with the replica" in message) == (404, True)


async def test_a_response_that_is_not_to_be_stored_is_not_written(pair: Pair) -> None:
    """With `store: false`, only its id is in the store, and another replica asks to repeat."""
    made, first, second = pair
    path = await begun(first, store=False, input="Count the secrets.")
    store = made.apps[0].service.store
    assert store is not None
    database = await store.open()
    query = "SELECT id, request, input, reply FROM latimer_objects"
    rows = await database.read(lambda connection: connection.exec_driver_sql(query).all())
    name = path.replace(f"{R}/resp_", "run_")
    assert [tuple(row) for row in rows] == [(name, "{}", "{}", '{"store":false}')]
    assert (await first.get(path)).json()["status"] in ("queued", "in_progress")
    assert (await second.get(path)).status_code == 503
    made.running.discard(MARKS[0])
    assert (await second.get(path)).status_code == 404


async def test_a_replica_that_leaves_waits_for_responses(pair: Pair) -> None:
    """It waits until they have ended, but no longer than it is given."""
    made, first, _ = pair
    background = made.apps[0].service.background
    path = await begun(first, ignore_eos=False, max_output_tokens=64)
    await background.wait(30)
    assert (await first.get(path)).json()["status"] == "completed"
    path = await begun(first)
    await asyncio.wait_for(background.wait(0.05), 5)
    assert (await first.get(path)).json()["status"] == "in_progress"
