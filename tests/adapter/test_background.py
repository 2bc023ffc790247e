"""Tests of responses in the background over a backend without a model."""

from __future__ import annotations

import asyncio
import gc
import json
import sqlite3
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.responses import background
from latimer.backends.base import Batch, Generation
from support.clients import adapting, client_of
from support.engines.echo import Echo
from support.stored import error_of

R = "/v1/responses"
LONG = {"input": "Count to 12.", "temperature": 0, "background": True}
# Without an end of its own.
ENDLESS = {**LONG, "ignore_eos": True, "max_output_tokens": 1500}


def engine() -> Echo:
    """Return a backend that counts to 12, slowly enough to be cancelled."""
    return Echo(", ".join(map(str, range(1, 13))), context=2048, pause=0.001)


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an adapter with two API keys and a store in memory."""
    async with adapting(engine(), api_keys=["one", "two"]) as made:
        made.headers["authorization"] = "Bearer one"
        yield made


async def begun(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Create a response in the background, and return the object that the client gets."""
    reply = await client.post(R, json={"model": "demo", **LONG, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


async def ended(client: httpx2.AsyncClient, name: str) -> Any:
    """Retrieve a response until it has ended."""
    async with asyncio.timeout(30):
        while True:
            found = (await client.get(f"{R}/{name}")).json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


def events_of(text: str) -> list[Any]:
    """Return the data of the events of a stream."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_response_in_the_background_is_retrieved_when_it_has_ended(
    client: httpx2.AsyncClient,
) -> None:
    """The client gets a queued response at once, and later the one of a request that waits."""
    plain = (
        await client.post(R, json={"model": "demo", **LONG, "background": False, "store": False})
    ).json()
    made = await begun(client)
    assert (made["status"], made["background"], made["output"]) == ("queued", True, [])
    found = await ended(client, made["id"])
    assert found["status"] == "completed"
    assert found["usage"] == plain["usage"] | {
        "input_tokens_details": found["usage"]["input_tokens_details"]
    }
    assert found["output"][0]["content"] == plain["output"][0]["content"]
    assert found["id"] == made["id"]
    (item,) = (await client.get(f"{R}/{made['id']}/input_items")).json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "Count to 12."}]
    again = await client.post(f"{R}/{made['id']}/cancel")
    assert again.json() == found
    body = {"model": "demo", "input": "Go on.", "previous_response_id": made["id"]}
    assert (await client.post(R, json={**body, "max_output_tokens": 16})).status_code == 200


async def test_a_stream_is_followed_from_any_event(client: httpx2.AsyncClient) -> None:
    """A stream that is followed again has the events after a number, with the same bytes."""
    body = {"model": "demo", **LONG, "stream": True}
    whole = (await client.post(R, json=body)).text
    events = events_of(whole)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["response"]["status"] for event in events[:3]] == [
        "queued", "queued", "in_progress",
    ]  # fmt: skip
    name = events[0]["response"]["id"]
    assert events[-1]["response"] == (await client.get(f"{R}/{name}")).json()
    for after in (0, 1, 2, 7, len(events) - 2, len(events) - 1):
        rest = await client.get(f"{R}/{name}?stream=true&starting_after={after}")
        assert events_of(rest.text) == events[after + 1 :]
    beyond = await client.get(f"{R}/{name}?stream=true&starting_after={len(events)}")
    status, message, *names = error_of(beyond)
    assert (status, names) == (400, ["starting_after", "invalid_value"])
    assert message.endswith(f"after {len(events)}. Send at most {len(events) - 1}, or omit it.")
    assert (await client.get(f"{R}/{name}?stream=true")).text == whole


async def test_a_running_response_is_followed_to_its_end(client: httpx2.AsyncClient) -> None:
    """A reader that comes while the response runs gets the events before it and those after it."""
    made = await begun(client, stop=["7"])
    both = await asyncio.gather(
        client.get(f"{R}/{made['id']}?stream=true"),
        client.get(f"{R}/{made['id']}?stream=true&starting_after=2"),
    )
    first, second = (events_of(reply.text) for reply in both)
    assert first[3:] == second
    assert first[-1]["response"]["status"] == "completed"


async def test_a_running_response_is_cancelled(client: httpx2.AsyncClient) -> None:
    """A cancelled response ends; it can be retrieved and cancelled again, but not continued."""
    made = await begun(client, **ENDLESS)
    body = {"model": "demo", "input": "x", "previous_response_id": made["id"]}
    status, message, *rest = error_of(await client.post(R, json=body))
    assert (status, rest) == (400, ["previous_response_id", "invalid_value"])
    assert "cannot be continued" in message
    reading = asyncio.create_task(client.get(f"{R}/{made['id']}?stream=true"))
    while (await client.get(f"{R}/{made['id']}")).json()["status"] == "queued":
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    found = (await client.post(f"{R}/{made['id']}/cancel")).json()
    assert (found["status"], found["usage"]) == ("cancelled", None)
    (item,) = found["output"]
    assert item["status"] == "incomplete"
    assert item["content"][0]["text"]
    events = events_of((await asyncio.wait_for(reading, 5)).text)
    assert events[-1]["type"] != "response.completed"
    assert (await client.get(f"{R}/{made['id']}")).json() == found
    assert (await client.post(f"{R}/{made['id']}/cancel")).json() == found
    status, message, *_ = error_of(await client.post(R, json=body))
    assert (status, "its status is 'cancelled'" in message) == (400, True)


async def test_a_running_response_is_deleted(client: httpx2.AsyncClient) -> None:
    """A response that is deleted while it runs ends, and is not stored."""
    made = await begun(client, **ENDLESS)
    assert (await client.delete(f"{R}/{made['id']}")).json()["deleted"] is True
    assert (await client.get(f"{R}/{made['id']}")).status_code == 404
    assert (await client.delete(f"{R}/{made['id']}")).status_code == 404


async def test_a_response_belongs_to_its_key(client: httpx2.AsyncClient) -> None:
    """Another key can neither retrieve, follow, cancel nor delete a running response."""
    made = await begun(client, **ENDLESS)
    other = {"authorization": "Bearer two"}
    for method, path in (
        ("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", ""),
        ("GET", "/input_items"),
    ):  # fmt: skip
        reply = await client.request(method, f"{R}/{made['id']}{path}", headers=other)
        assert reply.status_code == 404, (method, path)
    assert (await client.get(f"{R}/{made['id']}")).json()["status"] in ("queued", "in_progress")


async def test_an_error_fails_the_response(client: httpx2.AsyncClient) -> None:
    """An input that the engine refuses is a failed response, which has the reason."""
    made = await begun(client, input="word " * 5_000)
    found = await ended(client, made["id"])
    assert (found["status"], found["error"]["code"]) == ("failed", "invalid_prompt")
    assert "exceeds the context window" in found["error"]["message"]


async def test_without_the_store_it_stays_for_a_while(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response with `store: false` can be retrieved for some minutes after its end."""
    monkeypatch.setattr(background, "KEPT", 0.2)
    made = await begun(client, store=False)
    assert made["store"] is False
    assert (await ended(client, made["id"]))["status"] == "completed"
    await asyncio.sleep(0.3)
    assert (await client.get(f"{R}/{made['id']}")).status_code == 404


async def test_a_stored_response_outlives_its_stream(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stored response can be retrieved and continued later, but its stream is gone."""
    monkeypatch.setattr(background, "KEPT", 0.0)
    made = await begun(client)
    found = await ended(client, made["id"])
    await asyncio.sleep(0.05)
    assert (await client.get(f"{R}/{made['id']}")).json() == found
    status, message, param, _ = error_of(await client.get(f"{R}/{made['id']}?stream=true"))
    assert (status, param) == (400, "stream")
    assert "can no longer be streamed" in message
    body = {"model": "demo", "input": "x", "previous_response_id": made["id"], "store": False}
    assert (await client.post(R, json={**body, "max_output_tokens": 16})).status_code == 200


async def test_ended_responses_are_forgotten_beyond_a_size(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of ended responses take a bounded memory; the newest response stays."""
    monkeypatch.setattr(background, "MOST", 1)
    first, second = await begun(client, store=False), await begun(client, store=False)
    await ended(client, second["id"])
    assert (await client.get(f"{R}/{second['id']}?stream=true")).status_code == 200
    assert (await client.get(f"{R}/{first['id']}")).status_code == 404


async def test_a_reader_learns_that_the_server_ends() -> None:
    """A stream that the shutdown ends has the two events of a failed response, and no other."""
    app = OpenAIAdapter(engine(), any_model=True)
    async with client_of(app) as client:
        made = await begun(client, **ENDLESS)
        reading = [
            asyncio.create_task(client.get(f"{R}/{made['id']}?stream=true&starting_after={after}"))
            for after in (0, 4)
        ]
        await asyncio.sleep(0.1)
        app.end()
        for task in reading:
            task.cancel()
        first, second = [events_of((await task).text) for task in reading]
        await app.aclose()
    numbers = [event["sequence_number"] for event in first]
    assert numbers == [*range(1, len(first) + 1)]
    assert first[4:] == second
    assert [event["type"] for event in first[-2:]] == ["error", "response.failed"]


async def test_large_requests_are_forgotten_too(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests of ended responses count, so that they cannot fill the memory."""
    monkeypatch.setattr(background, "MOST", 100_000)
    item = {"type": "web_search_call", "id": "ws", "action": {"query": "x" * 60_000}}
    given = [{"role": "user", "content": "Hi"}, item]
    first = await begun(client, store=False, input=given)
    await ended(client, first["id"])
    second = await begun(client, store=False, input=given)
    await ended(client, second["id"])
    assert (await client.get(f"{R}/{first['id']}")).status_code == 404


async def test_an_ended_response_lets_go_of_its_request() -> None:
    """A response that has ended keeps its events, and not the request and what generated it."""
    responses, found = background.Background(), ContextVar[Any]("found")

    async def begin() -> weakref.ref[Any]:
        made = engine()
        found.set(made)
        job = background.Job("", "req", {"id": "resp", "status": "queued"}, {}, 2, 0)
        # Only a method of an object keeps it.
        job.fault = made.__ne__  # type: ignore[assignment]
        responses.start(job, asyncio.sleep(0))
        return weakref.ref(made)

    gone = await asyncio.create_task(begin())
    await responses.wait(5)
    await asyncio.sleep(0)
    gc.collect()
    assert responses.find("", "resp") is not None
    assert gone() is None
    await responses.aclose()


async def test_the_end_of_the_server_fails_what_runs() -> None:
    """A response that runs when the server ends is stored as failed, and its stream says why."""
    app = OpenAIAdapter(engine(), any_model=True)
    async with client_of(app) as client:
        made = await begun(client, **ENDLESS)
        reading = asyncio.create_task(client.get(f"{R}/{made['id']}?stream=true"))
        await asyncio.sleep(0.05)
        await app.aclose()
        events = events_of((await asyncio.wait_for(reading, 5)).text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "shutting down" in events[-1]["response"]["error"]["message"]


async def test_a_store_that_cannot_be_opened_is_not_needed(tmp_path: Path) -> None:
    """A response begins, and other processes do not find it, if its store is of another program."""
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE other (name TEXT)")
    async with adapting(engine(), store=str(file)) as client:
        made = await begun(client)
        found = await ended(client, made["id"])
    assert (found["status"], found["store"]) == ("completed", False)


class Lingering(Echo):
    """An engine that has not released a job when the job's last event has come."""

    @asynccontextmanager
    async def open(self, job: Generation) -> AsyncIterator[AsyncIterator[Batch]]:
        """Run a job."""
        async with super().open(job) as batches:
            yield batches
            self.left.set()
            await asyncio.sleep(60)


async def test_a_response_is_cancelled_after_its_last_token() -> None:
    """It has the items of its answer, and no other."""
    backend = Lingering("Paris.", context=512)
    async with adapting(backend) as client:
        made = await begun(client)
        await asyncio.wait_for(backend.left.wait(), 10)
        found = (await client.post(f"{R}/{made['id']}/cancel")).json()
    assert found["status"] == "cancelled"
    assert [item["content"][0]["text"] for item in found["output"]] == ["Paris."]


async def test_a_retrieved_stream_is_padded_if_a_request_asks_for_it(
    client: httpx2.AsyncClient,
) -> None:
    """Events in the background and those of a stored response get random text once each."""
    ask = {"model": "demo", "input": "Count to 12.", "stream": True}
    padding = {"stream_options": {"include_obfuscation": True}}
    for more in ({}, {"background": True}, {"background": True, **padding}):
        events = events_of((await client.post(R, json={**ask, **more})).text)
        path = f"{R}/{events[0]['response']['id']}?stream=true"
        bare = (await client.get(path)).text
        text = (await client.get(f"{path}&include_obfuscation=true")).text
        found = events_of(text)
        assert [event["type"] for event in found] == [event["type"] for event in events_of(bare)]
        padded = [event for event in found if event.pop("obfuscation", "")]
        assert padded == [event for event in found if event["type"].endswith(".delta")]
        assert len(padded) == text.count('"obfuscation"')
