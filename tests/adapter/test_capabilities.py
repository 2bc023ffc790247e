"""Where engines differ, the reply says so by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends.base import Backend
from support.recordings import DEMO_CHATML

BODY = {"model": "m", "prompt": DEMO_CHATML.format("Hello!"), "max_tokens": 3, "temperature": 0}
Ask = Callable[..., Any]


@pytest.fixture
def ask(apps: Callable[[str], Any], client_of: Any) -> Ask:
    """Send a completion to an engine."""

    async def send(engine: str, **fields: Any) -> httpx2.Response:
        async with client_of(apps(engine)) as client:
            reply: httpx2.Response = await client.post("/v1/completions", json={**BODY, **fields})
            return reply

    return send


@pytest.mark.parametrize(
    ("engine", "fields", "inexact"),
    [
        ("llama_cpp", {"presence_penalty": 0.5, "frequency_penalty": 0.5}, None),
        ("llama_server", {"presence_penalty": 0.5}, "presence_penalty"),
        ("llama_server", {"presence_penalty": 0.5, "frequency_penalty": 0.5},
         "frequency_penalty, presence_penalty"),
        ("llama_server", {"presence_penalty": 0.0}, None),
        ("llama_server", {"grammar": 'root ::= "Hello"'}, None),
        ("koboldcpp", {"presence_penalty": 0.5}, "presence_penalty"),
        ("koboldcpp", {"grammar": 'root ::= "Hello"'}, "grammar"),
        ("koboldcpp", {"frequency_penalty": 0}, None),
    ],
)  # fmt: skip
async def test_what_is_done_only_nearly_is_said(
    ask: Ask, engine: str, fields: dict[str, Any], inexact: str | None
) -> None:
    """`x-latimer-inexact` names the fields, only where they ask for something."""
    reply = await ask(engine, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-latimer-inexact") == inexact


@pytest.mark.parametrize(
    ("engine", "fields", "words"),
    [
        ("llama_cpp", {"grammar": "root ::= [a]"}, "Put a llama-server behind Latimer"),
        ("llama_cpp", {"dry_multiplier": 0.5}, "llama.cpp in process"),
        ("koboldcpp", {"frequency_penalty": 0.5}, "presence_penalty is the nearest"),
        ("koboldcpp", {"dynatemp_range": 0.5}, "not supported by koboldcpp"),
        ("koboldcpp", {"parse_special": False}, "always parses control tokens"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    ask: Ask, engine: str, fields: dict[str, Any], words: str
) -> None:
    """The error names the field and the engine, and says what would do it."""
    reply = await ask(engine, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == next(iter(fields))
    assert words in error["message"]


async def test_strict_refuses_what_is_done_only_nearly(
    make_backend: Callable[[str], Backend], client_of: Any
) -> None:
    """Under `strict` an approximation is an error."""
    backend = make_backend("llama_server")
    app = OpenAIAdapter(backend, any_model=True, strict=True)
    async with client_of(app) as client:
        reply = await client.post("/v1/completions", json={**BODY, "presence_penalty": 0.5})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "presence_penalty"
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    await app.aclose()


async def test_a_bad_grammar_is_the_clients_mistake(ask: Ask) -> None:
    """llama-server's parser says no, and the field is named."""
    reply = await ask("llama_server", grammar="root ::= (")
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "grammar"


@pytest.mark.parametrize("engine", ["llama_server", "koboldcpp"])
async def test_a_grammar_holds(ask: Ask, engine: str) -> None:
    """What the request's grammar says is what comes, on both engines that take one."""
    reply = await ask(engine, grammar='root ::= "Bonjour"', max_tokens=10)
    assert reply.json()["choices"][0]["text"] == "Bonjour"
