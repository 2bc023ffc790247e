"""Tests of `/health`: the state of the engine and of the store."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.store.errors import StoreUnavailable
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
