"""Tests of Latimer by the conformance suite, over its engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.conformance.check import Check, all_checks
from latimer.conformance.recordings import SENTENCE
from latimer.conformance.runner import Settings, judge
from support.dictation import dictation
from support.embeddings import ENGINES, embedding
from support.engines.koboldcpp import DemoKoboldcpp, FakeKoboldcpp
from support.scripted import HERMES, scripted
from support.servers import restarted_llama_server, serving
from support.sounds import tone, wav

# Checks of reasoning, which a scripted model passes.
REASONED = ("responses.reasoning", "responses.accumulator-reasoning")
# Those of messages need a template with a switch.
SWITCHED = (
    "messages.thinking", "messages.thinking-off", "messages.thinking-omitted",
    "messages.stream-thinking", "messages.stream-signature",
)  # fmt: skip
REASONING = [check.id for check in all_checks() if check.id.startswith(REASONED)]
# Checks that do not pass, with the reasons; docs/conformance/README.md says more.
EXPLAINED = {
    "errors.unknown-field": "unknown fields are ignored and listed, unless the server is strict",
    "completions.suffix": "the demo model has no tokens for filling in the middle",
    "streaming.first-chunk": "the demo model answers within a quarter of a second",
    "errors.wrong-key": "this server has no API key",
    "messages.wrong-key": "this server has no API key",
    "websocket.key": "this server has no API key",
    "keepalive.bytes": "the demo model's prompts are evaluated within seconds",
    "keepalive.comments": "the demo model's prompts are evaluated within seconds",
    "chat.detail-original": "the demo model does not accept images",
    "tools.several": "the demo model makes only one call",
    "tools.stream-order": "the demo model makes only one call",
    "responses.unknown-field": "unknown fields are ignored and listed, unless the server is strict",
    "responses.image": "the demo model does not accept images",
    "responses.stream-calls": "the demo model makes only one call",
    **dict.fromkeys((*REASONING, *SWITCHED), "the demo model does not reason"),
}
# The beginnings of the ids of checks that have an engine of their own in another test.
ENGINE = ("engine.", "responses.engine-")
ELSEWHERE = (*ENGINE, "embeddings.", "audio.")


async def check_passes(url: str, checks: Sequence[Check], **settings: Any) -> None:
    """Check that a server passes some checks."""
    verdicts = await judge(Settings(f"{url}/v1", **settings), checks)
    assert len(verdicts) == len(checks) > 0
    assert [(v.check.id, v.outcome, v.detail) for v in verdicts if v.outcome != "pass"] == []


@pytest.fixture(scope="module", params=["in process", "llama-server"])
def address(request: pytest.FixtureRequest, llama_server_url: str) -> Iterator[str]:
    """Serve Latimer over an engine, and yield its address."""

    def make() -> OpenAIAdapter:
        backend = LlamaCpp() if request.param == "in process" else LlamaServer(llama_server_url)
        return OpenAIAdapter(backend, cors_origins=["*"])

    with serving(make) as url:
        yield url


@pytest.mark.timed
async def test_every_must_holds(address: str) -> None:
    """Latimer passes every check that it supports, except for the explained ones.

    Under load, llama-server gives a different greedy answer once in many runs, through its own API
    as well. Up to two checks may therefore be flaky.
    """
    checks = [check for check in all_checks() if not check.id.startswith(ELSEWHERE)]
    settings = Settings(f"{address}/v1", hint="demo")
    verdicts = await judge(settings, checks)
    # The runner repeats no check that is skipped or unsupported. A different answer may have caused
    # the first, and a response that was not stored in time the second.
    skipped = [
        v.check
        for v in verdicts
        if v.outcome in ("skip", "unsupported") and v.check.id not in EXPLAINED
    ]
    if skipped:
        verdicts = [v for v in verdicts if v.check not in skipped]
        verdicts += await judge(settings, skipped)
    told = {
        verdict.check.id: (verdict.outcome, verdict.detail)
        for verdict in verdicts
        if verdict.outcome not in ("pass", "flaky")
    }
    assert {name: told[name] for name in told.keys() - EXPLAINED.keys()} == {}
    flaky = [(v.check.id, v.detail) for v in verdicts if v.outcome == "flaky"]
    assert len(flaky) <= 2, flaky


# A template that keeps the reasoning before a call, and begins the next one.
KEEPS = HERMES.replace(
    "{{ m.role }}\n{{ m.content }}",
    "{{ m.role }}\n{{ m.reasoning_content or '' }}{{ m.content }}",
)
THINKS = KEEPS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
MAY_THINK = KEEPS.replace(
    "assistant\n{% endif %}", "assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
THOUGHTS = ("Two cats", " have", " four legs", " each.", "</think>", "\n\n", "Eight", ".")
CALLS = (
    "<tool_call>", '{"name": "get_weather", ', '"arguments": {"city": "Paris"}}', "</tool_call>",
    "\n<tool_call>", '\n{"name": "get_weather", ', '"arguments": {"city": "Rome"}}',
    "\n</tool_call>",
)  # fmt: skip


@pytest.mark.parametrize(
    ("script", "template", "names"),
    [
        (THOUGHTS, THINKS, REASONING),
        (THOUGHTS, MAY_THINK, SWITCHED),
        (CALLS, KEEPS, ["responses.stream-calls", "responses.one-call", "responses.call-ids"]),
    ],
    ids=["reasoning", "reasoning on demand", "several calls"],
)
async def test_what_the_demo_model_cannot_show(
    tmp_path: Path, script: Sequence[str], template: str, names: Sequence[str]
) -> None:
    """A model that reasons, or makes several calls, passes the checks that need that."""
    path = scripted(tmp_path / "model.gguf", script, template, context=2048)
    checks = [check for check in all_checks() if check.id in names]
    with serving(lambda: OpenAIAdapter(LlamaCpp(path))) as url:
        assert len(checks) == len(names)
        await check_passes(url, checks)


@pytest.mark.timed
async def test_stored_over_koboldcpp() -> None:
    """Latimer passes every check of stored completions without logprobs over a koboldcpp, too."""
    checks = [check for check in all_checks() if check.group == "stored"]
    # It compares the log-probabilities, too, which koboldcpp returns after sampling.
    checks = [check for check in checks if check.id != "stored.same"]
    async with FakeKoboldcpp() as fake:
        with serving(lambda: OpenAIAdapter(KoboldCpp(fake.url))) as url:
            await check_passes(url, checks)


# What koboldcpp cannot do: it returns log-probabilities after sampling.
REFUSED = ("responses.logprobs", "responses.logprobs-stream", "responses.logprobs-agree")


@pytest.mark.timed
async def test_responses_over_koboldcpp(llama_server_url: str) -> None:
    """Latimer passes every check of responses over a koboldcpp, or rejects what it cannot do."""
    checks = [check for check in all_checks() if check.group in ("responses", "websocket")]
    checks = [check for check in checks if not check.id.startswith(ELSEWHERE)]
    async with DemoKoboldcpp(upstream=llama_server_url) as fake:
        with serving(lambda: OpenAIAdapter(KoboldCpp(fake.url))) as url:
            verdicts = await judge(Settings(f"{url}/v1", hint="demo"), checks)
    told = [
        (v.check.id, v.outcome, v.detail)
        for v in verdicts
        if v.outcome not in ("pass", "flaky") and v.check.id not in EXPLAINED
    ]
    assert [(name, outcome) for name, outcome, _ in told] == [
        (name, "unsupported") for name in REFUSED
    ], told


# Groups whose promises koboldcpp's own endpoints, counts and cancellations could break.
NATIVE = {"chat", "choices", "completions", "concurrency", "stops", "streaming", "tools"}


@pytest.mark.timed
async def test_native_calls_over_koboldcpp(llama_server_url: str) -> None:
    """Latimer fails no check of answers, tool calls, streams and cancellations over a koboldcpp."""
    checks = [check for check in all_checks() if check.group in NATIVE]
    async with DemoKoboldcpp(upstream=llama_server_url, lag=0.01) as fake:
        with serving(lambda: OpenAIAdapter(KoboldCpp(fake.url))) as url:
            verdicts = await judge(Settings(f"{url}/v1", hint="demo"), checks)
    told = [
        (v.check.id, v.outcome, v.detail)
        for v in verdicts
        if v.outcome not in ("pass", "flaky", "unsupported") and v.check.id not in EXPLAINED
    ]
    assert told == []
    assert sum(v.outcome == "pass" for v in verdicts) > len(checks) * 0.8


@pytest.mark.timed
@pytest.mark.parametrize("engine", [*ENGINES, "a chat model"])
async def test_embeddings(engine: str, demo_f32: Path) -> None:
    """A model that embeds passes every check of embeddings, and so does a chat model.

    The weights are F32. Batching changes vectors of quantized weights by more than the checks
    allow.
    """
    checks = [check for check in all_checks() if check.group == "embeddings"]
    with contextlib.ExitStack() as stack:
        if engine == "a chat model":
            backend: Backend = LlamaCpp(demo_f32, embeddings=True)
        else:
            backend = stack.enter_context(embedding(engine, "bert-mean"))
        url = stack.enter_context(serving(lambda: OpenAIAdapter(backend)))
        await check_passes(url, checks)


AUDIO = [check for check in all_checks() if check.group == "audio"]


@pytest.mark.timed
@pytest.mark.parametrize("engine", ["in process", "llama-server"])
async def test_audio(engine: str, llama_server_url: str) -> None:
    """A server with a speaker and a transcriber passes every check of audio."""

    def make() -> OpenAIAdapter:
        backend = LlamaCpp() if engine == "in process" else LlamaServer(llama_server_url)
        return OpenAIAdapter(backend, api_keys=["sk-right"], any_model=True, **dictation(0.03))

    with serving(make) as url:
        await check_passes(url, AUDIO, hint="demo", key="sk-right")


@pytest.mark.timed
async def test_audio_of_koboldcpp(llama_server_url: str) -> None:
    """koboldcpp's own speech and Whisper pass every check, except for those of translations."""
    heard, spoken = [f" {SENTENCE}"] * 1_000, wav(tone(1.0, 24_000), 24_000)
    abilities = {"tts": True, "transcribe": True}
    async with DemoKoboldcpp(
        upstream=llama_server_url, version=abilities, wav=spoken, hears=heard
    ) as fake:

        def make() -> OpenAIAdapter:
            return OpenAIAdapter(KoboldCpp(fake.url), api_keys=["sk-right"], any_model=True)

        with serving(make) as url:
            verdicts = await judge(Settings(f"{url}/v1", hint="demo", key="sk-right"), AUDIO)
    told = {v.check.id: (v.outcome, v.detail) for v in verdicts if v.outcome != "pass"}
    for name in ("audio.translation", "audio.translation-verbose"):
        assert told.pop(name)[0] == "unsupported"
    # The fake speaks at once, so the check of the first byte cannot tell.
    assert told.keys() <= {"audio.first-byte"}


async def test_audio_is_not_claimed() -> None:
    """A server without a speaker and a transcriber rejects audio, and fails no check of it."""
    with serving(lambda: OpenAIAdapter(LlamaCpp())) as url:
        verdicts = await judge(Settings(f"{url}/v1", hint="demo"), AUDIO)
    told = [(v.check.id, v.outcome) for v in verdicts if v.outcome != "unsupported"]
    assert told == [("audio.key", "skip"), ("audio.text-only", "pass")]


@pytest.mark.timed
async def test_streams_are_not_silent() -> None:
    """Streams whose prompts wait contain comments, and the openai SDK reads their events."""
    checks = [check for check in all_checks() if check.group == "keepalive"]
    with serving(lambda: OpenAIAdapter(LlamaCpp(parallel=1), keepalive=0.02)) as url:
        verdicts = await judge(Settings(f"{url}/v1", hint="demo", silence=0.2), checks)
    assert [v.outcome for v in verdicts if v.outcome not in ("pass", "flaky")] == [], verdicts


@pytest.mark.timed
async def test_an_engine_that_dies_is_told(tmp_path: Path) -> None:
    """If llama-server dies during a stream, clients get an error, and later requests succeed."""
    checks = [check for check in all_checks() if check.id.startswith(ENGINE)]
    with (
        restarted_llama_server(DEMO_MODEL, tmp_path / "pid") as (engine, kill),
        serving(lambda: OpenAIAdapter(LlamaServer(engine))) as url,
    ):
        await check_passes(url, checks, hint="demo", breaks=kill)
