"""Tests that requests which arrive together do each part of their work right after one another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from latimer.adapter.chat.prepare import prepare_plain
from latimer.adapter.endpoints import chat
from latimer.adapter.request import Exchange
from latimer.backends import offload
from latimer.backends.llama_server import call
from latimer.backends.llama_server.translate import encoded
from support.clients import adapting
from support.engines.recorded import RecordedServer
from support.recordings import body

BODY = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts of requests in the order in which they begin: wait, render, encode and reply."""
    found: list[str] = []

    def noted(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any, **more: Any) -> Any:
            found.append(part)
            return function(*arguments, **more)

        return note

    monkeypatch.setattr(offload, "wait_for_others", noted("wait", offload.wait_for_others))
    monkeypatch.setattr(chat, "prepare_plain", noted("render", prepare_plain))
    monkeypatch.setattr(call, "encoded", noted("encode", encoded))
    monkeypatch.setattr(Exchange, "reply", noted("reply", Exchange.reply))
    return found


async def test_requests_give_way_to_each_other(parts: list[str]) -> None:
    """Requests that find others wait for them, and begin each part when all have come to it; one
    that is alone does not wait."""
    asked = 0
    together = asyncio.Event()

    async def answer() -> AsyncIterator[bytes]:
        await together.wait()
        yield body("llama_server", "limit-stream")

    def respond(_request: httpx2.Request) -> httpx2.Response:
        nonlocal asked
        asked += 1
        if asked in (1, 5):
            together.set()
        return httpx2.Response(200, content=answer())

    async with adapting(RecordedServer({"/completion": respond}).backend) as client:
        replies = [await client.post("/v1/chat/completions", json=BODY)]
        assert parts == ["render", "encode", "reply"]
        together.clear()
        parts.clear()
        replies += await asyncio.gather(
            *[client.post("/v1/chat/completions", json=BODY) for _ in range(4)]
        )
    # The first one is alone until it waits for the engine.
    first, others = ["render", "encode"], [*["wait"] * 3, *["render"] * 3, *["encode"] * 3]
    assert parts == [*first, *others, *["reply"] * 4]
    assert {reply.status_code for reply in replies} == {200}
