"""The requests of HELM's client for legacy completions, and what it reads of the replies."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from support.recordings import DEMO_CHATML
from support.texts import STRANGE


@pytest.fixture(params=["llama_cpp", "llama_server"])
async def scorer(request: pytest.FixtureRequest, apps: Callable[[str], Any], client_of: Any) -> Any:
    """A client of each engine that scores prompts."""
    async with client_of(apps(request.param)) as client:
        yield client


def raw_request(prompt: str, **changes: Any) -> dict[str, Any]:
    """A request as `OpenAIClientUtils` builds it: every field, nulls included."""
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
    """`convert_tokens_to_text`: runs of `bytes:` tokens are one character or more."""
    data = b""
    for token in tokens:
        if token.startswith("bytes:"):
            data += bytes(int(x, 16) for x in re.findall(r"\\x([0-9a-f]{2})", token))
        else:
            data += token.encode()
    return data.decode()


async def ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> Any:
    """The reply to a request."""
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("text", STRANGE)
async def test_a_language_model_score(scorer: httpx2.AsyncClient, text: str) -> None:
    """`echo` with no tokens: tokens that join to the prompt, one number for each but the first."""
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
    """`best_of` and `logprobs` of `top_k_per_token`: the tokens join to the text."""
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
    """One token of an answer, with the five most likely."""
    body = raw_request("Q: What is 5 plus 3?\nA:", max_tokens=1, logprobs=5, best_of=5)
    reply = await ask(scorer, body)
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 1
