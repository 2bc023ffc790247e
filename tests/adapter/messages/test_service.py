"""Tests that limits, metrics, defaults, fleets and sessions hold for messages as for chat."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry
from latimer.backends.errors import Busy
from support.clients import adapting, client_of
from support.engines.echo import Echo, ids_of
from support.pdf_files import pdf
from support.servers import serving

from .requests import PATH, body_of, user
from .test_errors import told


async def test_a_limit_of_a_key_has_anthropics_error() -> None:
    """A key beyond its limit gets a 429 in Anthropic's form, with whole seconds to wait."""
    keys: Any = {"team": {"digest": digest_of("k"), "requests_per_minute": 1}}
    async with adapting(Echo(), keys=keys) as client:
        headers = {"x-api-key": "k"}
        first = await client.post(PATH, json=body_of(), headers=headers)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-remaining-requests"] == "0"
        second = await client.post(PATH, json=body_of(), headers=headers)
        assert told(second, 429, "rate_limit_error").startswith("Rate limit reached for m in key")
        # Claude Code gives up if it is longer.
        assert int(second.headers["retry-after"]) <= 60


async def test_a_key_may_use_its_models_only() -> None:
    """A model that a key may not use is a 404, and is not listed."""
    keys: Any = {"team": {"digest": digest_of("k"), "models": ["a"]}}
    async with adapting(Echo(), keys=keys, model_names=["a", "b"], any_model=False) as client:
        headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
        for path in (PATH, f"{PATH}/count_tokens"):
            for name, status in (("a", 200), ("b", 404), ("c", 404)):
                reply = await client.post(path, json=body_of(model=name), headers=headers)
                assert reply.status_code == status
                if status == 404:
                    assert told(reply, 404, "not_found_error") == f"model: {name}"
        listed = (await client.get("/v1/models", headers=headers)).json()
        assert [model["id"] for model in listed["data"]] == ["a"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_is_overloaded(stream: bool) -> None:
    """A full queue is a 529, after which Anthropic's clients try again."""
    async with adapting(Echo(error=Busy("The queue is full.", 1.5))) as client:
        reply = await client.post(PATH, json=body_of(stream=stream))
        assert told(reply, 529, "overloaded_error") == "The queue is full."
        assert reply.headers["retry-after"] == "2"


async def test_metrics_count_messages() -> None:
    """A message is counted with its endpoint, its tokens and its errors."""
    async with adapting(Echo(), any_model=False, model_names=["m"]) as client:
        await client.post(PATH, json=body_of())
        await client.post(PATH, json=body_of(stream=True))
        await client.post(PATH, json=body_of(messages=[]))
        found = (await client.get("/metrics")).text
    assert 'endpoint="/v1/messages",model_name="m",status="200"} 2.0' in found
    assert 'endpoint="/v1/messages",model_name="m",status="400"} 1.0' in found


async def test_defaults_of_a_model_apply() -> None:
    """A model's own sampling applies where the request does not name it, and is not listed."""
    engine = Echo()
    entries = [ModelEntry(engine, ("m",), defaults={"temperature": 0.5, "min_p": 0.1, "stop": "x"})]
    app = OpenAIAdapter(entries)
    async with client_of(app) as client:
        body = body_of()
        del body["temperature"]
        for given in (body, {**body, "temperature": 0}):
            reply = await client.post(PATH, json=given)
            assert reply.status_code == 200
            assert "x-latimer-ignored" not in reply.headers
    assert [job.sampling.temperature for job in engine.jobs] == [0.5, 0]
    assert [job.sampling.extras for job in engine.jobs] == [{"min_p": 0.1}] * 2
    await app.aclose()


async def test_sampling_reaches_the_engine() -> None:
    """`temperature`, `top_p`, `top_k` and the engines' own fields reach the engine."""
    engine = Echo()
    async with adapting(engine) as client:
        fields = {"temperature": 0.5, "top_p": 0.6, "top_k": 7, "min_p": 0.1, "seed": 3}
        reply = await client.post(PATH, json=body_of(**fields))
        assert reply.status_code == 200
    (job,) = engine.jobs
    assert (job.sampling.temperature, job.sampling.top_p) == (0.5, 0.6)
    assert job.sampling.extras == {"top_k": 7, "min_p": 0.1}
    assert job.seeds == (3,)


# A request of Claude Code 2.1.258, with every kind of field that it sends.
EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
SESSION = {"device_id": "d", "account_uuid": "a", "session_id": "s"}
CLAUDE_CODE = {
    "model": "claude-opus-4-8",
    "max_tokens": 32_000,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.258.abc;"},
        {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Hi</system-reminder>"},
            {"type": "text", "text": "Go", "cache_control": EPHEMERAL}]},
        {"role": "system", "content": "Available agent types: none."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "", "signature": "foreign"},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a"},
             "caller": {"type": "direct"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [
                {"type": "text", "text": "1\ta"}], "cache_control": EPHEMERAL}]},
    ],
    "tools": [
        {"name": "Read", "description": "Read a file.", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "properties": {"file_path": {"type": "string"}}, "required": ["file_path"],
            "additionalProperties": False}},
        {"name": "mcp__notes__list", "input_schema": {"type": "object", "properties": {}},
         "eager_input_streaming": True, "cache_control": EPHEMERAL},
    ],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": json.dumps(SESSION)},
    "safeguards": {"mode": "auto"},
}  # fmt: skip


async def test_a_request_of_claude_code_is_served() -> None:
    """A request of Claude Code is answered, and only what has no effect is listed."""
    engine = Echo()
    betas = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
    async with adapting(engine) as client:
        reply = await client.post(f"{PATH}?beta=true", json=CLAUDE_CODE, headers=betas)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-latimer-ignored"].split(", ") == [
            "messages.2.content.0", "output_config.effort", "safeguards", "thinking",
        ]  # fmt: skip
    assert "cc_version" not in str(engine.jobs[0].prompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": EPHEMERAL},
        {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
        {"cache_control": None, "service_tier": None, "inference_geo": None},
        {"metadata": {"user_id": None}},
        {"metadata": {"user_id": "u", "more": 1}},
        {"metadata": {"user_id": "{broken"}},
        {"metadata": None},
        {"service_tier": "standard_only", "inference_geo": "us"},
        {"stop_sequences": None, "tools": None, "tool_choice": None, "thinking": None},
        {"mcp_servers": [], "context_management": None},
        {"container": None, "speed": None, "fallbacks": None},
        {"tools": [{"name": "f", "input_schema": {
            "type": "object", "properties": None, "required": None}}]},
        {"messages": [user({"type": "text", "text": "Hi", "citations": None})]},
        {"temperature": 1, "top_p": 1},
    ],
)  # fmt: skip
async def test_what_has_no_effect_is_not_listed(fields: dict[str, Any]) -> None:
    """Fields that only matter at Anthropic, and explicit nulls, are accepted without a header."""
    async with adapting(Echo()) as client:
        reply = await client.post(PATH, json=body_of(**fields))
        assert reply.status_code == 200, reply.text
        assert "x-latimer-ignored" not in reply.headers


@pytest.mark.parametrize(
    ("fields", "listed"),
    [
        ({"speed": "fast", "container": "c"}, "container, speed"),
        ({"container": {"id": "c"}}, "container"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"thinking": {"block_binding": "x"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 4000},
         "thinking, thinking.budget_tokens"),
        ({"output_config": {"effort": "max", "task_budget": {}}},
         "output_config.effort, output_config.task_budget"),
        ({"messages": [{**user({"type": "text", "text": "Hi", "mood": 1}), "tone": 2}]},
         "messages.0.content.0.mood, messages.0.tone"),
    ],
)  # fmt: skip
async def test_what_has_no_effect_here_is_listed(fields: dict[str, Any], listed: str) -> None:
    """Unknown fields, and those that a model has no use for, are listed and never refused."""
    async with adapting(Echo()) as client:
        reply = await client.post(PATH, json=body_of(**fields))
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-latimer-ignored"] == listed


async def test_silence_in_a_message_has_pings() -> None:
    """A slow stream has nothing but comments before the message begins, and pings after that."""
    async with adapting(Echo("ab", pause=0.15), keepalive=0.025) as client:
        reply = await client.post(PATH, json=body_of(stream=True))
    before, begun, after = reply.text.partition("event: message_start")
    assert begun
    assert set(before.split("\n\n")) <= {": keep-alive", ""}
    # The first one follows the start of the block.
    assert after.count("event: ping") > 1
    assert ": keep-alive" not in after


async def test_a_client_that_leaves_ends_the_generation() -> None:
    """Closing a stream cancels its generation."""
    engine = Echo("x" * 1_000, pause=0.01)
    with serving(lambda: OpenAIAdapter(engine, any_model=True)) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            body = body_of(stream=True, max_tokens=1_000)
            async with client.stream("POST", PATH, json=body) as reply:
                async for line in reply.aiter_lines():
                    if "text_delta" in line:
                        break
        for _ in range(100):
            if not engine.running:
                break
            await asyncio.sleep(0.05)
        assert engine.running == 0


async def test_min_tokens_are_checked_as_in_chat(demo: httpx2.AsyncClient) -> None:
    """`min_tokens` is refused by its name above `max_tokens`, and with stop sequences."""
    reply = await demo.post(PATH, json=body_of(min_tokens=50, max_tokens=10))
    assert told(reply, 400, "invalid_request_error").startswith("min_tokens: 50 is more than")
    reply = await demo.post(PATH, json=body_of(min_tokens=5, stop_sequences=["x"]))
    message = told(reply, 400, "invalid_request_error")
    assert message.startswith("min_tokens: not supported together with 'stop_sequences'")


async def test_pdf_files_are_read() -> None:
    """The text of a PDF file is in the prompt and in the count, and a broken one is a 400."""

    def asking(data: bytes) -> dict[str, Any]:
        encoded = base64.b64encode(data).decode()
        source = {"type": "base64", "media_type": "application/pdf", "data": encoded}
        block = {"type": "document", "source": source, "title": "T"}
        return body_of(messages=[user(block, {"type": "text", "text": "Read."})])

    engine = Echo()
    async with adapting(engine) as client:
        body = asking(pdf("The sky is blue."))
        reply = await client.post(PATH, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-latimer-inexact"] == "messages.0.content.0"
        size = reply.json()["usage"]["input_tokens"]
        prompt = bytes(one for one in ids_of(engine.jobs[0]) if one < 256)
        assert b"Document 'T':\nThe sky is blue.\nRead." in prompt
        counted = await client.post(f"{PATH}/count_tokens", json=body)
        assert counted.json() == {"input_tokens": size}
        broken = await client.post(PATH, json=asking(b"%PDF-1.4 broken"))
        message = told(broken, 400, "invalid_request_error")
        assert message.startswith("messages.0.content.0.source.data: the PDF file cannot be read")
