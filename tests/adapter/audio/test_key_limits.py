"""Tests of the limits of keys on speech, spoken answers and transcriptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import KeyConfig, digest_of
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.listener import Listener
from support.engines.paced_speaker import PacedSpeaker
from support.sounds import HELLO
from support.spoken import PATH, SPOKEN, asked

SPEECH, T = "/v1/audio/speech", "/v1/audio/transcriptions"
KINDS = ("speech", "spoken chat", "transcription")


@asynccontextmanager
async def limited(pause: float = 0.0, **limits: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve a key with limits, and yield a client that has it."""
    app = OpenAIAdapter(
        Echo(), any_model=True, keys={"team": KeyConfig(digest=digest_of("sk-team"), **limits)},
        speaker=PacedSpeaker(pause=pause), transcriber=Listener(pause=pause),
    )  # fmt: skip
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer sk-team"
        yield client
    await app.aclose()


async def send(client: httpx2.AsyncClient, kind: str, text: str = "Hello.") -> httpx2.Response:
    """Send a request of a kind."""
    if kind == "transcription":
        form = {"model": "whisper-1", "prompt": text}
        return await client.post(T, data=form, files={"file": HELLO})
    body: dict[str, Any] = asked(**SPOKEN)
    if kind == "speech":
        body = {"model": "m", "voice": "alloy", "input": text, "response_format": "wav"}
    return await client.post(PATH if kind == "spoken chat" else SPEECH, json=body)


@pytest.mark.parametrize("kind", KINDS)
async def test_concurrent_requests(kind: str) -> None:
    """A second request at the same time is a 429, and the next one after it is served."""
    async with limited(pause=0.1, concurrent=1) as client:
        replies = await asyncio.gather(send(client, kind), send(client, kind))
        assert sorted(one.status_code for one in replies) == [200, 429]
        assert (await send(client, kind)).status_code == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_requests(kind: str) -> None:
    """Each request counts; also one that is refused after its admission."""
    async with limited(requests_per_minute=2) as client:
        assert [(await send(client, kind)).status_code for _ in range(3)] == [200, 200, 429]


async def test_tokens_of_speech() -> None:
    """Four characters of a text count as a token."""
    async with limited(tokens_per_minute=100) as client:
        for left in (74, 48, 22):
            reply = await send(client, "speech", "a" * 100)
            assert reply.status_code == 200
            used = await send(client, "transcription", "")
            assert abs(int(used.headers["x-ratelimit-remaining-tokens"]) - left) <= 4
        reply = await send(client, "speech", "a" * 100)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_tokens_of_a_transcription() -> None:
    """The tokens of a library are not counted, so a long prompt may be sent again."""
    async with limited(tokens_per_minute=100) as client:
        for _ in range(5):
            assert (await send(client, "transcription", "a" * 200)).status_code == 200
