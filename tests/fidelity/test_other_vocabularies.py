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


# Where an answer is cut does not depend on its prompt: two give different answers.
@pytest.mark.parametrize("prompt", PROMPTS[::5])
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


async def test_a_bos_is_added_once_and_counted_if_it_is_the_clients(
    engines: tuple[Backend, Backend],
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    """No BOS is added to a prompt that spells one, and only a spelled BOS is counted."""
    model = await engines[0].model()
    for client in clients:
        plain = await complete(client, prompt="Hello", max_tokens=8)
        ids = await engines[0].tokenize("Hello", add_special=False, parse_special=True)
        assert plain[1]["prompt_tokens"] == len(ids)
        if model.adds_bos:
            spelled = model.bos_token + "Hello"
            choices, usage = await complete(client, prompt=spelled, max_tokens=8)
            assert choices == plain[0]
            assert usage["prompt_tokens"] == len(ids) + 1


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("text", PROMPTS)
async def test_a_spelled_bos_is_echoed(
    engines: tuple[Backend, Backend],
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
    ban: dict[str, int],
    text: str,
    limit: int,
) -> None:
    """A prompt that spells the BOS has the entries, offsets and usage of the same token ids."""
    model = await engines[0].model()
    bos = model.bos_token if model.adds_bos else ""
    ids = list(await engines[0].tokenize(text, add_special=True, parse_special=True))
    body = {"max_tokens": limit, "logit_bias": ban}
    for client in clients:
        (found,), usage = await complete(client, prompt=bos + text, echo=True, logprobs=1, **body)
        (exact,), exact_usage = await complete(client, prompt=ids, echo=True, logprobs=1, **body)
        assert usage == exact_usage
        assert usage["prompt_tokens"] == len(ids)
        assert found["text"].startswith(bos + text)
        arrays, others = found["logprobs"], exact["logprobs"]
        assert len(arrays["tokens"]) == len(ids) + limit
        if bos:
            assert arrays["tokens"][0] == bos
            assert arrays["text_offset"][1] == len(bos)
        assert arrays["token_logprobs"][0] is None
        assert arrays["token_logprobs"][1:] == pytest.approx(others["token_logprobs"][1:], abs=1e-3)
        (plain,), _ = await complete(client, prompt=bos + text, echo=True, **body)
        assert plain["text"] == found["text"]
        (after,), _ = await complete(client, prompt=bos + text, logprobs=0, **body)
        assert after["logprobs"]["text_offset"] == [len(bos + text)] * limit


async def test_an_empty_prompt_starts_from_the_bos(
    engines: tuple[Backend, Backend],
    clients: tuple[httpx2.AsyncClient, httpx2.AsyncClient],
) -> None:
    """An empty prompt starts from the BOS, has no tokens, and is a 400 for a model without one."""
    adds_bos = (await engines[0].model()).adds_bos
    for client in clients:
        reply = await client.post("/v1/completions", json={"model": "m", "max_tokens": 2})
        assert reply.status_code == (200 if adds_bos else 400)
        if adds_bos:
            assert reply.json()["usage"]["prompt_tokens"] == 0
            choices, usage = await complete(client, max_tokens=0, echo=True, logprobs=1)
            assert choices[0]["text"] == ""
            assert choices[0]["finish_reason"] == "length"
            assert set(map(len, choices[0]["logprobs"].values())) == {0}
            assert usage["completion_tokens"] == 0
            bos = (await engines[0].model()).bos_token
            choices, usage = await complete(client, prompt=bos, max_tokens=0, echo=True, logprobs=0)
            assert choices[0]["logprobs"]["tokens"] == [bos]
            assert usage["prompt_tokens"] == 1
        else:
            assert reply.json()["error"]["param"] == "prompt"
