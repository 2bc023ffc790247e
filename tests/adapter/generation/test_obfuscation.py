"""Tests of the padding of a stream's chunks."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from latimer.adapter.generation.frames import STEP

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
}


async def events_of(demo: httpx2.AsyncClient, path: str, **options: Any) -> list[bytes]:
    """Return the events of a stream with a usage chunk, without `[DONE]`."""
    body = {"model": "demo", "max_tokens": 8, "stream": True, **PATHS[path]}
    body["stream_options"] = {"include_usage": True, **options}
    content = (await demo.post(path, json=body)).content
    *events, done, end = content.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return events


@pytest.mark.parametrize("path", PATHS)
async def test_chunks_are_padded_if_a_request_asks_for_it(
    demo: httpx2.AsyncClient, path: str
) -> None:
    """Every chunk ends with random text, and the lengths of all events have the same remainder."""
    padded = await events_of(demo, path, include_obfuscation=True)
    assert all(event.rpartition(b',"')[2].startswith(b'obfuscation":"') for event in padded)
    texts = {event.rpartition(b':"')[2].removesuffix(b'"}') for event in padded}
    assert all(1 <= len(text) <= STEP and text.isalnum() for text in texts)
    assert len(texts) > len(padded) // 2
    assert len({len(event) % STEP for event in padded}) == 1


@pytest.mark.parametrize("options", [{}, {"include_obfuscation": False}])
async def test_chunks_are_not_padded_otherwise(
    demo: httpx2.AsyncClient, options: dict[str, Any]
) -> None:
    """Without `include_obfuscation: true` no chunk has the key."""
    for path in PATHS:
        assert not any(b"obfuscation" in event for event in await events_of(demo, path, **options))
