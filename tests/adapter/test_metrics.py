"""Tests of `/metrics`: numbers under real requests, labels, names, keys, the format."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from itertools import pairwise, product
from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import KeyConfig, digest_of
from latimer.adapter.limits.memory import MemoryLimits
from latimer.adapter.metric_rows import GENERATION, ROWS, STATUSES, VLLM, Names, Row
from latimer.adapter.metrics import Metrics, Series
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.observers import Observers
from latimer.adapter.request_log import RequestLog
from latimer.adapter.routes import ROUTES
from latimer.adapter.vllm_metrics import COUNTED, DERIVED
from latimer.backends.base import Model
from latimer.backends.errors import EngineError
from latimer.backends.fleet.breaker import FAILURES
from latimer.backends.llama_server import LlamaServer
from starlette.applications import Starlette
from starlette.routing import Mount
from support.clients import Leaving, client_of
from support.engines.echo import Echo
from support.engines.fleet import Engine, pool_of
from support.prometheus import Scrape, promtool, scrape

CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
}


PROMPT, GENERATED = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")


def chunks(text: str) -> list[Any]:
    """Return the chunks of a stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line[:5] == "data:"]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def usages(client: httpx2.AsyncClient) -> tuple[list[dict[str, Any]], list[float]]:
    """Send requests of several kinds; return their usages and the seconds that they took."""
    stream = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", CHAT),
        ("chat/completions", {**CHAT, "n": 2, "seed": 3}),
        ("chat/completions", stream),
        ("completions", {"prompt": ["1, 2, ", "7, 8, "], "max_tokens": 5, "ignore_eos": True}),
        ("responses", {"input": "What is the capital of France?"}),
    ]
    found, seconds = [], []
    for path, body in bodies:
        begun = time.perf_counter()
        reply = await client.post(f"/v1/{path}", json={"model": "m", **body})
        seconds.append(time.perf_counter() - begun)
        assert reply.status_code == 200, reply.text
        found.append(chunks(reply.text)[-1]["usage"] if "stream" in body else reply.json()["usage"])
    return found, seconds


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_counters_are_the_sums_of_the_usages(make_backend: Any, engine: str) -> None:
    """Tokens equal the usages that clients got, and durations are within the clients' own."""
    app = OpenAIAdapter(make_backend(engine), any_model=True)
    async with client_of(app) as client:
        found, seconds = await usages(client)
        after = await scrape(client)
    await app.aclose()
    # Responses have other names for the same numbers.
    prompt = sum(one[name] for one in found for name in PROMPT if name in one)
    generated = sum(one[name] for one in found for name in GENERATED if name in one)
    assert after.sum("latimer_prompt_tokens_total", engine=engine) == prompt
    assert after.sum("latimer_generation_tokens_total", engine=engine) == generated
    assert after.sum("latimer_request_prompt_tokens_sum") == prompt
    assert after.sum("latimer_request_generation_tokens_sum") == generated
    cached = sum(
        one.get("prompt_tokens_details", one.get("input_tokens_details", {})).get(
            "cached_tokens", 0
        )
        for one in found
    )
    # Completions do not report theirs.
    assert after.sum("latimer_prefix_cache_hits_total") >= cached
    assert after.sum("latimer_prefix_cache_queries_total") == prompt
    assert after.sum("latimer_e2e_request_latency_seconds_count") == len(found)
    duration = after.sum("latimer_e2e_request_latency_seconds_sum")
    assert 0.5 * sum(seconds) - 0.2 < duration <= sum(seconds)
    assert after.sum("latimer_adapter_overhead_seconds_sum") < duration
    # One of each prompt's choices; the second request has two, and the fourth has two prompts.
    assert after.sum("latimer_request_success_total") == len(found) + 2
    assert after.sum("latimer_request_success_total", finished_reason="length") == 2
    assert after.sum("latimer_num_requests_running") == 0
    assert after.sum("latimer_engine_state", state="ready") == 1


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_streams_have_times_of_tokens(make_backend: Any, engine: str) -> None:
    """The phases of a stream add up to its duration, and each token but the first has a time."""
    app = OpenAIAdapter(make_backend(engine), any_model=True)
    body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 64, "ignore_eos": True, "stream": True}
    async with client_of(app) as client:
        await client.post("/v1/completions", json={**body, "max_tokens": 1})
        before = await scrape(client)
        await client.post("/v1/completions", json=body)
        after = await scrape(client)
    await app.aclose()

    def rise(name: str) -> float:
        return after.sum(f"latimer_{name}") - before.sum(f"latimer_{name}")

    assert rise("time_to_first_token_seconds_count") == 1
    # Tokens that arrive together are one event.
    assert 1 <= rise("inter_token_latency_seconds_count") <= 63
    decode = rise("request_decode_time_seconds_sum")
    assert rise("inter_token_latency_seconds_sum") <= decode + 1e-6
    assert rise("request_time_per_output_token_seconds_sum") == pytest.approx(decode / 63)
    phases = (
        rise("request_queue_time_seconds_sum")
        + rise("request_prefill_time_seconds_sum")
        + decode
        + rise("adapter_overhead_seconds_sum")
    )
    duration = rise("e2e_request_latency_seconds_sum")
    # The end of an answer can arrive after its last token.
    assert duration - 0.1 < phases <= duration + 1e-6
    assert rise("time_to_first_token_seconds_sum") < duration


def counts(sample: Any) -> bool:
    """Return True if a sample is a number of requests, and not 0."""
    return sample.name == "latimer_requests_total" and bool(sample.value)


async def test_the_text_is_valid(make_backend: Any) -> None:
    """Buckets never fall, every metric of the table is there, and `promtool` has no complaint."""
    app = OpenAIAdapter(make_backend("llama_cpp"), any_model=True)
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json={"model": "m", **CHAT, "stream": True})
        found = await scrape(client)
        openmetrics = await client.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
    await app.aclose()
    names = {name: row for row in ROWS if (name := row.full_name("latimer")) is not None}
    assert len(names) == len(ROWS)
    assert found.families.keys() == names.keys()
    for name, row in names.items():
        family = found.families[name]
        assert family.type == row.kind
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {*row.labels}
        if row.kind == "histogram":
            buckets = [one for one in family.samples if one.name.endswith("_bucket")]
            assert [float(one.labels["le"]) for one in buckets] == [*row.buckets, float("inf")]
            assert all(one.value <= other.value for one, other in pairwise(buckets))
            assert buckets[-1].value == found.sum(f"{name}_count")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")
    assert not promtool(found.text)


async def test_probes_are_not_counted(make_backend: Any) -> None:
    """Requests of operators' paths are in no counter, so that they hide no errors of clients."""
    app = OpenAIAdapter(make_backend("llama_cpp"), model_names=["own"])
    async with client_of(app) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        await client.get("/v1/models")
        found = await scrape(client)
    await app.aclose()
    assert found.sum("latimer_requests_total") == 1
    assert {one.labels["endpoint"] for one in found.samples if counts(one)} == {"/v1/models"}


async def test_clients_make_up_no_labels(make_backend: Any) -> None:
    """Names, paths and keys of requests are in no label, so that there are few series."""
    app = OpenAIAdapter(make_backend("llama_cpp"), model_names=["own"])
    generous = OpenAIAdapter(make_backend("llama_cpp"), any_model=True)
    for one in (app, generous):
        async with client_of(one) as client:
            for index in range(3):
                body = {**CHAT, "max_tokens": 1, "model": f"made-up-{index}"}
                await client.post("/v1/chat/completions", json=body)
                await client.get(f"/v1/made-up-{index}")
                await client.get(f"/v1/responses/made-up-{index}")
            found = await scrape(client)
        await one.aclose()
        assert "made-up" not in found.text
        assert found.values("model_name") == {"other", "own" if one is app else "demo"}
        assert found.sum("latimer_requests_total", endpoint="other", status="404") == 3
        assert found.sum("latimer_requests_total", endpoint="/v1/responses/{name}") == 3


async def test_a_key_is_needed(make_backend: Any) -> None:
    """With keys, the metrics need one, and the error names the setting that opens them."""
    backend = make_backend("llama_cpp")
    closed = OpenAIAdapter(backend, api_keys=["secret"])
    async with client_of(closed) as client:
        reply = await client.get("/metrics")
        assert reply.status_code == 401
        assert "metrics_open=True" in reply.json()["error"]["message"]
        wrong = await client.get("/metrics", headers={"authorization": "Bearer wrong"})
        assert "metrics_open=True" in wrong.json()["error"]["message"]
        await scrape(client, authorization="Bearer secret")
    opened = OpenAIAdapter(backend, api_keys=["secret"], metrics_open=True)
    async with client_of(opened) as client:
        await scrape(client)
        assert (await client.get("/v1/models")).status_code == 401
    off = OpenAIAdapter(backend, metrics=False)
    async with client_of(off) as client:
        assert (await client.get("/metrics")).status_code == 404
    await backend.aclose()


async def test_a_key_of_some_models_sees_none(make_backend: Any) -> None:
    """A key that may use some models does not see the numbers of all, and the error says why."""
    keys: dict[str, KeyConfig | Mapping[str, Any]] = {
        "team": {"digest": digest_of("some"), "models": ["own"]},
        "prometheus": {"digest": digest_of("all")},
    }
    backend = make_backend("llama_cpp")
    for is_open in (False, True):
        app = OpenAIAdapter(backend, model_names=["own"], keys=keys, metrics_open=is_open)
        async with client_of(app) as client:
            await scrape(client, authorization="Bearer all")
            reply = await client.get("/metrics", headers={"authorization": "Bearer some"})
            assert reply.status_code == (200 if is_open else 403)
            if not is_open:
                assert "key team may use some models only" in reply.json()["error"]["message"]
                assert "latimer_" not in reply.text
    await backend.aclose()


async def test_a_mounted_app_has_its_own(make_backend: Any) -> None:
    """Two adapters in one app have their own metrics, each under its prefix."""
    adapters = [OpenAIAdapter(make_backend("llama_cpp"), any_model=True) for _ in range(2)]
    site = Starlette(routes=[Mount(f"/ai{n}", one) for n, one in enumerate(adapters)])
    async with client_of(site) as client:
        await client.post("/ai0/v1/chat/completions", json={"model": "m", **CHAT})
        one, other = await scrape(client, "/ai0/metrics"), await scrape(client, "/ai1/metrics")
        path = "/v1/chat/completions"
        assert one.sum("latimer_requests_total", endpoint=path, status="200") == 1
        assert other.sum("latimer_requests_total") == 0
        assert (await client.get("/ai1/ready")).json() == {"status": "ready"}
    for adapter in adapters:
        await adapter.aclose()


@asynccontextmanager
async def fleet(*engines: Engine, **options: Any) -> AsyncIterator[tuple[Any, OpenAIAdapter]]:
    """Yield a client of a model `m` of some engines."""
    pool = await pool_of(*engines)
    app = OpenAIAdapter([ModelEntry(pool, ("m", "alias"))], **options)
    async with client_of(app) as client:
        yield client, app
    await app.aclose()


async def chat(client: Any, **fields: Any) -> httpx2.Response:
    """Return the response to a chat."""
    reply: httpx2.Response = await client.post(
        "/v1/chat/completions", json={"model": "m", **CHAT, **fields}
    )
    return reply


async def test_a_fleet_has_a_series_for_each_engine() -> None:
    """Requests count under the model's own name and the engine that served them."""
    one, two = Engine("one", places=1), Engine("two", places=1)
    async with fleet(one, two) as (client, _app):
        for engine in (one, two):
            engine.gate.clear()
        tasks = [asyncio.create_task(chat(client, model="alias")) for _ in range(3)]
        while one.runs + two.runs < 2:
            await asyncio.sleep(0.01)
        during = await scrape(client)
        for engine in (one, two):
            engine.gate.set()
        replies = await asyncio.gather(*tasks)
        after = await scrape(client)
    assert [reply.status_code for reply in replies] == [200] * 3
    for name in ("one", "two"):
        assert during.sum("latimer_num_requests_running", engine=name, model_name="m") == 1
        assert after.sum("latimer_num_requests_running", engine=name) == 0
        assert after.sum("latimer_e2e_request_latency_seconds_count", engine=name) >= 1
    assert during.sum("latimer_num_requests_waiting", model_name="m") == 1
    assert after.sum("latimer_num_requests_waiting") == 0
    assert after.sum("latimer_e2e_request_latency_seconds_count") == 3
    assert after.sum("latimer_request_queue_time_seconds_sum") > 0
    assert "alias" not in after.text


async def test_an_engine_that_has_failed_is_shown() -> None:
    """An engine that could be loaded once more is not shown as unloaded, but as failed."""
    async with fleet(Engine("one"), Engine("two")) as (client, app):
        pool = app.service.entries[0].pool
        assert pool is not None
        pool.replicas[0].set("unloaded", "it was killed")
        pool.replicas[1].set("unloaded")
        found = await scrape(client)
    assert found.sum("latimer_engine_state", engine="one", state="failed") == 1
    assert found.sum("latimer_engine_state", engine="two", state="unloaded") == 1


async def test_a_request_without_an_engine_names_none() -> None:
    """A request of a fleet that fails before it has an engine counts under no engine's name."""
    async with fleet(Engine("one")) as (client, app):
        pool = app.service.entries[0].pool
        assert pool is not None
        pool.replicas[0].set("draining", "It is drained.")
        assert (await chat(client)).status_code == 503
        found = await scrape(client)
    assert found.values("engine") == {"one", "none"}
    assert found.sum("latimer_request_success_total", engine="none", finished_reason="error") == 1


async def test_the_first_failures_are_a_rise() -> None:
    """Each status that an alert reads is 0 before the first request of a model, also of a new one.

    A series that began at the number of failures would hide them from `increase`.
    """
    one = Engine("one")
    async with fleet(one) as (client, app):
        pool = app.service.entries[0].pool
        assert pool is not None
        before = await scrape(client)
        pool.replicas[0].set("draining", "It is drained.")
        assert [(await chat(client)).status_code for _ in range(3)] == [503] * 3
        after = await scrape(client)
        app.replace([*app.service.entries, ModelEntry(await pool_of(Engine("new")), ("n",))])
        reloaded = await scrape(client)
    failed = {"model_name": "m", "endpoint": "/v1/chat/completions", "status": "503"}
    ended = {"model_name": "m", "engine": "none", "finished_reason": "error"}
    for name, labels in (("requests_total", failed), ("request_success_total", ended)):
        assert before.sum(f"latimer_{name}", **labels) == 0
        assert after.sum(f"latimer_{name}", **labels) == 3
    assert before.sum("latimer_client_disconnects_total", model_name="m") == 0
    for endpoint, status in product(GENERATION, STATUSES):
        labels = {"endpoint": endpoint, "status": str(status)}
        assert before.sum("latimer_requests_total", model_name="m", **labels) == 0
        assert reloaded.sum("latimer_requests_total", model_name="n", **labels) == 0


async def test_series_from_the_start_are_few() -> None:
    """The requests of a model without any take less than a tenth of the lines of the model."""
    async with fleet(Engine("one")) as (client, _app):
        found = await scrape(client)
    lines = [line for line in found.text.splitlines() if 'model_name="m"' in line]
    zeros = [line for line in lines if line.startswith("latimer_requests_total")]
    assert len(zeros) == len(GENERATION) * len(STATUSES)
    assert len(zeros) < len(lines) / 10


def test_series_from_the_start_are_those_of_routes() -> None:
    """Each endpoint whose requests are counted from the start is a path of the API."""
    assert all("POST" in ROUTES[path.removeprefix("/v1")] for path in GENERATION)


@pytest.mark.parametrize("names", [["m"], []])
async def test_a_request_for_an_engine_that_is_down_has_failed(names: list[str]) -> None:
    """A request that cannot reach the only engine counts as its error, which was 0 before.

    It has not reached a queue, so it makes no wait look short.
    """
    with socket() as closed:
        closed.bind(("127.0.0.1", 0))
        engine = LlamaServer(f"http://127.0.0.1:{closed.getsockname()[1]}")
        app = OpenAIAdapter(engine, model_names=names)
        async with client_of(app) as client:
            before = await scrape(client)
            assert [(await chat(client)).status_code for _ in range(3)] == [503] * 3
            assert (await client.get("/v1/models")).status_code == 503
            after = await scrape(client)
        await app.aclose()
    name = "m" if names else "other"
    labels = {"engine": "llama_server", "finished_reason": "error", "model_name": name}
    assert before.sum("latimer_request_success_total", **labels) == 0
    assert after.sum("latimer_request_success_total", **labels) == 3
    assert after.sum("latimer_request_success_total") == 3
    assert after.sum("latimer_request_queue_time_seconds_count") == 0


async def test_retries_and_ejections_count() -> None:
    """A call that another engine repeats is a retry, and an engine that fails often is ejected."""
    one, two = Engine("one"), Engine("two")
    one.fails = EngineError("It failed.")
    async with fleet(one, two) as (client, _app):
        for _ in range(4 * FAILURES):
            assert (await chat(client)).status_code == 200
        found = await scrape(client)
    assert found.sum("latimer_engine_retries_total", model_name="m") >= FAILURES
    assert found.sum("latimer_engine_ejections_total", engine="one") == 1
    assert found.sum("latimer_engine_state", engine="one", state="unavailable") == 1
    assert found.sum("latimer_affinity_requests_total") == 4 * FAILURES


async def test_an_error_of_an_engine_is_counted() -> None:
    """A stream that breaks has not succeeded, and its tokens so far count.

    It has not waited for its engine, and the times of the queue have that.
    """
    one = Engine("one")
    one.breaks = EngineError("It broke.")
    async with fleet(one) as (client, _app):
        await chat(client, stream=True)
        found = await scrape(client)
    assert found.sum("latimer_request_success_total", finished_reason="error") == 1
    assert found.sum("latimer_request_success_total", finished_reason="stop") == 0
    assert found.sum("latimer_e2e_request_latency_seconds_count") == 0
    assert found.sum("latimer_request_queue_time_seconds_count") == 1
    assert found.sum("latimer_request_queue_time_seconds_sum") < 0.1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_client_that_leaves_has_used_tokens(
    make_backend: Any, engine: str, stream: bool
) -> None:
    """The tokens until a client disconnects are in the metrics and in the request log.

    llama-server says what its cache had at the end only, so a prompt without an end counts neither
    as looked up nor as found.
    """
    lines: list[bytes] = []
    app = OpenAIAdapter(make_backend(engine), any_model=True, observers=[RequestLog(lines.append)])
    body = {"model": "m", "prompt": "1, 2, " * 40, "max_tokens": 1500, "ignore_eos": True}
    leaving = Leaving(app)
    async with client_of(app) as client, client_of(leaving) as other:
        first = await client.post("/v1/completions", json={**body, "max_tokens": 1})
        empty = await scrape(client)
        begun = time.perf_counter()
        await client.post("/v1/completions", json={**body, "max_tokens": 20})
        took = time.perf_counter() - begun
        before = await scrape(client)
        task = asyncio.create_task(other.post("/v1/completions", json={**body, "stream": stream}))
        # Other work on the machine may slow the engine down.
        await asyncio.sleep(max(0.3, took))
        assert not task.done()
        leaving.gone.set()
        # There is no response, or half of one.
        await asyncio.wait([task])
        task.exception()
        after = await scrape(client)
    await app.aclose()
    event = json.loads(lines[-1])
    assert event["client_gone"]
    prompt, generated = event["prompt_tokens"], event["completion_tokens"]
    assert prompt == first.json()["usage"]["prompt_tokens"]
    assert 1 < generated < 1500
    knows, hits = engine == "llama_cpp", "prefix_cache_hits_total"
    cached = knows * (before.sum(f"latimer_{hits}") - empty.sum(f"latimer_{hits}"))
    assert (cached > 0) is knows
    names = {
        "prompt_tokens_total": prompt,
        "prefix_cache_queries_total": prompt * knows,
        hits: cached,
        "generation_tokens_total": generated,
        # A client that leaves a slow stream does not make it look fast.
        "time_to_first_token_seconds_count": int(stream),
    }
    assert event.get("cached_tokens", 0) == cached
    for name, count in names.items():
        assert after.sum(f"latimer_{name}") - before.sum(f"latimer_{name}") == count, name


async def test_no_time_is_negative() -> None:
    """A stream of several prompts has no negative time, though the last waits for its turn."""
    one = Engine("one", places=1)
    async with fleet(one) as (client, _app):
        body = {"model": "m", "prompt": ["a", "b", "c"], "stream": True}
        for _ in range(5):
            await client.post("/v1/completions", json=body)
        found = await scrape(client)
    for name in ("request_prefill_time", "request_inference_time", "adapter_overhead"):
        assert found.sum(f"latimer_{name}_seconds_sum") >= 0, name


async def test_the_sum_of_times_between_tokens_never_falls() -> None:
    """The order in which times are added changes no sum that a scrape has shown."""
    series = Series()
    shown = []
    service: Any = SimpleNamespace(observers=Observers([], str), store=None, limits=MemoryLimits())
    metrics = Metrics()
    metrics._series["m", "e"] = series
    facts = {"count": 1, "counted": 0, "ticket": None, "engine": "e"}
    for number in range(50):
        records: list[Any] = [
            SimpleNamespace(arrivals=[0.1 * n**2 / (number + 1) for n in range(size)], **facts)
            for size in (3, 5, 9)
        ]
        service.observers.running = [
            SimpleNamespace(record=record, model="m") for record in records
        ]
        shown.append((await metrics.snapshot(service, [])).series["m", "e"].between.total)
        for record in records:
            series.add_gaps(record)
        service.observers.running = []
        shown.append((await metrics.snapshot(service, [])).series["m", "e"].between.total)
    assert shown == sorted(shown)


async def test_a_scrape_during_long_streams_lets_others_run() -> None:
    """Each time between tokens counts once, and the event loop has turns while many are added."""
    metrics, series, turns = Metrics(), Series(), 0
    metrics._series["m", "e"] = series
    arrivals = [float(n) for n in range(20_000)]
    facts = {"count": 1, "counted": 0, "ticket": None, "engine": "e"}
    record: Any = SimpleNamespace(arrivals=arrivals[:15_000], **facts)
    observers: Any = Observers([], str)
    observers.running = [SimpleNamespace(record=record, model="m")]
    service: Any = SimpleNamespace(observers=observers, store=None, limits=MemoryLimits())

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    first = (await metrics.snapshot(service, [])).series["m", "e"].between
    counting.cancel()
    # The last arrival of a stream that runs may be its end.
    assert (sum(first.counts), first.total) == (14_998, 14_998.0)
    assert turns >= 2
    record.arrivals = arrivals
    series.add_gaps(record)
    service.observers.running = []
    last = (await metrics.snapshot(service, [])).series["m", "e"].between
    assert (sum(last.counts), last.total) == (19_999, 19_999.0)


class Stalling(Echo):
    """An engine that does not say what its model is while its gate is closed."""

    def __init__(self) -> None:
        super().__init__("Hello.")
        self.gate = asyncio.Event()
        self.gate.set()

    async def model(self) -> Model:
        """Return the model, as soon as the gate is open."""
        await self.gate.wait()
        return await super().model()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", CHAT),
        ("completions", {"prompt": "a"}),
        ("responses", {"input": "a"}),
        ("messages", {"messages": CHAT["messages"], "max_tokens": 1}),
    ],
)
async def test_requests_of_an_engine_that_stalls_have_its_model(
    path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the only engine stalls, its requests wait for its model, also those of clients that go.

    The log has the model, too.
    """
    monkeypatch.setattr("latimer.adapter.endpoints.operations.SCRAPE", 0.05)
    lines: list[bytes] = []
    engine = Stalling()
    app = OpenAIAdapter(engine, observers=[RequestLog(lines.append)])
    leaving = Leaving(app)
    name = (await engine.model()).name
    body = {"model": name, **fields}
    async with client_of(app) as client, client_of(leaving) as other:
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
        engine.gate.clear()
        tasks = [asyncio.create_task(other.post(f"/v1/{path}", json=body)) for _ in range(3)]
        unknown = asyncio.create_task(other.post(f"/v1/{path}", json={**body, "model": "x"}))
        await asyncio.sleep(0.05)
        during = await scrape(client)
        leaving.gone.set()
        await asyncio.wait([*tasks, unknown])
        found = await scrape(client)
    engine.gate.set()
    await app.aclose()
    for task in (*tasks, unknown):
        task.exception()
    assert during.sum("latimer_num_requests_waiting", model_name=name) == 3
    assert found.sum("latimer_num_requests_waiting") == 0
    assert found.sum("latimer_requests_total", model_name=name, status="499") == 3
    assert found.sum("latimer_client_disconnects_total", model_name=name) == 3
    assert found.sum("latimer_client_disconnects_total", model_name="other") == 1
    events = [json.loads(line) for line in b"".join(lines).splitlines()]
    assert [one.get("model") for one in events if one["status"] == 499].count(name) == 3


async def test_a_stall_is_no_time_of_latimer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for an engine that stalls counts as queue, also for a client that leaves."""
    monkeypatch.setattr("latimer.adapter.endpoints.operations.SCRAPE", 0.05)
    lines: list[bytes] = []
    engine = Stalling()
    app = OpenAIAdapter(engine, observers=[RequestLog(lines.append)])
    leaving = Leaving(app)
    async with client_of(app) as client, client_of(leaving) as other:
        assert (await chat(client, model=engine.facts.name)).status_code == 200
        engine.gate.clear()
        served = asyncio.create_task(chat(client, model=engine.facts.name))
        gone = asyncio.create_task(chat(other, model=engine.facts.name))
        await asyncio.sleep(0.2)
        leaving.gone.set()
        await asyncio.wait([gone])
        gone.exception()
        engine.gate.set()
        assert (await served).status_code == 200
        found = await scrape(client)
    await app.aclose()
    events = [json.loads(line) for line in b"".join(lines).splitlines()]
    assert [one.get("queue_ms", 0) > 150 for one in events] == [False, True, True]
    assert all(one.get("overhead_ms", 0) < 150 for one in events)
    assert found.sum("latimer_request_queue_time_seconds_sum") > 0.3
    assert found.sum("latimer_adapter_overhead_seconds_sum") < 0.15
    assert found.sum("latimer_request_success_total", finished_reason="abort") == 1


@pytest.mark.parametrize(
    ("asked", "keyed", "label"),
    [
        ("b", False, "b"),
        ("made-up", False, "a"),
        (None, False, "other"),
        ("b", True, "b"),
        ("a", True, "other"),
        ("made-up", True, "other"),
    ],
)
async def test_a_refused_request_has_the_model_that_would_serve_it(
    asked: str | None, keyed: bool, label: str
) -> None:
    """With `any_model`, a name of its own has its model, and any other one has the first."""
    keys: dict[str, KeyConfig | Mapping[str, Any]] = {
        "some": {"digest": digest_of("some"), "models": ["b"]},
    }
    engine = Echo("Hello.")
    entries = [ModelEntry(engine, (name,), any_model=True) for name in ("a", "b")]
    app = OpenAIAdapter(entries, keys=keys if keyed else {})
    async with client_of(app) as client:
        headers = {"authorization": "Bearer some"}
        body = {**CHAT, "model": asked, "temperature": "hot"}
        await client.post("/v1/chat/completions", json=body, headers=headers)
        found = await scrape(client) if not keyed else None
        app.service.observers.flush()
    own = app.service.observers.all[0]
    assert isinstance(own, Metrics)
    assert {model for (model, _, _), count in own._requests.items() if count} == {label}
    assert found is None or found.sum("latimer_requests_total", model_name=label) == 1
    await app.aclose()


@pytest.mark.parametrize(("models", "label"), [(["x"], "other"), (["own"], "own")])
@pytest.mark.parametrize("body", [{}, {"model": None}])
async def test_a_key_counts_under_its_own_models_only(
    models: list[str], label: str, body: dict[str, Any]
) -> None:
    """A request without a name counts for the only model, unless its key may not use that."""
    keys: dict[str, KeyConfig | Mapping[str, Any]] = {
        "some": {"digest": digest_of("some"), "models": models},
    }
    app = OpenAIAdapter(Echo("Hello."), model_names=["own"], keys=keys)
    async with client_of(app) as client:
        headers = {"authorization": "Bearer some"}
        await client.post("/v1/chat/completions", json={**body, "n": "x"}, headers=headers)
        app.service.observers.flush()
    own = app.service.observers.all[0]
    assert isinstance(own, Metrics)
    assert {model for model, _, _ in own._requests} == {label}
    await app.aclose()


async def test_a_refused_request_counts_for_its_model() -> None:
    """A 400 counts for the model that it names, if there is one and the key may use it."""
    keys: dict[str, KeyConfig | Mapping[str, Any]] = {
        "some": {"digest": digest_of("some"), "models": ["b"]},
    }
    engine = Echo("Hello.")
    app = OpenAIAdapter([ModelEntry(engine, ("a",)), ModelEntry(engine, ("b", "c"))], keys=keys)
    async with client_of(app) as client:
        for name in ("a", "b", "c", "d", 7):
            body = {**CHAT, "model": name, "temperature": "hot"}
            headers = {"authorization": "Bearer some"}
            await client.post("/v1/chat/completions", json=body, headers=headers)
        app.service.observers.flush()
        found = app.service.observers.all[0]
    assert isinstance(found, Metrics)
    counts = {model: count for (model, _, _), count in found._requests.items()}
    assert counts == {"b": 1, "other": 4}
    await app.aclose()


async def test_a_client_that_leaves_the_queue_has_waited() -> None:
    """The wait of a client that leaves a queue is in the metrics and in the request log."""
    lines: list[bytes] = []
    one = Engine("one", places=1)
    async with fleet(one, observers=[RequestLog(lines.append)]) as (client, app):
        leaving = Leaving(app)
        one.gate.clear()
        running = asyncio.create_task(chat(client))
        while not one.runs:
            await asyncio.sleep(0.01)
        async with client_of(leaving) as other:
            waiting = asyncio.create_task(chat(other))
            await asyncio.sleep(0.2)
            leaving.gone.set()
            await asyncio.wait([waiting])
            waiting.exception()
        found = await scrape(client)
        one.gate.set()
        await running
    event = json.loads(lines[0])
    assert event["client_gone"]
    assert 150 < event["queue_ms"] <= event["duration_ms"]
    assert found.sum("latimer_request_queue_time_seconds_count") == 1
    assert found.sum("latimer_request_queue_time_seconds_sum") == pytest.approx(
        event["queue_ms"] / 1e3, abs=1e-3
    )


async def test_a_running_stream_counts(llama_server_url: str) -> None:
    """Tokens of a stream count while it runs, and no counter ever falls."""
    app = OpenAIAdapter(LlamaServer(llama_server_url), any_model=True)
    body = {"model": "m", "prompt": "1, 2, ", "max_tokens": 600, "ignore_eos": True}
    async with client_of(app) as client:
        sending = client.post("/v1/completions", json={**body, "stream": True})
        task = asyncio.create_task(sending)
        scrapes: list[Scrape] = []
        while not task.done():
            scrapes.append(await scrape(client))
        await task
        scrapes.append(await scrape(client))
    await app.aclose()
    for name in ("generation_tokens_total", "inter_token_latency_seconds_count"):
        values = [one.sum(f"latimer_{name}") for one in scrapes[1:]]
        assert values == sorted(values)
        assert any(0 < value < values[-1] for value in values)
    assert scrapes[-1].sum("latimer_generation_tokens_total") == 600
    assert any(one.sum("latimer_num_requests_running") == 1 for one in scrapes)


async def test_limits_of_keys_count() -> None:
    """A request that a limit of its key refuses counts under that limit."""
    from latimer.adapter.limits.config import digest_of

    keys = {"team": {"digest": digest_of("k"), "requests_per_minute": 1}}
    async with fleet(Engine("one"), keys=keys, metrics_open=True) as (client, _app):
        client.headers["authorization"] = "Bearer k"
        assert [(await chat(client)).status_code for _ in range(3)] == [200, 429, 429]
        found = await scrape(client)
    assert found.sum("latimer_limit_refusals_total", limit="requests") == 2
    assert found.sum("latimer_limit_refusals_total") == 2
    assert found.sum("latimer_requests_total", status="429", model_name="m") == 2


async def test_keys_count_their_requests_and_tokens() -> None:
    """The table of a key counts requests by status, and the tokens of its usages; no other key."""
    from latimer.adapter.limits.config import digest_of

    keys = {"team": {"digest": digest_of("k"), "requests_per_minute": 2}}
    engine = Engine("one")
    async with fleet(engine, keys=keys, api_keys=["plain"], metrics_open=True) as (client, _app):
        client.headers["authorization"] = "Bearer k"
        replies = [await chat(client) for _ in range(3)]
        client.headers["authorization"] = "Bearer plain"
        await chat(client)
        client.headers["authorization"] = "Bearer unknown"
        await chat(client)
        found = await scrape(client)
    assert [one.status_code for one in replies] == [200, 200, 429]
    used = [one.json()["usage"] for one in replies[:2]]
    of_team = {"key": "team", "model_name": "m"}
    assert found.sum("latimer_key_requests_total", **of_team, status="200") == 2
    assert found.sum("latimer_key_requests_total", **of_team, status="429") == 1
    assert found.sum("latimer_key_requests_total") == 3
    for name, field in (("prompt", "prompt_tokens"), ("generation", "completion_tokens")):
        total = sum(one[field] for one in used)
        assert total > 0
        assert found.sum(f"latimer_key_{name}_tokens_total", **of_team) == total
        assert found.sum(f"latimer_key_{name}_tokens_total") == total


def test_buckets_are_in_order() -> None:
    """The buckets of each histogram rise, as `bisect` needs."""
    for row in ROWS:
        assert list(row.buckets) == sorted({*row.buckets})


OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def table_of(rows: Iterable[Row], names: Names, mark: str = "") -> str:
    """Return the table of some metrics for the documentation."""
    lines = ["| metric | kind | labels | content |", "|---|---|---|---|"]
    for row in rows:
        is_shared = row.full_name("vllm") == VLLM + row.name
        name = f"`{row.full_name(names)}{'_total' * (row.kind == 'counter')}`" + mark * is_shared
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| {name} | {row.kind} | {labels} | {row.text} |")
    return "\n".join(lines)


def test_the_documentation_has_every_metric() -> None:
    """docs/operations.md has the table of metrics; LATIMER_SNAPSHOT=1 writes it again."""
    own, vllm = table_of(ROWS, "latimer", " \\*"), table_of((*DERIVED, *COUNTED), "vllm")
    table = (
        f"{own}\n\nMetrics with \\* are vLLM's, too.\n\n"
        f"`--metrics-names vllm` has these in addition:\n\n{vllm}\n"
    )
    before, begin, rest = OPERATIONS.read_text().partition("<!-- metrics -->\n\n")
    _, end, after = rest.partition("\n<!-- end of metrics -->")
    if os.environ.get("LATIMER_SNAPSHOT"):
        OPERATIONS.write_text(before + begin + table + end + after)
    assert begin + table + end in OPERATIONS.read_text()


def test_the_documentation_names_only_metrics_that_exist() -> None:
    """Every metric in an expression of docs/operations.md is one that is served."""
    ends = ("", "_total", "_bucket")
    known = {f"{row.full_name('latimer')}{end}" for row in ROWS for end in ends}
    assert {*re.findall(r"latimer_[a-z0-9_]+", OPERATIONS.read_text())} <= known
