"""Tests with the requests of HELM's client for completions, and its reading of the replies."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest
from support.recordings import DEMO_CHATML
from support.texts import STRANGE


def raw_request(prompt: str, **changes: Any) -> dict[str, Any]:
    """Return a request as `OpenAIClientUtils` builds it: every field, nulls included."""
    return {
        "model": "demo",
        "prompt": prompt,
        "temperature": 1e-7,
        "n": 1,
        "max_tokens": 100,
        "best_of": 1,
        "logprobs": 1,
        "stop": None,
        "top_p": 1,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "echo": False,
        **changes,
    }


def text_of(tokens: list[str]) -> str:
    """Join tokens as `convert_tokens_to_text` does: a run of `bytes:` tokens is UTF-8 text."""
    data = b""
    for token in tokens:
        if token.startswith("bytes:"):
            data += bytes(int(x, 16) for x in re.findall(r"\\x([0-9a-f]{2})", token))
        else:
            data += token.encode()
    return data.decode()


async def ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> Any:
    """Return the reply to a request."""
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("text", STRANGE)
async def test_a_language_model_score(scorer: httpx2.AsyncClient, text: str) -> None:
    """`echo` with no new tokens returns the prompt's tokens with one logprob for each."""
    prompt = f"Say: {text} and more."
    reply = await ask(scorer, raw_request(prompt, echo=True, max_tokens=0))
    choice = reply["choices"][0]
    assert choice["text"] == prompt
    assert text_of(choice["logprobs"]["tokens"]) == prompt
    logprobs = [value or 0 for value in choice["logprobs"]["token_logprobs"]]
    assert len(logprobs) == len(choice["logprobs"]["tokens"]) == reply["usage"]["prompt_tokens"]
    assert all(value <= 0 for value in logprobs)
    assert choice["finish_reason"] == "length"


async def test_several_completions(scorer: httpx2.AsyncClient) -> None:
    """With `best_of` and `logprobs`, each choice's tokens join to its text."""
    prompt = DEMO_CHATML.format("What is the capital of France?")
    body = raw_request(prompt, n=2, best_of=5, logprobs=5, temperature=0.7, stop=["\n"])
    reply = await ask(scorer, body)
    assert len(reply["choices"]) == 2
    for choice in reply["choices"]:
        logprobs = choice["logprobs"]
        assert text_of(logprobs["tokens"]).startswith(choice["text"])
        assert choice["finish_reason"] in ("stop", "length")
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert token in top


async def test_a_multiple_choice_request(scorer: httpx2.AsyncClient) -> None:
    """A multiple choice request returns one token with its logprobs."""
    body = raw_request("Q: What is 5 plus 3?\nA:", max_tokens=1, logprobs=5, best_of=5)
    reply = await ask(scorer, body)
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 1
