"""Tests of one adapter in several event loops: one after the other, and at the same time."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.observers import Observer, Observers
from latimer.adapter.record import Record
from latimer.adapter.request import Exchange
from latimer.backends.base import Backend
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_server import LlamaServer
from starlette.testclient import TestClient
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.wire import running

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
PATHS = ("/health", "/ready", "/metrics", "/v1/models")


@pytest.fixture(params=["llama_server", "koboldcpp"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A backend over another process or thread, which the test closes."""
    if request.param == "llama_server":
        yield LlamaServer(request.getfixturevalue("llama_server_url"))
        return
    with running(FakeKoboldcpp(script="Hi")) as fake:
        yield KoboldCpp(fake.url)


async def statuses(app: OpenAIAdapter, chats: int = 1) -> Counter[int]:
    """Return the statuses of requests to all paths, in the running event loop."""
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        found = [(await client.get(path)).status_code for path in PATHS]
        for _ in range(chats):
            for stream in (False, True):
                reply = await client.post(CHAT, json={**HI, "stream": stream})
                found.append(reply.status_code)
        asked = [client.post(CHAT, json=HI) for _ in range(8)]
        found += [one.status_code for one in await asyncio.gather(*asked)]
    return Counter(found)


def test_a_client_without_a_context_gets_all_answers(backend: Backend) -> None:
    """Each request of Starlette's client outside of `with` has an event loop of its own."""
    app = OpenAIAdapter(backend)
    client = TestClient(app)
    for _ in range(4):
        assert {client.get(path).status_code for path in PATHS} == {200}
        assert client.post(CHAT, json=HI).status_code == 200
        text = client.post(CHAT, json={**HI, "stream": True}).text
        assert text.endswith("data: [DONE]\n\n")
    asyncio.run(app.aclose())


def test_event_loops_follow_each_other(backend: Backend) -> None:
    """An adapter answers in each event loop, and closes in another one without a warning."""
    app = OpenAIAdapter(backend)
    for _ in range(3):
        assert asyncio.run(statuses(app)) == {200: len(PATHS) + 10}
    asyncio.run(app.aclose())
    del app
    gc.collect()


def test_an_adapter_that_is_not_closed_leaves_no_warning(backend: Backend) -> None:
    """The connections of an event loop are closed at its end, also if nobody closes the adapter."""
    app = OpenAIAdapter(backend)
    assert set(asyncio.run(statuses(app))) == {200}
    del app
    gc.collect()


def test_a_loop_that_was_closed_at_once_is_forgotten(llama_server_url: str) -> None:
    """The connections of an event loop that has not ended its generators are dropped silently."""
    app = OpenAIAdapter(LlamaServer(llama_server_url))
    for uses_again in (True, False):
        loop = asyncio.new_event_loop()
        assert set(loop.run_until_complete(statuses(app))) == {200}
        # Lets connections that the app has closed finish.
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        if uses_again:
            assert set(asyncio.run(statuses(app))) == {200}
        asyncio.run(app.aclose())
    del app, loop
    gc.collect()


def test_a_loop_that_pauses_keeps_its_connections(llama_server_url: str) -> None:
    """Event loops that take turns each have their own connections."""
    app = OpenAIAdapter(LlamaServer(llama_server_url))
    loops = [asyncio.new_event_loop() for _ in range(2)]
    for _ in range(2):
        for loop in loops:
            assert set(loop.run_until_complete(statuses(app))) == {200}
    for loop in loops:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
    asyncio.run(app.aclose())


@pytest.mark.parametrize("debug", [False, True])
def test_threads_with_event_loops_share_an_adapter(backend: Backend, debug: bool) -> None:
    """Several threads, each with a running event loop, get all answers of one adapter."""
    app = OpenAIAdapter(backend)
    found: list[Counter[int]] = []

    def run() -> None:
        # Debugging shows calls of another thread's event loop that are not safe.
        found.append(asyncio.run(statuses(app, 5), debug=debug))

    threads = [threading.Thread(target=run, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [{200: len(PATHS) + 18}] * len(threads)
    asyncio.run(app.aclose())


@pytest.mark.parametrize("most", [4, 1_000], ids=["full", "not full"])
def test_requests_of_a_closed_loop_leave_their_places(llama_server_url: str, most: int) -> None:
    """An event loop that is closed while its requests run keeps no places at the engine.

    The queue for places may be full.
    """
    backend = LlamaServer(llama_server_url, max_waiting=most)
    app = OpenAIAdapter(backend)
    long = {"prompt": "Hello", "max_tokens": 2_000, "ignore_eos": True, "stream": True}
    loop = asyncio.new_event_loop()

    async def ask(body: dict[str, Any]) -> int:
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.post("/v1/completions", json=body)).status_code

    def streams() -> int:
        records = [one.record for one in app.service.observers.running]
        return sum(bool(one is not None and one.arrivals) for one in records)

    async def begin() -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(ask(long)) for _ in range(8)]
        async with asyncio.timeout(20):
            # Until every place has a stream with tokens.
            while not backend.load().waiting or streams() < backend.load().running:
                await asyncio.sleep(0.01)
        return tasks

    assert len(loop.run_until_complete(begin())) == 8
    loop.run_until_complete(loop.shutdown_asyncgens())
    for task in asyncio.all_tasks(loop):
        # Its end as garbage is not what is tested.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    short = {"prompt": "Hello", "max_tokens": 1}
    assert asyncio.run(asyncio.wait_for(ask(short), 5)) == 200
    assert (backend.load().running, backend.load().waiting) == (0, 0)
    asyncio.run(app.aclose())


async def test_metrics_are_read_while_other_threads_begin_requests() -> None:
    """The metrics are complete if another thread's request begins while they are collected."""
    app = OpenAIAdapter(Echo())
    running: set[Any] = app.service.observers.running

    def begin() -> None:
        running.add(Exchange({"type": "http", "headers": []}, None, None))  # type: ignore[arg-type]

    class Beginning:
        """A request during whose look another one begins."""

        @property
        def model(self) -> str:
            begin()
            return "echo"

        @property
        def record(self) -> None:
            begin()

    running.update(Beginning() for _ in range(3))
    async with client_of(app) as client:
        reply = await client.get("/metrics")
    assert reply.status_code == 200


async def test_a_flush_of_another_thread_loses_no_request() -> None:
    """A request that ends while another thread passes requests on is passed on with the next."""
    ended: list[Record] = []

    class Noted(Observer):
        def take(self, records: Sequence[Record]) -> None:
            ended.extend(records)

    class Scope(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            observers.flush()
            return super().get(name, default)

    observers = Observers([Noted()], lambda exchange: "")
    scope = Scope(type="http", method="GET", path="/v1/models", headers=[])
    exchange = Exchange(scope, None, None)  # type: ignore[arg-type]
    exchange.status = 200
    observers.ended(exchange, Record())
    observers.flush()
    assert [one.path for one in ended] == ["/v1/models"]
