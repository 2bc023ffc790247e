"""Tests of `POST /v1/responses`: objects and streams over every engine, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.errors import EngineError
from latimer.conformance.published import first_wrong
from openai.types.responses import Response
from support import scripted
from support.clients import adapting
from support.engines.echo import Slow
from support.response_events import (
    CALL,
    CUSTOM,
    HEAD,
    NO_TEXT,
    TEXT,
    THOUGHT,
    events_in,
    order_of,
    steady,
)
from support.servers import serving

R = "/v1/responses"
ASK = {"model": "demo", "input": "Count to 5.", "temperature": 0}
# Section 3 of the contract.
KEYS = {
    "id", "object", "created_at", "status", "background", "completed_at", "error",
    "frequency_penalty", "incomplete_details", "instructions", "max_output_tokens",
    "max_tool_calls", "model", "output", "parallel_tool_calls", "presence_penalty",
    "previous_response_id", "prompt_cache_key", "prompt_cache_retention", "reasoning",
    "safety_identifier", "service_tier", "store", "temperature", "text", "tool_choice", "tools",
    "top_logprobs", "top_p", "truncation", "usage", "user", "metadata",
}  # fmt: skip
TAGS = ("<think>", "</think>")
CALL_TAGS = ("<tool_call>", "</tool_call>")
THOUGHTS = ("Let me", " see.", "</think>", "\n\n")
WORDS = tuple(f" w{number}" for number in range(40))
ANSWER = ("It is", " Paris", ".")
NAMED = ("<tool_call>", '{"name": "f", ', '"arguments": {"a": 5}', "}", "</tool_call>")
GIVEN = (
    "<tool_call>",
    '{"name": "p", ',
    '"arguments": {"input": "a',
    '\\nb"}',
    "}",
    "</tool_call>",
)
FUNCTION = {
    "type": "function", "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                   "additionalProperties": False},
}  # fmt: skip
CUSTOM_TOOL = {"type": "custom", "name": "p"}

Ask = Callable[..., Any]


def asker(client: httpx2.AsyncClient) -> Ask:
    """Return a function that makes a valid response, streamed and plain, and compares both."""

    async def ask(**body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        full = {**ASK, **body}
        plain = await client.post(R, json=full)
        assert plain.status_code == 200, plain.text
        reply: dict[str, Any] = plain.json()
        assert first_wrong(Response, reply) is None
        assert reply.keys() == KEYS
        streamed = await client.post(R, json={**full, "stream": True})
        events = events_in(streamed.text)
        assert steady(events[-1]["response"]) == steady(reply)
        for event in events[:2]:
            assert event["response"].keys() == KEYS
            assert (event["response"]["output"], event["response"]["usage"]) == ([], None)
        return reply, events

    return ask


@pytest.fixture(params=["llama_cpp", "llama_server", "koboldcpp"])
def scripting(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a factory of `asker` for an engine that generates a script."""

    @asynccontextmanager
    async def make(script: Sequence[str], template: str, **options: Any) -> AsyncIterator[Ask]:
        marks = [one for one in script if one in (*TAGS, *CALL_TAGS)]
        engine = scripted.scripted_engine(request.param, tmp_path, script, template, marks)
        async with engine as backend, adapting(backend, **options) as client:
            yield asker(client)

    return make


async def test_a_request_is_echoed(echo: httpx2.AsyncClient) -> None:
    """The response has the values that were used, and defaults for the rest."""
    ask = asker(echo)
    reply, _ = await ask()
    assert {key: reply[key] for key in KEYS} | {
        "id": "", "created_at": 0, "completed_at": 0, "output": [], "usage": {}
    } == {
        "id": "", "object": "response", "created_at": 0, "status": "completed",
        "background": False, "completed_at": 0, "error": None, "frequency_penalty": 0.0,
        "incomplete_details": None, "instructions": None, "max_output_tokens": None,
        "max_tool_calls": None, "model": "demo", "output": [], "parallel_tool_calls": True,
        "presence_penalty": 0.0, "previous_response_id": None, "prompt_cache_key": None,
        "prompt_cache_retention": None, "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None, "service_tier": "default", "store": reply["store"],
        "temperature": 0.0, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0,
        "truncation": "disabled", "usage": {}, "user": None, "metadata": {},
    }  # fmt: skip
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    sent = {
        "instructions": "Be short.", "max_output_tokens": 20, "top_p": 0.5, "temperature": 1,
        "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
        "prompt_cache_retention": "24h", "parallel_tool_calls": False, "max_tool_calls": 3,
        "presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 1, "truncation": "disabled",
    }  # fmt: skip
    full = {
        **sent,
        "service_tier": "fast",
        "text": {"format": form},
        "reasoning": {"effort": "low"},
    }
    reply = (await echo.post(R, json={**ASK, **full})).json()
    assert first_wrong(Response, reply) is None
    del sent["seed"]
    assert {key: reply[key] for key in sent} == sent
    assert reply["service_tier"] == "priority"
    assert reply["text"]["format"] == {**form, "description": None}
    assert reply["reasoning"] == {"effort": "low", "summary": None}


async def test_reasoning_before_a_text(scripting: Any) -> None:
    """Reasoning is an item of its own, before the message."""
    async with scripting((*THOUGHTS, *ANSWER), scripted.THINKING) as ask:
        reply, events = await ask()
        assert order_of(events) == [*HEAD, *THOUGHT, *TEXT, "completed"]
        thought, message = reply["output"]
        assert thought["summary"] == []
        assert thought["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
        assert message["content"][0]["text"] == "It is Paris."
        assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_summary_of_the_reasoning(scripting: Any) -> None:
    """A summary is the reasoning itself, with events of its own in the stream."""
    async with scripting((*THOUGHTS, *ANSWER), scripted.THINKING) as ask:
        reply, events = await ask(reasoning={"summary": "auto"})
        thought = reply["output"][0]
        assert thought["summary"] == [{"type": "summary_text", "text": "Let me see."}]
        names = order_of(events)[2:]
        kind = "reasoning_summary"
        assert names[2:5] == [f"{kind}_part.added", "reasoning_text.delta", f"{kind}_text.delta"]
        end = names.index("output_item.done")
        assert names[end - 2 : end] == [f"{kind}_text.done", f"{kind}_part.done"]


async def test_reasoning_can_be_omitted(scripting: Any) -> None:
    """With `reasoning_field` None, the reasoning is in no item and no event."""
    script = (*THOUGHTS, *ANSWER)
    async with scripting(script, scripted.THINKING, reasoning_field=None) as ask:
        reply, events = await ask(reasoning={"summary": "auto"})
        assert order_of(events) == [*HEAD, *TEXT, "completed"]
        assert [item["type"] for item in reply["output"]] == ["message"]


async def test_reasoning_then_a_call(scripting: Any) -> None:
    """A call follows the reasoning without a message between them."""
    template = scripted.HERMES + "{# <think> </think> #}"
    script = ("<think>", *THOUGHTS, *NAMED)
    async with scripting(script, template) as ask:
        reply, events = await ask(tools=[FUNCTION])
        assert order_of(events) == [*HEAD, *THOUGHT, *CALL, "completed"]
        call = reply["output"][1]
        assert (call["type"], call["name"], call["status"]) == ("function_call", "f", "completed")
        assert call["arguments"].replace(" ", "") == '{"a":5}'
        assert call["id"].startswith("fc_")
        assert call["call_id"].startswith("call_")
        tools = [{**FUNCTION, "description": None, "strict": True}]
        assert reply["tools"] == events[0]["response"]["tools"] == tools


async def test_a_custom_call(scripting: Any) -> None:
    """The call of a custom tool has the text of its input, without the JSON around it."""
    async with scripting(GIVEN, scripted.HERMES) as ask:
        reply, events = await ask(tools=[CUSTOM_TOOL])
        assert order_of(events) == [*HEAD, *CUSTOM, "completed"]
        call = reply["output"][0]
        assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "p", "a\nb")


async def test_a_limit_within_the_reasoning(scripting: Any) -> None:
    """Reasoning that the limit cuts off is the only item, and it is incomplete."""
    async with scripting((*WORDS, *THOUGHTS), scripted.THINKING) as ask:
        reply, events = await ask(max_output_tokens=16)
        assert order_of(events) == [*HEAD, *THOUGHT, "incomplete"]
        assert [(one["type"], one["status"]) for one in reply["output"]] == [
            ("reasoning", "incomplete")
        ]


async def test_no_answer_after_the_reasoning(scripting: Any) -> None:
    """A model that only reasons gives an empty message after the reasoning."""
    async with scripting(THOUGHTS, scripted.THINKING) as ask:
        reply, events = await ask()
        assert order_of(events) == [*HEAD, *THOUGHT, *NO_TEXT, "completed"]
        assert reply["output"][1]["content"][0]["text"] == ""


async def test_an_error_in_mid_stream() -> None:
    """An engine's error is an event, and the response that failed is the last one."""
    app = OpenAIAdapter(Slow(error=EngineError("lost power")), any_model=True)
    with serving(lambda: app) as address:
        async with httpx2.AsyncClient(base_url=address) as client:
            reply = await client.post(R, json={**ASK, "stream": True})
            events = events_in(reply.text)
            *start, error, failed = order_of(events)
            assert start == [*HEAD, *TEXT[:3]]
            assert (error, failed) == ("error", "failed")
            facts = {"code": "engine_error", "message": "lost power", "param": None}
            assert events[-2]["error"] == {"type": "server_error", **facts}
            assert events[-1]["response"]["error"] == {
                "code": "server_error", "message": "lost power",
            }  # fmt: skip
            plain = await client.post(R, json=ASK)
            assert (plain.status_code, plain.json()["error"]["code"]) == (502, "engine_error")


async def test_a_shutdown_in_mid_stream() -> None:
    """The end of the server is an event, too, and the response failed."""
    app = OpenAIAdapter(Slow(), any_model=True)
    sent: list[bytes] = []
    body = b'{"model": "m", "input": "x", "stream": true}'
    arrived = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not arrived.is_set():
            arrived.set()
            return {"type": "http.request", "body": body}
        await asyncio.sleep(3600)
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": R, "headers": [], "query_string": b""}
    request = asyncio.ensure_future(app(scope, receive, send))
    while len(sent) < 2:
        await asyncio.sleep(0.01)
    app.end()
    request.cancel()
    await request
    events = events_in(b"".join(sent).decode())
    assert order_of(events)[-2:] == ["error", "failed"]
    assert events[-2]["code"] == "server_shutting_down"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "moderation": ({"moderation": {"model": "m"}}, "moderation"),
    "prompt": ({"prompt": {"id": "p"}}, "prompt"),
    "native": ({"oai_compat": False}, "oai_compat"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [True, False])
async def test_refused_fields(echo: httpx2.AsyncClient, name: str, stream: bool) -> None:
    """A field that is not served is rejected by name, before a stream begins."""
    changes, param = REFUSED[name]
    reply = await echo.post(R, json={**ASK, "stream": stream, **changes})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


async def test_fields_without_effect_are_listed(echo: httpx2.AsyncClient) -> None:
    """Fields without effect are listed in a header, and the response is made."""
    changes = {
        "client_metadata": {"a": 1}, "context_management": [], "image": {},
        "text": {"verbosity": "low"}, "reasoning": {"context": "all_turns", "mode": "standard"},
        "prompt_cache_options": {"prewarm": True, "comparison_response_id": "resp_1"},
    }  # fmt: skip
    reply = await echo.post(R, json={**ASK, **changes})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-latimer-ignored"].split(", ") == [
        "client_metadata", "context_management", "image",
        "prompt_cache_options.comparison_response_id", "prompt_cache_options.prewarm",
        "reasoning.context", "text.verbosity",
    ]  # fmt: skip
    assert reply.json()["text"]["verbosity"] == "low"


async def test_refused_routes(echo: httpx2.AsyncClient) -> None:
    """A route that is not served is a 404 that names it."""
    reply = await echo.post("/v1/responses/compact", json={})
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["message"] == "This server does not serve POST /v1/responses/compact."
    assert (error["param"], error["code"]) == (None, "unsupported_endpoint")
