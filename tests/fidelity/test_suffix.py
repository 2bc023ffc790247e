"""Tests that `suffix` gives the same completion on both engines that support it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gguf
import httpx2
import pytest
from conftest import MODELS
from latimer.adapter import OpenAIAdapter
from support import gguf_files
from support.reference import engines
from support.replies import chunks_in

NAMES = {
    "<think>": "<|fim_prefix|>",
    "</think>": "<|fim_suffix|>",
    "<|im_start|>": "<|fim_middle|>",
}


@pytest.fixture(scope="module")
def filling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose vocabulary has fill-in-the-middle tokens."""
    source = MODELS / "bpe.gguf"
    tokens = gguf.GGUFReader(source).fields["tokenizer.ggml.tokens"].contents()
    changes = {"tokenizer.ggml.tokens": [NAMES.get(token, token) for token in tokens]}
    target = tmp_path_factory.mktemp("models") / "filling.gguf"
    return gguf_files.copy(source, target, changes=changes)


@pytest.fixture(scope="module")
async def clients(filling_model: Path, client_of: Any) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """Return clients of the model in process and in a llama-server."""
    async with engines(filling_model) as backends:
        one, other = (OpenAIAdapter(backend, any_model=True) for backend in backends.values())
        async with client_of(one) as local, client_of(other) as remote:
            yield [local, remote]


async def fill(client: httpx2.AsyncClient, **body: Any) -> Any:
    """Send a greedy completion, usually with a suffix."""
    greedy = {"model": "m", "temperature": 0, "max_tokens": 8, "logit_bias": {}, **body}
    reply = await client.post("/v1/completions", json=greedy)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def test_both_engines_fill_alike(clients: list[httpx2.AsyncClient]) -> None:
    """Both engines build the same prompt from prefix and suffix and count all its tokens."""
    for prompt, suffix in (("Hello the cat", " of"), ("", "the of"), ("was <|fim_suffix|>", "é")):
        replies = [await fill(client, prompt=prompt, suffix=suffix) for client in clients]
        texts = [reply["choices"][0]["text"] for reply in replies]
        assert texts[0] == texts[1]
        assert replies[0]["usage"] == replies[1]["usage"]


async def test_a_suffix_changes_the_answer(clients: list[httpx2.AsyncClient]) -> None:
    """A suffix changes the completion, and an empty suffix does not."""
    for client in clients:
        filled = await fill(client, prompt="Hello the", suffix=" of and")
        plain = await fill(client, prompt="Hello the")
        empty = await fill(client, prompt="Hello the", suffix="")
        assert filled["choices"][0]["text"] != plain["choices"][0]["text"]
        assert empty["choices"] == plain["choices"]
        # Prefix, suffix, and the three fill-in-the-middle tokens; a BOS is not counted.
        assert filled["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 3


async def test_echo_shows_the_prompt_only(clients: list[httpx2.AsyncClient]) -> None:
    """With a suffix, `echo` returns only the prompt before the text, and offsets begin after it."""
    for client in clients:
        body = {"prompt": "Hello the", "suffix": " of"}
        text = (await fill(client, **body))["choices"][0]["text"]
        assert (await fill(client, echo=True, **body))["choices"][0]["text"] == "Hello the" + text
        arrays = (await fill(client, logprobs=1, **body))["choices"][0]["logprobs"]
        assert arrays["text_offset"][0] == len("Hello the")
        reply = await client.post(
            "/v1/completions",
            json={"model": "m", "stream": True, "temperature": 0, "max_tokens": 8, **body},
        )
        assert "".join(c["choices"][0]["text"] for c in chunks_in(reply)) == text


async def test_a_spelled_bos_counts(clients: list[httpx2.AsyncClient]) -> None:
    """A BOS that the prompt spells is not added again, but it is echoed and counted."""
    bos = "<|begin_of_text|>"
    for client in clients:
        body = {"suffix": " of", "echo": True}
        plain = await fill(client, prompt="Hello the", **body)
        own = await fill(client, prompt=f"{bos}Hello the", **body)
        assert own["choices"][0]["text"] == bos + plain["choices"][0]["text"]
        assert own["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"] + 1


async def test_a_model_that_cannot_fill_is_refused(
    demo: httpx2.AsyncClient, client: httpx2.AsyncClient
) -> None:
    """A suffix for a model without fill-in-the-middle tokens is a 400."""
    body = {"model": "m", "prompt": "a", "suffix": "b", "max_tokens": 1}
    for one in (demo, client):
        reply = await one.post("/v1/completions", json=body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
