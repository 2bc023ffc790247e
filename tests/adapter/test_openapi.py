"""Tests of the OpenAPI document: it is valid, and the server's replies are what it says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import urljoin

import httpx2
import orjson
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from latimer.adapter import OpenAIAdapter
from latimer.adapter.admission import SESSION_HEADERS
from latimer.adapter.openapi import OPERATIONS, REPLY_HEADERS, REQUEST_HEADERS, document, endpoints
from latimer.adapter.origins import EXPOSED
from latimer.adapter.routes import ROUTES, refuse
from latimer.backends.llama_cpp import LlamaCpp
from starlette.applications import Starlette
from starlette.routing import Mount
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.listener import Listener
from support.engines.speaker import Tone
from support.sounds import HELLO

CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
}
# Requests by method and path, with names in braces for the ids of earlier replies.
REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/chat/completions", CHAT),
    ("POST", "/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("POST", "/chat/completions", {**CHAT, "tools": [WEATHER], "tool_choice": "required"}),
    ("POST", "/completions", {"prompt": "Hello", "logprobs": 2, "echo": True, "max_tokens": 2}),
    ("POST", "/completions", {"prompt": ["a", "b"], "max_tokens": 1}),
    ("POST", "/chat/completions", {**CHAT, "store": True, "metadata": {"a": "b"}}),
    ("GET", "/chat/completions?metadata[a]=b", None),
    ("GET", "/chat/completions/{chatcmpl}", None),
    ("POST", "/chat/completions/{chatcmpl}", {"metadata": {"c": "d"}}),
    ("GET", "/chat/completions/{chatcmpl}/messages", None),
    ("DELETE", "/chat/completions/{chatcmpl}", None),
    ("POST", "/messages", {"model": "demo", "messages": CHAT["messages"], "max_tokens": 3}),
    ("POST", "/messages/count_tokens", {"model": "demo", "messages": CHAT["messages"]}),
    ("POST", "/responses", {"model": "demo", "input": "What is the capital of France?"}),
    ("GET", "/responses", None),
    ("GET", "/responses/{resp}", None),
    ("GET", "/responses/{resp}/input_items", None),
    ("DELETE", "/responses/{resp}", None),
    ("POST", "/responses", {"model": "demo", "input": "Hello", "background": True}),
    ("POST", "/responses/{resp}/cancel", {}),
    ("POST", "/responses/input_tokens", {"model": "demo", "input": "Hello"}),
    ("POST", "/conversations", {"items": [{"role": "user", "content": "Hello"}]}),
    ("GET", "/conversations/{conv}", None),
    ("POST", "/conversations/{conv}", {"metadata": {"a": "b"}}),
    ("POST", "/conversations/{conv}/items", {"items": [{"role": "user", "content": "Hi"}]}),
    ("GET", "/conversations/{conv}/items", None),
    ("GET", "/conversations/{conv}/items/{msg}", None),
    ("DELETE", "/conversations/{conv}/items/{msg}", None),
    ("DELETE", "/conversations/{conv}", None),
    ("POST", "/embeddings", {"input": ["Hello", "Hi"]}),
    ("GET", "/audio/voices", None),
    ("GET", "/models", None),
    ("GET", "/models/demo", None),
    ("GET", "/tokenizer_info", None),
    ("POST", "/tokenize", {"prompt": "Hello"}),
    ("POST", "/detokenize", {"tokens": [72]}),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/openapi.json", None),
)
# The demo model neither ranks nor hears; metrics are text, and speech is audio.
UNTRIED = {"create_speech", "create_transcription", "create_translation", "rerank", "metrics"}
LOGPROBS = {"include": ["message.output_text.logprobs"]}
CALLED = {"tools": [{"type": "function", **WEATHER["function"]}], "tool_choice": "required"}
STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/chat/completions", {**CHAT, "logprobs": True, "stream_options": {"include_usage": True}}),
    ("/completions", {"prompt": "Once upon", "logprobs": 1, "max_tokens": 3, "temperature": 0}),
    ("/responses", {"model": "demo", "input": "Hello", **LOGPROBS}),
    ("/responses", {"model": "demo", "input": "Hi", **CALLED}),
    ("/audio/speech", {"input": "Hi.", "voice": "anna", "stream_format": "sse"}),
)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return the document."""
    return document()


@pytest_asyncio.fixture(scope="module")
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """Serve the demo model."""
    app = OpenAIAdapter(LlamaCpp(embeddings=True), metrics=True, speaker=Tone())
    async with client_of(app) as found:
        yield found
    await app.aclose()


def errors_of(value: Any, schema: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a value of a schema of the document."""
    whole = {**schema, "components": found["components"]}
    return [error.message for error in Draft202012Validator(whole).iter_errors(value)]


def operation_of(found: Mapping[str, Any], method: str, path: str) -> Mapping[str, Any]:
    """Return the operation of a request, by its path without values."""
    path = path.partition("?")[0]
    parts = path.split("/")
    for template, item in found["paths"].items():
        pairs = zip(template.split("/"), parts, strict=False)
        is_same = template.count("/") == path.count("/")
        if is_same and all(a == b or (a[:1] == "{" and b[:1] == "{") for a, b in pairs):
            operation: Mapping[str, Any] = item[method.lower()]
            return operation
    raise AssertionError(path)


def test_a_validator_accepts_it(found: dict[str, Any]) -> None:
    """The document is valid OpenAPI 3.1."""
    from openapi_spec_validator import OpenAPIV31SpecValidator

    assert not [error.message for error in OpenAPIV31SpecValidator(found).iter_errors()]


def test_every_endpoint_is_described() -> None:
    """Each endpoint has a row in the table of operations, and no row is without an endpoint."""
    assert {endpoint.__name__ for *_, endpoint in endpoints()} == OPERATIONS.keys()


def test_every_path_is_in_it(found: dict[str, Any]) -> None:
    """The document has each path of the API, except those that are always refused."""
    served = {path for path, methods in ROUTES.items() if {*methods.values()} != {refuse}}
    paths = {path.replace(":path", "") for path in served}
    own = {"/health", "/ready", "/metrics", "/openapi.json"}
    assert found["paths"].keys() == paths | own
    assert found["info"]["version"] == version("latimer")


def test_headers_are_described() -> None:
    """All headers that pages of other origins can read are described, and those of sessions."""
    assert REPLY_HEADERS.keys() == {*EXPOSED, "openai-version"}
    assert REQUEST_HEADERS.keys() >= {name.decode() for name in SESSION_HEADERS}


async def test_replies_have_their_schemas(
    client: httpx2.AsyncClient, found: dict[str, Any]
) -> None:
    """The reply of each endpoint has the schema that the document says."""
    known: dict[str, str] = {}
    tried = set()
    for method, path, body in REQUESTS:
        operation = operation_of(found, method, path.replace("/models/demo", "/models/{name}"))
        tried.add(operation["operationId"])
        prefix = "" if path in ("/health", "/ready", "/openapi.json") else "/v1"
        url = prefix + path.format_map(known)
        reply = await client.request(method, url, **({} if body is None else {"json": body}))
        assert reply.status_code == 200, (url, reply.text)
        value = reply.json()
        schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert not errors_of(value, schema, found), url
        for one in (value, *(value.get("data") or ())):
            name = str(one.get("id", "")) if isinstance(one, dict) else ""
            # The id of a stored message is that of its chat completion and its number.
            if name.count("-") < 2:
                known[name.partition("_" if "_" in name else "-")[0]] = name
    names = {endpoint.__name__ for *_, endpoint in endpoints()}
    assert names - UNTRIED == tried


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_events_have_their_schemas(
    client: httpx2.AsyncClient, found: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    """The data of each event of a stream has the schema that the document says."""
    content = operation_of(found, "POST", path)["responses"]["200"]["content"]
    reply = await client.post(f"/v1{path}", json={**body, "stream": True})
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    assert len(lines) > 1
    for line in lines:
        value = orjson.loads(line)
        assert not errors_of(value, content["text/event-stream"]["schema"], found), line


@pytest.mark.parametrize("path", ["/audio/transcriptions", "/audio/translations"])
async def test_transcripts_have_their_schemas(found: dict[str, Any], path: str) -> None:
    """Plain transcripts and events have the schemas of the document."""
    content = operation_of(found, "POST", path)["responses"]["200"]["content"]
    words = {"timestamp_granularities[]": ["word", "segment"]}
    app = OpenAIAdapter(Echo(), any_model=True, transcriber=Listener())
    async with client_of(app) as client:

        async def send(**fields: Any) -> httpx2.Response:
            data = {"model": "m", **fields}
            reply: httpx2.Response = await client.post(path, data=data, files={"file": HELLO})
            assert reply.status_code == 200, reply.text
            return reply

        more = words if path.endswith("transcriptions") else {}
        for reply in (await send(), await send(response_format="verbose_json", **more)):
            assert not errors_of(reply.json(), content["application/json"]["schema"], found)
        for line in (await send(stream="true")).text.splitlines():
            if line.startswith("data: {"):
                value = orjson.loads(line[6:])
                assert not errors_of(value, content["text/event-stream"]["schema"], found)


async def test_an_error_has_its_schema(client: httpx2.AsyncClient, found: dict[str, Any]) -> None:
    """The body of an error has the schema of errors."""
    reply = await client.post("/v1/completions", json={"prompt": 5})
    error = found["components"]["responses"]["error"]["content"]["application/json"]["schema"]
    assert reply.status_code == 400
    assert not errors_of(reply.json(), error, found)


@pytest.mark.parametrize("prefix", ["", "/stripped"])
async def test_addresses_are_below_that_of_the_document(prefix: str) -> None:
    """Below a mount, and below a prefix that a proxy strips, addresses resolve to those of the app.

    The document of a mounted app needs the app's key.
    """
    adapter = OpenAIAdapter(Echo(), api_keys=["k"])
    app = Starlette(routes=[Mount("/ai", adapter)])
    async with client_of(app) as client:
        assert (await client.get("/ai/openapi.json")).status_code == 401
        reply = await client.get("/ai/openapi.json", headers={"authorization": "Bearer k"})
    found = reply.json()
    seen_at = f"http://host{prefix}/ai/openapi.json"
    for (server,), address in (
        (found["servers"], "v1"),
        (found["paths"]["/health"]["servers"], ""),
    ):
        assert urljoin(seen_at, server["url"]) == f"http://host{prefix}/ai/{address}"
    await adapter.aclose()


async def test_it_is_made_once(client: httpx2.AsyncClient) -> None:
    """Requests at the same time get the same document."""
    replies = await asyncio.gather(*(client.get("/openapi.json") for _ in range(4)))
    assert {reply.status_code for reply in replies} == {200}
    assert len({reply.content for reply in replies}) == 1
