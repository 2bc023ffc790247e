"""Tests that the same request gives the same bytes on every engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from support.recordings import prompts
from support.replies import chunks_in

PROMPTS = prompts()

# The variants complete the text, cut it by limits, and cut it by stop sequences: inside tokens,
# across tokens, almost matching, and in characters of several bytes. In all twenty prompts, the two
# most likely tokens are more than 0.5 apart.
VARIANTS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 64},
    {"max_tokens": 4},
    {"max_tokens": 64, "stop": "of"},
    {"max_tokens": 64, "stop": ["5, 6", "pit", "r m"]},
    {"max_tokens": 6, "stop": ["3, 4, 5", "2, 4"]},
    {"max_tokens": 64, "stop": ["é", "🐱", "🔥"]},
    {"max_tokens": 64, "stop": ["\n", "nothing like it"], "echo": True},
)
CASES = [
    (prompt, variant, stream)
    for number, prompt in enumerate(PROMPTS[:20])
    for variant in (VARIANTS[number % len(VARIANTS)],)
    for stream in (False, True)
]


def expected(prompt: dict[str, Any], variant: dict[str, Any]) -> str | None:
    """Return the recorded greedy text of a request, or None if a token limit cuts it."""
    text: str = prompt["greedy"]
    if variant["max_tokens"] < 64:
        return None
    stops = variant.get("stop", [])
    ends = [text.find(s) for s in ([stops] if isinstance(stops, str) else stops) if s in text]
    cut = text[: min(ends)] if ends else text
    return prompt["prompt"] + cut if variant.get("echo") else cut


async def ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> tuple[str, str, str]:
    """Return text, finish reason and usage (as JSON) of a completion, streamed or not."""
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    if not body["stream"]:
        value = reply.json()
        choice = value["choices"][0]
        return choice["text"], choice["finish_reason"], json.dumps(value["usage"])
    chunks = chunks_in(reply)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
    assert len(reasons) == 1
    assert choices[-1]["finish_reason"] == reasons[0]
    return "".join(c["text"] for c in choices), reasons[0], json.dumps(chunks[-1]["usage"])


@pytest.fixture(scope="session")
async def reference(
    apps: Callable[[str], Any], client_of: Any
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the engine that the others are compared with."""
    async with client_of(apps("llama_cpp")) as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "variant", "stream"),
    CASES,
    ids=[f"{number}-{'stream' if case[2] else 'plain'}" for number, case in enumerate(CASES)],
)
async def test_text_finish_reason_and_usage_are_the_same(
    client: httpx2.AsyncClient,
    reference: httpx2.AsyncClient,
    prompt: dict[str, Any],
    variant: dict[str, Any],
    stream: bool,
) -> None:
    """Each engine gives the same text, finish reason and usage, byte for byte."""
    body = {
        "model": "demo",
        "prompt": prompt["prompt"],
        "temperature": 0,
        "stream": stream,
        **variant,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await ask(client, body)
    assert answer == await ask(reference, body)
    text = expected(prompt, variant)
    assert text is None or answer[0] == text


def test_the_forty_requests_are_forty() -> None:
    """There are forty requests, and all their prompts have a clear greedy answer."""
    assert len(CASES) == 40
    assert min(prompt["margin"] for prompt in PROMPTS[:20]) > 0.5
