"""Tests that generated logprobs are the same streamed, plain, and scored again as a prompt."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from support.reference import engines
from support.replies import chunks_in
from support.samples import sample
from support.texts import STRANGE, WORDS, chat, demo_texts

pytestmark = pytest.mark.slow

REQUESTS = sample(100, 300)
STOPS = (" ", "e", ", ", "\n", "é", "漢", "stone", "ver m", "r s", "😀", "ë 漢", "<|im_end|>", "1")
ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Engine(NamedTuple):
    """An engine with its adapter's client, and the ids of its tokens by their text in arrays."""

    backend: Backend
    client: httpx2.AsyncClient
    ids: Mapping[str, int]


@pytest.fixture(scope="module", params=["in process", "llama-server"])
async def engine(
    request: pytest.FixtureRequest, demo_f32: Path, client_of: Any
) -> AsyncIterator[Engine]:
    """Return each engine that scores prompts, with exact arithmetic."""
    async with engines(demo_f32, context=2048) as backends:
        backend = backends[request.param]
        async with client_of(OpenAIAdapter(backend, any_model=True)) as client:
            yield Engine(backend, client, await spellings(backend))


async def spellings(backend: Backend) -> Mapping[str, int]:
    """Return ids by text; in the demo model's vocabulary no two tokens have the same text."""
    found = {}
    for token in range(len(await backend.token_bytes() or ())):
        data = await backend.detokenize((token,))
        try:
            found[data.decode()] = token
        except UnicodeDecodeError:
            found["bytes:" + "".join(f"\\x{byte:02x}" for byte in data)] = token
    return found


def a_request(rng: random.Random, engine: Engine) -> dict[str, Any]:
    """Return a request with any of the fields that shape the arrays.

    The demo model rarely generates characters of several tokens, so half of the requests force
    them. In process a bias forces them, broken ones too. On llama-server a grammar does, since its
    stream omits broken characters.
    """
    more: dict[str, Any] = {}
    if rng.random() < 0.5:
        fragments = [token for text, token in engine.ids.items() if text.startswith("bytes:")]
        if "grammar" in engine.backend.capabilities.extras:
            pieces = "".join(rng.choices(["漢", "Zoë", "😀", " ë 漢", "é1"], k=6))
            more["grammar"] = f'root ::= ("{pieces}" | "{pieces[::-1]}" | "😀"+)'
        else:
            more["logit_bias"] = {str(token): 11 for token in rng.sample(fragments, 60)}
    strange = " ".join(rng.choices(STRANGE, k=2))
    words = " ".join(rng.choices(WORDS, k=3))
    prompt = rng.choice(
        [chat(f"Say: {strange}"), chat(f"Say: {words}"), demo_texts(1, rng.randrange(99))[0]]
    )
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": rng.randint(1, 16),
        "temperature": rng.choice([0, 0.7, 1]),
        "n": rng.choice([1, 1, 2, 3]),
        "seed": rng.randrange(2**31),
        "logprobs": rng.randint(1, 5),
        "stop": rng.choice([None, *[rng.sample(STOPS, k) for k in (1, 1, 2, 3)]]),
        **more,
    }


async def plain(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[Any]:
    """Return the choices of the plain response."""
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, (body, reply.text)
    choices: list[Any] = reply.json()["choices"]
    return choices


async def streamed(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[Any]:
    """Return the assembled choices of the streamed response."""
    reply = await client.post("/v1/completions", json={**body, "stream": True})
    made: dict[int, Any] = defaultdict(
        lambda: {"text": "", "logprobs": {name: [] for name in ARRAYS}}
    )
    for chunk in chunks_in(reply):
        for part in chunk["choices"]:
            choice = made[part["index"]]
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            for name in ARRAYS:
                choice["logprobs"][name] += part["logprobs"][name]
    return [{**made[index], "index": index} for index in sorted(made)]


def close(ours: list[float], others: list[float]) -> bool:
    """Return True if the numbers agree within the promised tolerance."""
    return all(abs(a - b) < 1e-4 for a, b in zip(ours, others, strict=True))


async def test_three_ways_to_the_same_arrays(engine: Engine) -> None:
    """Streamed, plain and scored log-probabilities of random requests agree."""
    rng = random.Random(5)
    fragments = cut = 0
    for _ in range(REQUESTS):
        body = a_request(rng, engine)
        choices = await plain(engine.client, body)
        others = await streamed(engine.client, body)
        prompt = await engine.backend.tokenize(
            body["prompt"], add_special=False, parse_special=True
        )
        for choice, other in zip(choices, others, strict=True):
            arrays = choice["logprobs"]
            assert choice["text"] == other["text"], body
            assert choice["finish_reason"] == other["finish_reason"], body
            for name in ("tokens", "text_offset"):
                assert arrays[name] == other["logprobs"][name], body
            assert close(arrays["token_logprobs"], other["logprobs"]["token_logprobs"]), body
            fragments += sum(token.startswith("bytes:") for token in arrays["tokens"])
            cut += choice["finish_reason"] == "stop"
            if not arrays["tokens"]:
                continue
            ids = [*prompt, *(engine.ids[token] for token in arrays["tokens"])]
            again = {"model": "m", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
            scored = (await plain(engine.client, again))[0]["logprobs"]
            assert scored["tokens"][len(prompt) :] == arrays["tokens"], body
            assert close(scored["token_logprobs"][len(prompt) :], arrays["token_logprobs"]), body
    assert fragments > REQUESTS // 3
    assert cut > REQUESTS // 3
