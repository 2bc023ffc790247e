"""Tests of vLLM's names of metrics: what its published boards and Kubernetes ask for has data."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.metric_rows import ROWS
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.vllm_metrics import COUNTED, DERIVED
from support.clients import client_of
from support.engines.fleet import Engine, pool_of
from support.prometheus import Scrape, promtool, scrape

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 16,
}
_PHASES = ("queue", "prefill", "decode", "inference")
_HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens",
    "request_prefill_kv_computed_tokens", *(f"request_{one}_time_seconds" for one in _PHASES),
)  # fmt: skip
# What the expressions of vLLM's boards select by, besides labels that Prometheus adds: all of them
# with an engine, except those of HTTP and of the process.
BOARDS: tuple[tuple[str, dict[str, str]], ...] = (
    ("vllm:num_requests_running", {}),
    ("vllm:num_requests_waiting", {}),
    ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}),
    ("vllm:num_requests_waiting_by_reason", {"reason": "deferred"}),
    ("vllm:engine_sleep_state", {"sleep_state": "awake"}),
    ("vllm:engine_sleep_state", {"sleep_state": "discard_all"}),
    ("vllm:kv_cache_usage_perc", {}),
    ("vllm:num_preemptions_total", {}),
    ("vllm:prompt_tokens_total", {}),
    ("vllm:prompt_tokens_cached_total", {}),
    ("vllm:prompt_tokens_cached_by_source_total", {"source": "device"}),
    ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
    ("vllm:prefix_cache_queries_total", {}),
    ("vllm:prefix_cache_hits_total", {}),
    ("vllm:generation_tokens_total", {}),
    ("vllm:spec_decode_num_draft_tokens_total", {}),
    ("vllm:spec_decode_num_accepted_tokens_total", {}),
    ("vllm:request_success_total", {"finished_reason": "stop"}),
    ("vllm:request_success_total", {"finished_reason": "length"}),
    ("vllm:request_success_total", {"finished_reason": "abort"}),
    ("vllm:request_success_total", {"finished_reason": "error"}),
    *((f"vllm:{name}_{end}", {}) for name in _HISTOGRAMS for end in ("bucket", "sum", "count")),
    ("http_requests_total", {"status": "2xx", "method": "POST", "handler": "/v1/chat/completions"}),
    ("http_request_duration_seconds_bucket", {"handler": "/v1/chat/completions", "le": "0.5"}),
    ("http_request_duration_seconds_count", {"method": "POST"}),
    ("http_request_duration_highr_seconds_bucket", {"le": "0.05"}),
    ("process_cpu_seconds_total", {}),
    ("process_resident_memory_bytes", {}),
    ("process_start_time_seconds", {}),
    ("process_open_fds", {}),
    ("process_max_fds", {}),
)


@pytest.fixture(scope="module")
async def found(make_backend: Any) -> Scrape:
    """Return the metrics of a server that has answered a stream."""
    app = OpenAIAdapter(make_backend("llama_cpp"), any_model=True, metrics_names="vllm")
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        # The header of Prometheus 2 and 3.
        text = await scrape(
            client,
            accept="application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,"
            "text/plain;version=0.0.4;q=0.3,*/*;q=0.1",
        )
    await app.aclose()
    return text


async def test_names_of_vllm(found: Scrape) -> None:
    """With vLLM's names, the others keep Latimer's, and each metric is there once."""
    rows = (*ROWS, *COUNTED, *DERIVED)
    names = [name for row in rows if (name := row.full_name("vllm")) is not None]
    assert sorted(found.families) == sorted(names)
    # The names that the endpoint picker of Kubernetes' Gateway API reads by default.
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found.sum(f"vllm:{name}", model_name="demo") == 0
    assert found.sum("vllm:request_success_total", finished_reason="stop") == 1
    # Its names are not those that Prometheus recommends.
    assert all("should not contain ':'" in one for one in (promtool(found.text) or "").splitlines())


@pytest.mark.parametrize(("name", "labels"), BOARDS)
async def test_boards_have_data(found: Scrape, name: str, labels: dict[str, str]) -> None:
    """Every expression of vLLM's boards selects a sample, which names the engine."""
    # A board's choice of all engines does not match a sample without an engine.
    engine = {"engine": "llama_cpp", "model_name": "demo"} if name[:5] == "vllm:" else {}
    found.sum(name, **labels, **engine)


async def test_values_of_one_request(found: Scrape) -> None:
    """The numbers that only vLLM has are those of the request."""
    assert found.sum("vllm:request_params_max_tokens_sum") == CHAT["max_tokens"]
    assert found.sum("vllm:request_params_n_sum") == 1
    generated = found.sum("vllm:generation_tokens_total")
    assert found.sum("vllm:request_max_num_generation_tokens_sum") == generated
    prompt, cached = (
        found.sum(f"vllm:{name}_total") for name in ("prompt_tokens", "prompt_tokens_cached")
    )
    assert found.sum("vllm:prompt_tokens_by_source_total") == prompt
    assert found.sum("vllm:request_prefill_kv_computed_tokens_sum") == prompt - cached
    phases = sum(found.sum(f"vllm:request_{one}_time_seconds_sum") for one in ("prefill", "decode"))
    # The end of an answer can arrive after its last token.
    inference = found.sum("vllm:request_inference_time_seconds_sum")
    assert phases - 1e-6 <= inference < phases + 0.1
    assert found.sum("http_requests_total") == 1
    duration = found.sum("http_request_duration_highr_seconds_sum")
    assert duration == found.sum("vllm:e2e_request_latency_seconds_sum")


@asynccontextmanager
async def fleet(*engines: Engine) -> AsyncIterator[tuple[Any, OpenAIAdapter]]:
    """Yield a client of a model `m` of some engines, with vLLM's names."""
    app = OpenAIAdapter([ModelEntry(await pool_of(*engines), ("m",))], metrics_names="vllm")
    async with client_of(app) as client:
        yield client, app
    await app.aclose()


async def test_states_are_those_of_sleep() -> None:
    """An engine that serves is awake, one that is not loaded sleeps, and one that fails is down."""
    async with fleet(Engine("one"), Engine("two"), Engine("three")) as (client, app):
        pool = app.service.entries[0].pool
        assert pool is not None
        pool.replicas[1].set("unloaded")
        pool.replicas[2].set("failed", "It failed.")
        found = await scrape(client)
        pool.replicas[0].set("loading")
        later = await scrape(client)
    for name, awake, discarded in (("one", 1, 0), ("two", 0, 1)):
        for state, value in (("awake", awake), ("discard_all", discarded)):
            labels = {"engine": name, "sleep_state": state}
            assert found.sum("vllm:engine_sleep_state", **labels) == value
    sleeps = {one.labels["engine"] for one in found.families["vllm:engine_sleep_state"].samples}
    assert sleeps == {"one", "two"}
    assert later.sum("vllm:engine_sleep_state", engine="one", sleep_state="awake") == 0


async def test_clients_make_up_no_method() -> None:
    """A method that HTTP does not have, and a path that no route has, are in no label."""
    async with fleet(Engine("one")) as (client, _app):
        await client.request("MADEUP", "/v1/made-up")
        await client.request("MADEUP", "/v1/models")
        found = await scrape(client)
    assert "made-up" not in found.text
    assert "MADEUP" not in found.text
    assert found.sum("http_requests_total", method="other", handler="none", status="4xx") == 1
    assert found.sum("http_requests_total", method="other", handler="/v1/models") == 1


async def test_the_first_failures_are_a_rise() -> None:
    """The classes of status of the API's requests are 0 before the first one."""
    async with fleet(Engine("one")) as (client, app):
        pool = app.service.entries[0].pool
        assert pool is not None
        before = await scrape(client)
        pool.replicas[0].set("draining", "It is drained.")
        await client.post("/v1/chat/completions", json={"model": "m", **CHAT})
        after = await scrape(client)
    labels = {"method": "POST", "handler": "/v1/chat/completions"}
    assert before.sum("http_requests_total", status="5xx", **labels) == 0
    assert after.sum("http_requests_total", status="5xx", **labels) == 1
    assert before.sum("latimer_requests_total", model_name="m", status="503") == 0
