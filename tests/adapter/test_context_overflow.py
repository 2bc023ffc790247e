"""Tests that agents recognise a prompt that is too long, and shorten their conversation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.clients import adapting
from support.servers import llama_server
from support.wrong_requests import C, H, body_of

# A model that adds a BOS.
SPM = Path(__file__).parent.parent / "models" / "spm.gguf"

# Patterns that programs search the error's message for; one of each group must match.
PATTERNS: dict[str, tuple[str, ...]] = {
    "opencode, pi and openclaw": (r"maximum context length is \d+ tokens",),
    "Cline and its forks": (r"\bcontext\s*(?:length|window)\b", r"\bmaximum\s*context\b"),
    "Cline, for OpenAI's servers": (r"token", r"context length"),
    "litellm": (r"this model's maximum context length is",),
}
# Patterns by which opencode, pi and openclaw recognise other errors.
OTHERS = (r"rate limit", r"too many requests", r"^(?:Throttling error|Service unavailable):")
# Longer than a context of the longest tokens, so no engine is asked to count them.
LONG = "word " * 450_000
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (H, {"messages": [{"role": "user", "content": LONG}]}),
    "chat, too many tokens": (H, {"messages": FRANCE, "max_tokens": 5_000}),
    "completions": (C, {"prompt": LONG}),
    "completions, too many tokens": (C, {"prompt": "a", "max_tokens": 5_000}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("name", CASES)
async def test_agents_recognise_the_error(
    client: httpx2.AsyncClient, name: str, stream: bool
) -> None:
    """A prompt that is too long is a 400 in the words that agents search for, streamed or not."""
    path, changes = CASES[name]
    reply = await client.post(path, json=body_of(path, {**changes, "stream": stream}))
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    for program, patterns in PATTERNS.items():
        found = [re.search(one, error["message"], re.IGNORECASE) for one in patterns]
        assert any(found), program
    assert not [one for one in OTHERS if re.search(one, error["message"], re.IGNORECASE)]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("most", [None, 100])
async def test_langchain_recognises_the_error(
    client: httpx2.AsyncClient, most: int | None, stream: bool
) -> None:
    """A prompt that is too long has OpenAI's newer words, by which LangChain compacts."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
    ]
    for path, body in asked:
        limit = {"max_output_tokens" if "input" in body else "max_tokens": most}
        sent = {"model": "m", "stream": stream, **body, **limit}
        message = (await client.post(path, json=sent)).json()["error"]["message"]
        assert re.search(r"Input tokens exceed the configured limit of \d+ tokens", message)


@pytest.mark.parametrize("words", [3_000, 60_000])
async def test_agents_read_by_how_much_a_prompt_is_too_long(
    client: httpx2.AsyncClient, words: int
) -> None:
    """The error has the number of tokens, which agents search for and compact by."""
    text = "word " * words
    reply = await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    count = reply.json()["count"]
    asked: list[tuple[str, dict[str, Any], int | None]] = [
        ("/v1/completions", {"prompt": text, "max_tokens": 7}, count + 7),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, None),
        ("/v1/responses", {"input": text}, None),
    ]
    for path, body, expected in asked:
        error = (await client.post(path, json={"model": "m", **body})).json()["error"]
        [found] = re.findall(r"(?:requested|resulted in) (\d+) tokens", error["message"])
        if expected is None:
            assert count < int(found) < count + 100, error
        else:
            assert int(found) == expected, error


async def _check_numbers(backend: Backend) -> None:
    """Check that each error for text of up to the context's length has more tokens than that."""
    context, refused = (await backend.model()).context, 0
    async with adapting(backend) as client:
        for count in range(context - 3, context + 1):
            for most in (0, 1, -1):
                body = {"model": "m", "prompt": "\x01" * count, "max_tokens": most}
                error = (await client.post("/v1/completions", json=body)).json().get("error")
                if error is not None:
                    [longest, found] = re.findall(r"(\d+) tokens", error["message"])
                    assert int(found) > int(longest) == context, error
                    refused += 1
    assert refused > 4


async def test_a_prompt_that_fills_the_context_is_counted_with_its_bos() -> None:
    """The tokens that the error names exceed the context, also if only a BOS is too much."""
    await _check_numbers(LlamaCpp(SPM, context=64, parallel=1, gpu_layers=0))
    with llama_server(SPM, slots=1, context=256) as url:
        await _check_numbers(LlamaServer(url))
