"""Latimer itself before the judge: every must holds, every should or it is explained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.conformance.check import all_checks
from latimer.conformance.runner import Settings, judge
from support.servers import serving

# What is not as OpenAI does it, and why: docs/conformance/README.md says more.
EXPLAINED = {
    "errors.unknown-field": "unknown fields are ignored and listed, unless the server is strict",
    "completions.suffix": "the demo model has no tokens for filling in the middle",
    "security.control-tokens": "control tokens in messages are parsed, as templates are rendered",
    "streaming.first-chunk": "the demo model answers within a quarter of a second",
}


@pytest.fixture(scope="module", params=["in process", "llama-server"])
def address(request: pytest.FixtureRequest, llama_server_url: str) -> Iterator[str]:
    """Latimer over an engine."""

    def make() -> OpenAIAdapter:
        local = request.param == "in process"
        return OpenAIAdapter(LlamaCpp() if local else LlamaServer(llama_server_url))

    with serving(make) as url:
        yield url


async def test_every_must_holds(address: str) -> None:
    """What is not a pass is known, and no must is broken.

    llama-server gives another greedy answer once in many runs while it is under load, behind its
    own API too: a check that holds when it is tried again is no failure here.
    """
    verdicts = await judge(Settings(f"{address}/v1", hint="demo"), all_checks())
    steady = [verdict for verdict in verdicts if verdict.outcome != "flaky"]
    told = {v.check.id: (v.outcome, v.detail) for v in steady if v.outcome != "pass"}
    assert {name: told[name] for name in told.keys() - EXPLAINED.keys()} == {}
    flaky = [(v.check.id, v.detail) for v in verdicts if v.outcome == "flaky"]
    assert len(flaky) <= 2, flaky
