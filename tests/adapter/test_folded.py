"""Conversations that a strict chat template rejects, on real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from latimer.backends.llama_cpp import LlamaCpp
from support import scripted
from support.clients import client_of
from support.strict_templates import ASKED, SILENT

SYSTEM = {"role": "system", "content": "Be brief."}
ASKS = {"role": "user", "content": "Capital of France?"}
REMINDER = {"role": "developer", "content": "Name the country, too."}
SAYS = {"role": "assistant", "content": "It is Paris."}


@pytest.fixture(scope="module", params=["llama_cpp", "llama_server"])
async def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Backend]:
    """Return an engine whose template accepts a system message at the head only."""
    folder, script = tmp_path_factory.mktemp("strict"), ("It is", " Paris", ".")
    async with scripted.scripted_engine(request.param, folder, script, ASKED) as backend:
        yield backend
        await backend.aclose()


async def ask(backend: Backend, *messages: Any, strict: bool = False) -> httpx2.Response:
    """Return the response to a conversation."""
    app = OpenAIAdapter(backend, any_model=True, strict=strict)
    async with client_of(app) as client:
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 20}
        return await client.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize(
    "messages",
    [
        (SYSTEM, REMINDER, ASKS),
        (SYSTEM, ASKS, SAYS, REMINDER, ASKS),
        (SYSTEM, ASKS, SAYS, ASKS, REMINDER),
        (SYSTEM,),
    ],
    ids=["two", "in between", "last", "alone"],
)
async def test_messages_in_an_order_that_the_template_rejects(
    backend: Backend, messages: tuple[Any, ...]
) -> None:
    """Folded messages set `x-latimer-inexact`; under `strict` they are rejected with 400."""
    reply = await ask(backend, *messages)
    assert reply.json()["choices"][0]["message"]["content"] == "It is Paris."
    assert reply.headers["x-latimer-inexact"] == "messages"
    refused = await ask(backend, *messages, strict=True)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("messages", "invalid_value")
    assert "is strict" in error["message"]


async def test_messages_in_the_order_of_the_template(backend: Backend) -> None:
    """Messages that the template accepts set no header, also under `strict`."""
    reply = await ask(backend, SYSTEM, ASKS, SAYS, ASKS, strict=True)
    assert reply.status_code == 200
    assert "x-latimer-inexact" not in reply.headers


async def test_a_reminder_keeps_the_prompt_cache(backend: Backend) -> None:
    """After a later system message, the engine evaluates new messages only."""
    before = await ask(backend, SYSTEM, ASKS, REMINDER)
    after = await ask(backend, SYSTEM, ASKS, REMINDER, SAYS, ASKS, REMINDER)
    evaluated = before.json()["usage"]["prompt_tokens"]
    cached = after.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The beginning of the assistant's turn is part of both prompts.
    assert cached >= evaluated - 1


async def test_a_template_that_samples_do_not_show(tmp_path: Path) -> None:
    """If the template rejects messages that no sample covers, all foldings are applied."""
    late = "{% for m in messages %}{% if m.role == 'system' and loop.index > 9 %}"
    late += "{{ raise_exception('Too late.') }}{% endif %}{% endfor %}" + scripted.CHATML
    backend = LlamaCpp(scripted.scripted(tmp_path / "late.gguf", ("It is", " Paris", "."), late))
    early = await ask(backend, SYSTEM, ASKS, SAYS, REMINDER, ASKS)
    assert "x-latimer-inexact" not in early.headers
    long = (SYSTEM, *[ASKS, SAYS] * 4, ASKS, REMINDER)
    reply = await ask(backend, *long)
    assert reply.json()["choices"][0]["message"]["content"] == "It is Paris."
    assert reply.headers["x-latimer-inexact"] == "messages"
    assert (await ask(backend, *long, strict=True)).status_code == 400
    await backend.aclose()


async def test_content_that_the_template_omits(tmp_path: Path) -> None:
    """Content with a call is in the prompt of a template that omits it, and the header says so."""
    path = scripted.scripted(tmp_path / "silent.gguf", ("It is", " Paris", "."), SILENT)
    backend = LlamaCpp(path)
    function = {"name": "look", "arguments": "{}"}
    call = {"id": "call_1", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Paris"}
    counts = []
    for content in (None, "I will look at a map."):
        called = {"role": "assistant", "content": content, "tool_calls": [call]}
        reply = await ask(backend, ASKS, called, result, ASKS)
        counts.append(reply.json()["usage"]["prompt_tokens"])
        assert reply.headers.get("x-latimer-inexact") == ("messages" if content else None)
        strict = await ask(backend, ASKS, called, result, ASKS, strict=True)
        assert strict.status_code == (400 if content else 200)
    assert counts[1] > counts[0] + 5
    await backend.aclose()
