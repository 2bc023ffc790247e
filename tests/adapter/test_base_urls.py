"""Tests of what a client with a wrong base URL reads."""

from __future__ import annotations

from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from starlette.applications import Starlette
from starlette.routing import Mount
from support.clients import client_of
from support.engines.echo import Echo

OPENAI = (
    ". The base URL for clients of OpenAI's API ends in {}/v1: they add the path of an endpoint."
)
DOUBLED = ". This client adds /v1 itself: its base URL {}."
ANTHROPIC = ". The base URL for clients of Anthropic's API {}: they add /v1/messages."
OLLAMA = (
    ". This server does not have Ollama's API. Use a client of OpenAI's API, with a base URL that "
    "ends in {}/v1."
)
KOBOLDCPP = OLLAMA.replace("Ollama", "koboldcpp")
VERSION = {"anthropic-version": "2023-06-01"}


async def message_of(app: Any, method: str, path: str, **options: Any) -> str:
    """Return the message of a 404, without the place that was asked for."""
    async with client_of(app) as client:
        reply = await client.request(method, path, **options)
    assert reply.status_code == 404
    message: str = reply.json()["error"]["message"]
    start = f"Invalid URL ({method} {path})"
    assert message.startswith(start)
    return message.removeprefix(start)


@pytest.mark.parametrize("root", ["", "/ai"])
@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/v1/v1/messages", ANTHROPIC),
        ("POST", "/v1//v1/messages/count_tokens", ANTHROPIC),
        ("POST", "/v1/messages/v1/messages", ANTHROPIC),
        ("POST", "/v1/chat/completions/chat/completions", OPENAI),
        ("POST", "/v1/v1/chat/completions", DOUBLED),
        ("POST", "/v1/openai/v1/chat/completions", OPENAI),
        ("POST", "/api/v1/chat/completions/", OPENAI),
        ("GET", "/openai/models", OPENAI),
        ("GET", "/v1/v1/files/a", DOUBLED),
        ("POST", "/v1/completions/responses", OPENAI),
        ("POST", "/api/chat", OLLAMA),
        ("GET", "/api/tags", OLLAMA),
        ("POST", "/v1/api/embeddings", OLLAMA),
        ("POST", "/api/v1/generate", KOBOLDCPP),
        ("GET", "/api/extra/version", KOBOLDCPP),
        ("POST", "/v1/api/extra/generate/stream", KOBOLDCPP),
        ("GET", "/api/v1/model", KOBOLDCPP),
        ("GET", "/api/v1/models", OPENAI),
    ],
)
async def test_a_wrong_base_url_gets_the_right_one(
    root: str, method: str, path: str, advice: str
) -> None:
    """The 404 for the path of a wrong base URL names the right one, also in another app."""
    app: Any = OpenAIAdapter(Echo())
    if root:
        app = Starlette(routes=[Mount(root, app)])
    end = root
    if advice in (ANTHROPIC, DOUBLED):
        end = f"ends in {root}" if root else "has no path"
    assert await message_of(app, method, root + path) == advice.format(end)


@pytest.mark.parametrize("root", ["", "/ai"])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/v1/images/generations", "make images"),
        ("/sdapi/v1/txt2img", "make images"),
        ("/v1/images/edits", "make images"),
        ("/images/generations", "make images"),
        ("/v1/files", "store files. Send a file in a message"),
        ("/v1/files/a/content", "store files. Send a file in a message"),
        ("/v1/assistants", "have assistants. Use the Responses API"),
        ("/v1/fine_tuning/jobs", "train models"),
        ("/v1/batches", "run batches. Send the requests themselves"),
        ("/v1/moderations", "moderate texts"),
        ("/v1/vector_stores/", "have vector stores"),
        ("/v1/agents/sessions", "run agents. Use the Responses API"),
        ("/v1/decisions", "make decisions. Use an answer with a JSON schema"),
        ("/v1/skills", "have skills"),
    ],
)
async def test_a_missing_endpoint_of_openai_is_named(root: str, path: str, reason: str) -> None:
    """The 404 for an endpoint of OpenAI's that is not served says so, also in another app."""
    app: Any = OpenAIAdapter(Echo())
    if root:
        app = Starlette(routes=[Mount(root, app)])
    assert await message_of(app, "POST", root + path) == f". This server does not {reason}."


async def test_a_client_of_anthropic_is_known_by_its_header() -> None:
    """A path of both APIs gets the advice for the API of the client."""
    said = await message_of(OpenAIAdapter(Echo()), "GET", "/v1/v1/models", headers=VERSION)
    assert said == ANTHROPIC.format("has no path")


@pytest.mark.parametrize("path", ["/v1/nothing", "/api", "/api/chats", "/v1/chat", "/v1v1/a"])
async def test_other_paths_get_no_advice(path: str) -> None:
    """A path that no wrong base URL explains is only named."""
    assert await message_of(OpenAIAdapter(Echo()), "POST", path) == ""


async def test_a_root_path_that_a_proxy_strips_is_named() -> None:
    """The 404 of a mount whose root path is not in the path says how to set it."""
    inner = Starlette(routes=[Mount("/ai", OpenAIAdapter(Echo()))])

    async def proxied(scope: Any, receive: Any, send: Any) -> None:
        # FastAPI's `root_path` does the same.
        await inner({**scope, "root_path": "/proxy"}, receive, send)

    said = await message_of(proxied, "GET", "/ai/v1/models")
    assert said.startswith(". The path does not begin with the root path /proxy/ai.")
    async with client_of(proxied) as client:
        assert (await client.get("/proxy/ai/v1/models")).status_code == 200


async def test_the_advice_has_the_prefix_that_is_served() -> None:
    """The base URL has the prefix of the API, and Anthropic's clients get none without `/v1`."""
    app = OpenAIAdapter(Echo(), ("/llm",))
    said = await message_of(app, "POST", "/v1/chat/completions")
    assert said == OPENAI.format("").replace("/v1", "/llm")
    assert await message_of(app, "POST", "/v1/messages") == ""
    nested = OpenAIAdapter(Echo(), ("/llm/v1",))
    assert await message_of(nested, "POST", "/v1/messages") == ANTHROPIC.format("ends in /llm")
