"""Tests that each API key has its own prompt cache, unless configured otherwise."""

from __future__ import annotations

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import client_of

KEYS = ("sk-one", "sk-other")
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
