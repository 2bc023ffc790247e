"""Tests of the number of Python calls that keys and limits in memory cost a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from benchmarks import calls
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import digest_of
from latimer.backends.llama_server import LlamaServer

# The key that the requests of the benchmark send.
LIMITED = {
    "digest": digest_of("unused"), "models": ["m*"], "weight": 2, "requests_per_minute": 10**6,
    "tokens_per_minute": 10**9, "concurrent": 100,
}  # fmt: skip
# A request with limits has at most as many calls as one without, times this.
MOST = 1.1


def counted(path: str, **options: Any) -> int:
    """Return the calls of a plain request over a llama-server in memory."""

    async def run() -> int:
        app = OpenAIAdapter(
            LlamaServer("http://127.0.0.1:9"), model_names=["m"], store="off", **options
        )
        found = await calls.fewest(app, path, calls.body_of(path, calls.TOKENS, False))
        await app.aclose()
        return found.total()

    return calls.run(asyncio.SelectorEventLoop, True, run())


@pytest.mark.parametrize("path", calls.PATHS.values(), ids=calls.PATHS)
def test_limits_cost_few_calls(path: str) -> None:
    """A key with all limits costs at most 10 % of the calls of a request without a key."""
    without, limited = counted(path), counted(path, keys={"team": LIMITED})
    assert without < limited <= MOST * without
