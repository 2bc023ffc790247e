"""Tests with vocabularies unlike the demo model's.

They have a BOS, a space prefix, byte fallback, user-defined tokens, or a recurrent state. Models
with random weights often generate broken UTF-8, which llama-server's stream omits. The tests
therefore ban the tokens that are not whole characters.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from conftest import MODELS
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.servers import llama_server

NAMES = ("spm", "bpe", "recurrent")
VOCABULARY = 600
PROMPTS = (
    "Hello the cat",
    "é über 12",
    " two  spaces",
    "the of",
    "tostra mira",
    "😀 no such piece",
)


@pytest.fixture(scope="session", params=NAMES)
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Backend, Backend]]:
    """Return the same model in process and in a real llama-server."""
    path = MODELS / f"{request.param}.gguf"
    with llama_server(path, slots=1, context=512) as address:
        local, remote = LlamaCpp(path), LlamaServer(address)
        yield local, remote
        await local.aclose()
        await remote.aclose()


@pytest.fixture(scope="session")
async def clients(
    engines: tuple[Backend, Backend], client_of: Any
) -> AsyncIterator[tuple[httpx2.AsyncClient, httpx2.AsyncClient]]:
    """Return a client of each engine."""
    one, other = (OpenAIAdapter(engine, any_model=True) for engine in engines)
    async with client_of(one) as local, client_of(other) as remote:
        yield local, remote


@pytest.fixture(scope="session")
async def ban(engines: tuple[Backend, Backend]) -> dict[str, int]:
    """Return a logit bias against tokens that are not whole characters."""
    biases = {}
    for token in range(VOCABULARY):
        try:
            (await engines[0].detokenize((token,))).decode()
        except UnicodeDecodeError:
            biases[str(token)] = -100
    return biases


async def complete(client: httpx2.AsyncClient, **body: Any) -> tuple[Any, Any]:
    """Return the choices and usage of a greedy completion.

    The seed keeps llama-server from reusing its prompt cache, which it does incorrectly for
    recurrent models. With `top_k: 1` the completion is greedy all the same.
    """
    greedy = {"model": "m", "top_k": 1, "seed": 1}
    reply = await client.post("/v1/completions", json={**greedy, **body})
    value = reply.json()
    assert reply.status_code == 200, value
    return value["choices"], value["usage"]


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_both_engines_write_the_same(
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient], ban: dict[str, int], prompt: str
) -> None:
    """Text, finish reason and usage agree between the in-process engine and llama-server."""
    local, remote = clients
    for limit in (1, 2, 7, 30):
        body = {"prompt": prompt, "max_tokens": limit, "logit_bias": ban}
        assert await complete(local, **body) == await complete(remote, **body), limit


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_both_engines_cut_at_the_same_place(
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient], ban: dict[str, int], prompt: str
) -> None:
    """A stop sequence from inside the answer gives the same text and usage on both engines."""
    local, remote = clients
    bias = {"logit_bias": ban}
    text = (await complete(local, prompt=prompt, max_tokens=30, **bias))[0][0]["text"]
    for start in range(0, len(text) - 3, 4):
        stop = text[start : start + 3]
        stops = [stop, stop[1:] + "nowhere"]
        body = {"prompt": prompt, "max_tokens": 30, "stop": stops, **bias}
        ours = await complete(local, **body)
        assert ours == await complete(remote, **body), stop
        assert ours[0][0]["finish_reason"] == "stop"
        assert ours[0][0]["text"] == text[: text.index(stop)]


async def test_tokens_are_the_same(engines: tuple[Backend, Backend]) -> None:
    """Both engines tokenize text to the same ids and detokenize these to the same bytes."""
    local, remote = engines
    for text in PROMPTS:
        for add_special in (True, False):
            ids = await local.tokenize(text, add_special=add_special, parse_special=True)
            assert ids == await remote.tokenize(text, add_special=add_special, parse_special=True)
            assert await local.detokenize(ids) == await remote.detokenize(ids)


async def test_a_bos_is_added_once_and_never_counted(
    engines: tuple[Backend, Backend],
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    """A BOS spelled in the prompt is not added twice, and no BOS is counted."""
    model = await engines[0].model()
    for client in clients:
        plain = await complete(client, prompt="Hello", max_tokens=8)
        if model.adds_bos:
            assert await complete(client, prompt=model.bos_token + "Hello", max_tokens=8) == plain
        ids = await engines[0].tokenize("Hello", add_special=False, parse_special=True)
        assert plain[1]["prompt_tokens"] == len(ids)


async def test_an_empty_prompt_starts_from_the_bos(
    engines: tuple[Backend, Backend],
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    """An empty prompt starts from the BOS, and is a 400 for a model without one."""
    adds_bos = (await engines[0].model()).adds_bos
    for client in clients:
        reply = await client.post("/v1/completions", json={"model": "m", "max_tokens": 2})
        assert reply.status_code == (200 if adds_bos else 400)
        if adds_bos:
            assert reply.json()["usage"]["prompt_tokens"] == 0
        else:
            assert reply.json()["error"]["param"] == "prompt"
