"""Tests of `sampler_priority`: the default orders of the programs that send it are accepted."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from support.clients import adapting
from support.engines.echo import Echo

# As SillyTavern sends it.
NEWEST = [
    "repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "temperature",
    "dynamic_temperature", "quadratic_sampling", "top_n_sigma", "top_k", "top_p", "typical_p",
    "epsilon_cutoff", "eta_cutoff", "tfs", "top_a", "min_p", "adaptive_p", "mirostat", "xtc",
    "encoder_repetition_penalty", "no_repeat_ngram",
]  # fmt: skip
# As text-generation-webui itself has it, and SillyTavern of 2024.
OWN = [*NEWEST[:4], "top_n_sigma", *NEWEST[4:7], *NEWEST[8:]]
OLD = [name for name in NEWEST[4:-2] if name not in ("top_n_sigma", "adaptive_p", "xtc")]


async def asked(value: Any) -> httpx2.Response:
    """Return the reply to a completion with an order of samplers."""
    async with adapting(Echo(context=256)) as client:
        body = {"model": "m", "prompt": "a", "max_tokens": 4, "sampler_priority": value}
        return await client.post("/v1/completions", json=body)


@pytest.mark.parametrize(
    "value",
    [NEWEST, OWN, OLD, [name for name in NEWEST if name != "adaptive_p"], "\n".join(NEWEST),
     [*NEWEST[16:17], *NEWEST[:16], *NEWEST[17:]], [], None],
)  # fmt: skip
async def test_a_default_order_is_accepted(value: Any) -> None:
    """Samplers that a request cannot use may be at any place, and names may be lines of a text."""
    reply = await asked(value)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "value",
    [["temperature"], NEWEST[::-1], [*NEWEST, "new_sampler"], [*NEWEST[1:], NEWEST[0]],
     [name for name in NEWEST if name != "top_k"], [*OLD, "top_n_sigma"], "top_k", 5, [5]],
)  # fmt: skip
async def test_another_order_is_refused(value: Any) -> None:
    """An order that would change the answer is a 400 that names the field."""
    reply = await asked(value)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "sampler_priority"
