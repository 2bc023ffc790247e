"""Tests that each API key has its own prompt cache, unless configured otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.observers import Observer
from latimer.adapter.record import Record
from latimer.backends.base import Finish, Generation, NativeReply, Piece
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import client_of
from support.engines.echo import CAPABILITIES, Echo

KEYS = ("sk-one", "sk-other")
USED = Finish(0, "end", None, 9, 1, cached_tokens=5)
LONG = [{"role": "user", "content": "one day, the cat and the dog " * 20}]


async def cached(client: httpx2.AsyncClient, key: str) -> int:
    """Send a long prompt and return the number of cached tokens."""
    body = {"model": "demo", "messages": LONG, "max_tokens": 1}
    headers = {"authorization": f"Bearer {key}"}
    reply = await client.post("/v1/chat/completions", json=body, headers=headers)
    return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("shared", [False, True])
async def test_what_a_key_has_evaluated_is_its_own(shared: bool) -> None:
    """A key's prompt is reused for the same key, and for other keys only with `share_prefixes`."""
    app = OpenAIAdapter(LlamaCpp(context=2048), api_keys=KEYS, share_prefixes=shared)
    async with client_of(app) as client:
        counts = [await cached(client, key) for key in (KEYS[0], KEYS[0], KEYS[1], KEYS[1])]
    await app.aclose()
    assert counts[0] == 0
    assert counts[1] == counts[3] > 100
    assert counts[2] == (counts[1] if shared else 0)


class Sharing(Echo):
    """An engine whose prompt cache has the prompts of all keys."""

    def __init__(self) -> None:
        super().__init__([[Piece(0, b"Hi"), USED]])
        self.natives: list[Generation] = []

    @asynccontextmanager
    async def native(self, job: Generation, stream: bool) -> AsyncIterator[NativeReply]:
        """Note the job."""
        self.natives.append(job)

        async def body() -> AsyncIterator[bytes]:
            yield b"{}"

        yield NativeReply(200, "application/json", body())


@pytest.mark.parametrize(
    ("keys", "shared", "own", "told"),
    [
        ((), False, False, 5),
        (KEYS[:1], False, False, 5),
        (KEYS, False, False, 0),
        (KEYS, True, False, 5),
        (KEYS, False, True, 5),
    ],
    ids=["no key", "one key", "keys", "share_prefixes", "own caches"],
)
async def test_a_key_learns_nothing_of_the_prompts_in_a_shared_cache(
    keys: Sequence[str], shared: bool, own: bool, told: int
) -> None:
    """No reply counts the tokens of a cache that has prompts of other keys; the log does."""
    counts: list[int | None] = []

    class Log(Observer):
        keeps = False

        def take(self, ended: Sequence[Record]) -> None:
            counts.extend(record.cached_tokens for record in ended)

    engine = Sharing()
    engine.capabilities = replace(CAPABILITIES, own_caches=own, native=True)
    app = OpenAIAdapter(engine, api_keys=keys or None, share_prefixes=shared, observers=[Log()])
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer sk-one"
        usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == told
        assert usage["prompt_tokens"] == 9
        reply = await client.post("/v1/responses", json={"model": "demo", "input": "Hi"})
        assert reply.json()["usage"]["input_tokens_details"]["cached_tokens"] == told
        reply = await client.post("/v1/messages", json={**body, "max_tokens": 9})
        assert reply.json()["usage"]["cache_read_input_tokens"] == told
        asked = {"model": "demo", "prompt": "Hi", "oai_compat": False}
        assert (await client.post("/v1/completions", json=asked)).status_code == 200
    await app.aclose()
    assert counts[:3] == [5, 5, 5]
    assert [job.reuses for job in engine.natives] == [told == 5 and not own]
