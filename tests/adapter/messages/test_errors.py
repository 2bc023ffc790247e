"""Tests of Anthropic's error object: status, type, words and headers (contract, 1 and 11.1)."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest
from latimer.adapter.endpoints import common
from latimer.adapter.errors import InvalidRequest, RateLimited, ShuttingDown, UnknownModel
from latimer.adapter.messages.errors import anthropic_error, dotted, in_messages
from latimer.backends.base import Piece, TokenIds
from latimer.backends.errors import (
    Busy,
    ContextExceeded,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    UnreadableMedia,
    Unsupported,
)
from latimer.backends.llama_cpp import LlamaCpp
from support.clients import adapting
from support.engines.echo import Echo

from .requests import PATH, TOOL, body_of, image, text, user

SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search"}
TAGS = (
    "found using 'type' does not match any of the expected tags: 'custom', 'bash_20250124', "
    "'text_editor_20250124', 'text_editor_20250429', 'text_editor_20250728', 'memory_20250818'"
)
BUDGET = "thinking.enabled.budget_tokens"
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


def told(reply: httpx2.Response, status: int, kind: str) -> str:
    """Return the message of an error, after checks of its form."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert [*body] == ["type", "error", "request_id"]
    assert reply.headers["request-id"] == body["request_id"]
    assert re.fullmatch("req_[0-9a-zA-Z]{20,}", body["request_id"])
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    message: str = body["error"]["message"]
    return message


CASES: list[tuple[dict[str, Any], str]] = [
    ({"model": 5}, "model: Input should be a valid string"),
    ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
    ({"max_tokens": "5"}, "max_tokens: Input should be a valid integer"),
    ({"temperature": 1.5}, "temperature: Input should be less than or equal to 1"),
    ({"top_p": -1}, "top_p: Input should be greater than or equal to 0"),
    ({"messages": []}, "messages: at least one message is required"),
    ({"messages": [{"role": "tool", "content": "a"}]},
     "messages.0.role: Input should be 'user', 'assistant' or 'system'"),
    ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
    ({"messages": [user(text("a"), {"type": "image"})]},
     "messages.0.content.1.source: Field required"),
    ({"messages": [user({"type": "tool_use", "id": "t", "name": "f", "input": "x"})]},
     "messages.0.content.0.input: Input should be a valid dictionary"),
    ({"system": [{"type": "image"}]}, "system.0.text: Field required"),
    ({"stop_sequences": [""]}, "stop_sequences: each stop sequence must be non-empty"),
    ({"stop_sequences": "x"}, "stop_sequences: Input should be a valid list"),
    ({"stop_sequences": ["x"] * 500},
     "stop_sequences: at most 128 items are allowed, not 500"),
    ({"messages": [user("x")] * 100_001}, "messages: at most 100000 items are allowed, not 100001"),
    ({"tools": [{"type": "x_1", "name": "x"}]}, f"tools.0: Input tag 'x_1' {TAGS}"),
    ({"tools": [TOOL, {"type": "computer_20250124", "name": "computer"}]},
     f"tools.1: Input tag 'computer_20250124' {TAGS}"),
    ({"tools": [SERVER_TOOL]}, f"tools.0: Input tag 'web_search_20250305' {TAGS}"),
    ({"tools": [TOOL, SERVER_TOOL], "tool_choice": {"type": "tool", "name": "web_search"}},
     f"tools.1: Input tag 'web_search_20250305' {TAGS}"),
    ({"tools": [TOOL, SERVER_TOOL, TOOL]}, "tools: Tool names must be unique."),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
     "tools.0.input_schema: Invalid schema for function 'f': schema must be a JSON Schema of "
     "'type: \"object\"', got 'type: \"string\"'."),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
     "tool_choice: Tool 'g' not found in provided tools"),
    ({"tool_choice": {"type": "any"}},
     "tool_choice: `tool_choice` may only be specified with `tools`"),
    ({"thinking": {"type": "enabled"}}, f"{BUDGET}: Field required"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1}},
     f"{BUDGET}: Input should be greater than or equal to 1024"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}},
     "`max_tokens` must be greater than `thinking.budget_tokens`"),
    ({"mcp_servers": [{"type": "url"}]},
     "mcp_servers: not supported. This server calls no MCP servers. Omit it."),
    ({"output_format": FORMAT, "output_config": {"format": FORMAT}},
     "output_format: 'output_config.format' is set already. Omit one of them."),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
     "output_config.format.schema: Invalid schema: "),
    ({"messages": [user(image())]},
     "messages.0.content.0.type: not supported by echo. The loaded model does not support "
     "images."),
    ({"logit_bias": {"x": 1}}, "logit_bias: Invalid key in 'logit_bias': x. "),
    ({"service_tier": 5}, "service_tier: Input should be 'auto' or 'standard_only'"),
    ({"service_tier": "fast"}, "service_tier: Input should be 'auto' or 'standard_only'"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id: Input should be a valid string"),
    ({"container": 3}, "container: Input should be a valid string"),
    ({"inference_geo": 5}, "inference_geo: Input should be a valid string"),
    ({"mcp_servers": 0}, "mcp_servers: Input should be a valid list"),
    ({"context_management": []}, "context_management: Input should be a valid dictionary"),
    ({"cache_control": {}}, "cache_control.type: Field required"),
    ({"cache_control": {"type": "ephemeral", "ttl": 5}},
     "cache_control.ttl: Input should be a valid string"),
    ({"messages": [user({**text("a"), "cache_control": {"type": "x"}})]},
     "messages.0.content.0.cache_control.type: Input should be 'ephemeral'"),
    ({"tools": [{**TOOL, "cache_control": {"type": "x"}}]},
     "tools.0.cache_control.type: Input should be 'ephemeral'"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["metadata", "cache_control", "output_config"])
async def test_an_object_has_no_other_type(echo: httpx2.AsyncClient, name: str) -> None:
    """The error for a text in place of an object is Anthropic's, without a class of Python."""
    reply = await echo.post(PATH, json=body_of(**{name: "x"}))
    found = told(reply, 400, "invalid_request_error")
    assert found == f"{name}: Input should be a valid dictionary"


@pytest.mark.parametrize(("fields", "message"), CASES, ids=[message for _, message in CASES])
async def test_an_invalid_request_is_refused(
    echo: httpx2.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    """An invalid request is a 400 whose message begins with the path of the field."""
    found = told(await echo.post(PATH, json=body_of(**fields)), 400, "invalid_request_error")
    assert found.startswith(message)


@pytest.mark.parametrize("body", ["{", "[]", "[" * 200])
async def test_a_body_that_is_no_object_is_refused(echo: httpx2.AsyncClient, body: str) -> None:
    """The words for a body that is not a JSON object name no other API."""
    found = told(await echo.post(PATH, content=body), 400, "invalid_request_error")
    assert found.startswith("The request body is not a valid JSON object. The ")


@pytest.mark.parametrize("name", ["model", "max_tokens", "messages"])
async def test_a_missing_field_is_named(echo: httpx2.AsyncClient, name: str) -> None:
    """Each required field is named if it is missing; a count needs no `max_tokens`."""
    body = {key: value for key, value in body_of().items() if key != name}
    found = told(await echo.post(PATH, json=body), 400, "invalid_request_error")
    assert found == f"{name}: Field required"
    counted = await echo.post(f"{PATH}/count_tokens", json=body)
    assert counted.status_code == (200 if name == "max_tokens" else 400)


async def test_a_thread_is_refused_with_the_code_that_the_sdk_reads(
    echo: httpx2.AsyncClient,
) -> None:
    """A thread is refused with details, after which the SDK sends whole conversations."""
    reply = await echo.post(PATH, json=body_of(thread={"type": "create"}))
    told(reply, 400, "invalid_request_error")
    assert reply.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/batches/b/results", 404, "not_found_error"),
        ("GET", "/messages/nothing", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
async def test_other_paths_have_anthropics_errors(
    echo: httpx2.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    """Errors of all paths below `/messages` are Anthropic's."""
    told(await echo.request(method, path), status, kind)


async def test_the_version_header_decides_on_shared_paths(echo: httpx2.AsyncClient) -> None:
    """A client that sends Anthropic's version gets its errors on every path, others OpenAI's."""
    version = {"anthropic-version": "2023-06-01"}
    told(await echo.post("/v1/files", headers=version), 404, "not_found_error")
    plain = await echo.post("/v1/files")
    assert "type" not in plain.json()
    assert "request-id" not in plain.headers
    stored = await echo.get("/v1/chat/completions/chatcmpl-1/messages")
    assert stored.json()["error"]["code"] is None


async def test_bodies_that_are_not_requests(echo: httpx2.AsyncClient) -> None:
    """A body that is not JSON, or too large, has Anthropic's error, too."""
    told(await echo.post(PATH, content=b"{"), 400, "invalid_request_error")
    told(await echo.post(PATH, json=[]), 400, "invalid_request_error")
    async with adapting(Echo(), max_body=100) as client:
        reply = await client.post(PATH, json=body_of(system="x" * 200))
        told(reply, 413, "request_too_large")


async def test_either_header_has_the_key() -> None:
    """A key is read from `x-api-key` or `Authorization`; one valid key is enough."""
    async with adapting(Echo(), api_keys=["k1", "k2"]) as client:

        async def status(**headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            reply = await client.post(PATH, json=body_of(), headers=named)
            if reply.status_code != 200:
                assert told(reply, 401, "authentication_error") == "invalid x-api-key"
            return reply.status_code

        assert await status(x_api_key="k1") == 200
        assert await status(authorization="Bearer k2") == 200
        assert await status(x_api_key="no", authorization="Bearer k1") == 200
        assert await status(x_api_key="k1", authorization="Bearer no") == 200
        assert await status(x_api_key="k1", authorization="Basic no") == 200
        assert await status(x_api_key="no", authorization="Bearer no") == 401
        assert await status() == 401
        chat = {"model": "m", "messages": [user("Hi")]}
        reply = await client.post("/v1/chat/completions", json=chat, headers={"x-api-key": "k1"})
        assert reply.status_code == 200
        reply = await client.post("/v1/chat/completions", json=chat, headers={"x-api-key": "no"})
        assert reply.json()["error"]["code"] == "invalid_api_key"


async def test_an_unknown_model_is_not_found() -> None:
    """A model that is not served is a 404 whose message names it."""
    async with adapting(Echo(), any_model=False, model_names=["demo"]) as client:
        for path in (PATH, f"{PATH}/count_tokens"):
            reply = await client.post(path, json=body_of(model="claude-x"))
            assert told(reply, 404, "not_found_error") == "model: claude-x"


LIMIT = RateLimited("m", "team", "requests per min (RPM)", 1, 1, 1, 0.5)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("No."), 400, "invalid_request_error"),
        (InvalidRequest("No.", status=403), 403, "permission_error"),
        (UnknownModel("m", ""), 404, "not_found_error"),
        (LIMIT, 429, "rate_limit_error"),
        (Busy("Busy.", 2.5), 529, "overloaded_error"),
        (EngineUnavailable("Gone."), 529, "overloaded_error"),
        (ShuttingDown(), 529, "overloaded_error"),
        (EngineError("Broken."), 500, "api_error"),
        (EngineSilent("Silent."), 504, "timeout_error"),
    ],
)
def test_the_types_of_errors(error: LatimerError, status: int, kind: str) -> None:
    """Each error has Anthropic's status and type, and whole seconds in `retry-after`."""
    found, body, headers = anthropic_error(error, "req_1")
    assert (found, body["error"]["type"]) == (status, kind)
    waits = dict(headers).get(b"retry-after")
    assert (waits is not None) == (error.retry_after is not None)
    assert waits is None or waits.isdigit()


def test_a_prompt_that_is_too_long_has_the_words_that_claude_code_reads() -> None:
    """A prompt beyond the context, or one that fills it, is an error in Anthropic's words."""
    for count, most in ((5000, 4096), (4097, 4096), (4096, 4095)):
        found = in_messages(ContextExceeded(4096, count, 100))
        assert str(found) == f"prompt is too long: {count} tokens > {most} maximum"
    found = in_messages(ContextExceeded(4096, 4000, 100))
    assert str(found) == "input length and `max_tokens` exceed context limit: 4000 + 100 > 4096"


@pytest.mark.parametrize("words", [1_000, 3_000, 100_000])
async def test_a_very_long_prompt_has_its_true_number_of_tokens(
    make_backend: Any, words: int
) -> None:
    """The error of a prompt beyond the context has the number of `count_tokens`, at any length."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello world " * words}]}
    async with adapting(make_backend("llama_cpp")) as client:
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        reply = await client.post("/v1/messages", json={**body, "max_tokens": 1})
    wanted = f"prompt is too long: {counted['input_tokens']} tokens > 2048 maximum"
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, wanted)


async def test_the_tokens_of_a_hopeless_prompt_are_estimated(
    make_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is far too long is tokenized in part, and the error has about its number."""
    content = "hello world " * 20_000 + "0123456789" * 10_000 + "\n" * 60_000
    body = {"model": "m", "messages": [user(content)]}
    backend = make_backend("llama_cpp")
    read: list[int] = []

    async def tokenize(text: str, **flags: bool) -> TokenIds:
        read.append(len(text))
        return await LlamaCpp.tokenize(backend, text, **flags)

    async with adapting(backend) as client:
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        monkeypatch.setattr(backend, "tokenize", tokenize)
        monkeypatch.setattr(common, "SAMPLE", 40_000)
        reply = await client.post(PATH, json={**body, "max_tokens": 1})
    assert read == [40_000]
    message = told(reply, 400, "invalid_request_error")
    found = re.fullmatch(r"prompt is too long: (\d+) tokens > 2048 maximum", message)
    assert found is not None
    assert int(found[1]) == pytest.approx(counted["input_tokens"], rel=0.05)


async def test_a_long_prompt_that_may_fit_is_counted(
    make_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text whose sample fits is tokenized as a whole, because its tokens may be long ones."""
    monkeypatch.setattr(common, "SAMPLE", 100)
    monkeypatch.setattr(common, "_FITS", 1)
    async with adapting(make_backend("llama_cpp")) as client:
        body = {"model": "m", "messages": [user("hello world " * 2_000)]}
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        reply = await client.post(PATH, json={**body, "max_tokens": 1})
    wanted = f"prompt is too long: {counted['input_tokens']} tokens > 2048 maximum"
    assert told(reply, 400, "invalid_request_error") == wanted


def test_fields_of_chat_have_their_names_here() -> None:
    """An error about a field of chat names the field of the request."""
    names = {"messages[1].content[2].image_url.url": "messages[0].content[3].source"}
    error = in_messages(UnreadableMedia("messages[1].content[2].image_url.url"), names)
    assert anthropic_error(error, "r")[1]["error"]["message"].startswith(
        "messages.0.content.3.source: the file cannot be read."
    )
    error = in_messages(Unsupported("response_format", "koboldcpp", "Omit it."))
    assert anthropic_error(error, "r")[1]["error"]["message"] == (
        "output_config.format: not supported by koboldcpp. Omit it."
    )
    assert dotted("tools[3].parameters.properties") == "tools.3.input_schema.properties"


async def test_errors_before_and_after_the_message_begins() -> None:
    """An engine that fails before the first event is a status, and later an event of the stream."""
    async with adapting(Echo(error=EngineError("Broken."))) as client:
        for stream in (False, True):
            reply = await client.post(PATH, json=body_of(stream=stream))
            assert told(reply, 500, "api_error") == "Broken."
    async with adapting(Echo([[Piece(0, b"Hi")]])) as client:
        reply = await client.post(PATH, json=body_of(stream=True))
        *_, last = reply.text.removesuffix("\n\n").split("\n\n")
        assert last == (
            'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"The '
            'engine ended its response before every choice was finished."}}'
        )
        assert "message_stop" not in reply.text


async def test_a_strict_server_refuses_what_others_list() -> None:
    """Unknown and inert fields are errors under `strict`."""
    async with adapting(Echo(), strict=True) as client:
        for fields in (
            {"speed": "fast"},
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            {"tools": [TOOL, SERVER_TOOL]},
            {"seed": 1},
        ):
            told(await client.post(PATH, json=body_of(**fields)), 400, "invalid_request_error")
        assert (await client.post(PATH, json=body_of())).status_code == 200


async def test_probes_need_no_key() -> None:
    """The paths that Claude Code probes answer `HEAD` without a key, and `GET` as before."""
    async with adapting(Echo(), api_keys=["k"]) as client:
        for path in ("/", "/api/hello"):
            assert (await client.head(path)).status_code == 200
            assert (await client.get(path)).status_code == 404
