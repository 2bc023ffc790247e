"""Tests of `/health`: the state of the engine and of the store."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.store.errors import StoreUnavailable
from latimer.backends.base import Model
from latimer.backends.errors import EngineUnavailable
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from support.engines.fleet import Engine, pool_of
from support.servers import free_port
from support.stored import record


async def health(client_of: Any, app: OpenAIAdapter) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of `/health`."""
    async with client_of(app) as client:
        reply = await client.get("/health")
    return reply.status_code, reply.json()


async def test_a_store_that_works_is_ok(make_backend: Any, client_of: Any) -> None:
    """The state of a store is part of the response, unless there is no store."""
    backend = make_backend("llama_server")
    app = OpenAIAdapter(backend)
    assert await health(client_of, app) == (200, {"status": "ok", "store": {"status": "ok"}})
    off = OpenAIAdapter(backend, store="off")
    assert await health(client_of, off) == (200, {"status": "ok"})
    await app.aclose()


@pytest.mark.parametrize("required", [False, True])
async def test_a_database_that_is_gone_is_reported(
    make_backend: Any, client_of: Any, required: bool
) -> None:
    """A database that does not answer is reported without its host; required, it is a 503."""
    app = OpenAIAdapter(
        make_backend("llama_server"),
        store=f"postgresql://me@127.0.0.1:{free_port()}/kept",
        store_required=required,
    )
    store = app._service.store
    assert store is not None
    assert store.keep(record())
    with pytest.raises(StoreUnavailable):
        await store._writer.flush()
    status, body = await health(client_of, app)
    if required:
        assert (status, body["error"]["code"]) == (503, "store_unavailable")
        assert "127.0.0.1" not in str(body)
    else:
        state = {"status": "unavailable", "waiting": 1, "lost": 0}
        assert (status, body) == (200, {"status": "ok", "store": state})
    await app.aclose()


class Hanging(Engine):
    """An engine that does not answer."""

    async def health(self) -> None:
        """Wait for a minute."""
        await asyncio.sleep(60)

    async def model(self) -> Model:
        """Wait for a minute."""
        await asyncio.sleep(60)
        return self.facts


class Failing(Engine):
    """An engine that fails after a pause in seconds."""

    def __init__(self, name: str, pause: float) -> None:
        super().__init__(name)
        self.name, self.pause = name, pause

    async def health(self) -> None:
        """Wait, and fail."""
        await asyncio.sleep(self.pause)
        raise EngineUnavailable(f"{self.name} is down.")

    async def model(self) -> Model:
        """Wait, and fail."""
        await self.health()
        return self.facts


async def test_an_engine_that_hangs_is_soon_a_503(
    client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that hang together delay the response no more than one."""
    monkeypatch.setattr("latimer.adapter.service.HEALTH", 0.2)
    alone = OpenAIAdapter([ModelEntry(Hanging(name), (name,)) for name in "abc"])
    pools = [Pool(name, [Replica(name, Hanging(name))]) for name in "def"]
    fleet = OpenAIAdapter([ModelEntry(pool, (pool.name,)) for pool in pools])
    for app in (alone, fleet):
        begun = time.monotonic()
        status, body = await health(client_of, app)
        assert time.monotonic() - begun < 2
        assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        await app.aclose()


async def test_a_model_that_hangs_hides_no_other(client_of: Any) -> None:
    """A fleet with one model that is ready is healthy at once, also if the others hang."""
    hanging = Pool("a", [Replica("a", Hanging("a"))])
    ready = await pool_of(Engine("b"))
    app = OpenAIAdapter([ModelEntry(hanging, ("a",)), ModelEntry(ready, ("b",))])
    begun = time.monotonic()
    assert (await health(client_of, app))[0] == 200
    assert time.monotonic() - begun < 1
    await app.aclose()


@pytest.mark.parametrize("pooled", [False, True])
async def test_all_models_without_an_engine_are_named(client_of: Any, pooled: bool) -> None:
    """The error has the reason of each model in their order, whichever answers first."""
    entries = []
    for name, pause in (("a", 0.1), ("b", 0.0)):
        backend = Failing(name, pause)
        made = Pool(name, [Replica(name, backend)]) if pooled else backend
        entries.append(ModelEntry(made, (name,)))
    app = OpenAIAdapter(entries)
    status, body = await health(client_of, app)
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    message = body["error"]["message"]
    assert 0 <= message.find("a is down.") < message.find("b is down.")
    await app.aclose()


@pytest.mark.parametrize("pooled", [False, True])
async def test_an_engine_that_hangs_when_the_server_ends(client_of: Any, pooled: bool) -> None:
    """`/health` is a 503 if the app is closed while it waits for a hung engine."""
    backend = Pool("a", [Replica("a", Hanging("a"))]) if pooled else Hanging("a")
    app = OpenAIAdapter([ModelEntry(backend, ("a",))])
    asking = asyncio.create_task(health(client_of, app))
    await asyncio.sleep(0.05)
    await app.aclose()
    status, body = await asking
    assert (status, body["error"]["code"]) == (503, "engine_unavailable")
    assert pooled or body["error"]["message"] == "The server ends."
