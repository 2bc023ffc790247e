"""Tests of requests that wait until their model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry, Policy
from latimer.backends.fleet.machine import Machine, Member
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from support.clients import client_of
from support.loaders import SlowLoader

MESSAGES = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def unloaded(**options: Any) -> AsyncIterator[tuple[httpx2.AsyncClient, SlowLoader]]:
    """Yield a client of a model that is not loaded, and its loader."""
    machine, loader = Machine("here"), SlowLoader("demo", 0.1)
    member = Member(machine, loader)
    pool = Pool("demo", [Replica("demo", member.backend, loader=member)])
    app = OpenAIAdapter([ModelEntry(pool, ("demo",), policy=Policy(keepalive=0.02))], **options)
    try:
        async with client_of(app) as client:
            yield client, loader
    finally:
        await app.aclose()
        await machine.aclose()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("embeddings", {"input": "Hi"}),
        ("rerank", {"query": "Hi", "documents": ["a"]}),
        ("responses/input_tokens", {"input": "Hi"}),
        ("chat/completions", {"messages": MESSAGES, "oai_compat": False}),
    ],
)
async def test_only_streams_get_comments(path: str, fields: dict[str, Any]) -> None:
    """A request that has no stream gets no comment while its model loads, even with `stream`."""
    async with unloaded() as (client, loader):
        body = {"model": "demo", "stream": True, **fields}
        reply = await client.post(f"/v1/{path}", json=body)
        assert loader.starts == 1
        assert not reply.text.startswith(":")


async def test_a_stream_gets_comments() -> None:
    """A stream has comments while its model loads."""
    async with unloaded() as (client, _):
        body = {"model": "demo", "stream": True, "messages": MESSAGES}
        reply = await client.post("/v1/chat/completions", json=body)
        assert reply.text.startswith(": ")


async def test_comments_are_those_of_the_settings_now() -> None:
    """Comments begin and end with settings that are read again, for the next request."""
    machine, loader = Machine("here"), SlowLoader("demo", 0.1)
    member = Member(machine, loader)
    pool = Pool("demo", [Replica("demo", member.backend, loader=member)])
    quiet, talks = (ModelEntry(pool, ("demo",), policy=Policy(keepalive=one)) for one in (0, 0.02))
    app = OpenAIAdapter([quiet])
    body = {"model": "demo", "stream": True, "messages": MESSAGES}
    try:
        async with client_of(app) as client:
            for entry in (talks, quiet):
                app.replace([entry])
                reply = await client.post("/v1/chat/completions", json=body)
                assert reply.text.startswith(": ") is (entry is talks)
                await member.unload()
    finally:
        await app.aclose()
        await machine.aclose()


async def test_comments_are_those_of_the_model() -> None:
    """A model without comments has none while it loads, although another model has them."""
    machine = Machine("here")
    entries, members = [], []
    for name, seconds in (("quiet", 0), ("talks", 0.02)):
        member = Member(machine, SlowLoader(name, 0.1))
        pool = Pool(name, [Replica(name, member.backend, loader=member)])
        entries.append(ModelEntry(pool, (name,), policy=Policy(keepalive=seconds)))
        members.append(member)
    app = OpenAIAdapter(entries)
    body = {"stream": True, "messages": MESSAGES}
    try:
        async with client_of(app) as client:
            for _ in range(2):
                # The second load is that of a model that is known.
                for name in ("quiet", "talks"):
                    reply = await client.post("/v1/chat/completions", json={**body, "model": name})
                    assert reply.status_code == 200
                    assert reply.text.startswith(": ") is (name == "talks")
                for member in members:
                    await member.unload()
    finally:
        await app.aclose()
        await machine.aclose()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": MESSAGES}),
        ("completions", {"prompt": "Hi"}),
        ("responses", {"input": "Hi"}),
        ("embeddings", {"input": "Hi"}),
        ("rerank", {"query": "Hi", "documents": ["a"]}),
    ],
)
async def test_limits_hold_while_a_model_loads(path: str, fields: dict[str, Any]) -> None:
    """A request beyond a limit of its key is refused at once, before its model is loaded."""
    keys = {"team": {"digest": digest_of("sk-team"), "concurrent": 1, "tokens_per_minute": 5_000}}
    async with unloaded(keys=keys) as (client, loader):
        client.headers["authorization"] = "Bearer sk-team"
        body = {"model": "demo", **fields}
        first = asyncio.create_task(client.post(f"/v1/{path}", json=body))
        while not loader.starts:
            await asyncio.sleep(0.001)
        refused = await client.post(f"/v1/{path}", json={**body, "stream": True})
        assert refused.status_code == 429
        assert "demo in key team on concurrent requests" in refused.text
        assert not first.done()
        reply = await first
        assert reply.headers["x-ratelimit-limit-tokens"] == "5000"
        assert (await client.post(f"/v1/{path}", json=body)).status_code != 429
