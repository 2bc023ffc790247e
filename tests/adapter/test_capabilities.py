"""Tests that responses name the fields which an engine does not support exactly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from latimer.backends.base import Backend
from support.clients import adapting
from support.engines.echo import Echo
from support.recordings import DEMO_CHATML

BODY = {"model": "m", "prompt": DEMO_CHATML.format("Hello!"), "max_tokens": 3, "temperature": 0}
HELLO = {"role": "user", "content": "Hello!"}
ENGINES = ("llama_cpp", "llama_server", "koboldcpp")
Ask = Callable[..., Any]


@pytest.fixture
def ask(apps: Callable[[str], Any], client_of: Any) -> Ask:
    """Return a function that sends a completion request to an engine."""

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
        ("koboldcpp", {"grammar": 'root ::= "Hello"'}, None),
        ("koboldcpp", {"frequency_penalty": 0}, None),
        ("koboldcpp", {"xtc_probability": 1}, "xtc_probability"),
        ("koboldcpp", {"xtc_probability": 1, "temperature": 1, "seed": 3}, None),
        ("koboldcpp", {"top_n_sigma": 1, "temperature": 0.5, "seed": 3}, "top_n_sigma"),
        ("koboldcpp", {"top_n_sigma": -1}, None),
        ("koboldcpp", {"dynatemp_range": 0.5, "seed": 3}, "dynatemp_range"),
        ("koboldcpp", {"mirostat": 2, "temperature": 0.5, "seed": 3}, "mirostat"),
        ("koboldcpp", {"mirostat": 2}, None),
        ("koboldcpp", {"top_a": 0.2, "tfs": 0.9, "smoothing_factor": 0.3}, None),
        ("koboldcpp", {"top_a": 0.2, "tfs": 0.9, "smoothing_factor": 0.3, "temperature": 1,
                       "seed": 3}, None),
        ("koboldcpp", {"adaptive_target": -1, "adaptive_decay": 0.9}, None),
        ("koboldcpp", {"adaptive_decay": 0.5}, None),
        ("llama_cpp", {"top_a": 0, "tfs": 1.0, "smoothing_factor": 0, "smoothing_curve": 2}, None),
    ],
)  # fmt: skip
async def test_what_is_done_only_nearly_is_said(
    ask: Ask, engine: str, fields: dict[str, Any], inexact: str | None
) -> None:
    """`x-latimer-inexact` names the approximated fields, if they have an effect."""
    reply = await ask(engine, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-latimer-inexact") == inexact


@pytest.mark.parametrize(
    ("engine", "fields", "words"),
    [
        ("llama_cpp", {"oai_compat": False}, "llama.cpp in process"),
        ("llama_server", {"lark": "start: A"}, "Use one of: grammar, json_schema, regex."),
        ("koboldcpp", {"lark": "start: A"}, "Use one of: grammar, json_schema, regex."),
        ("koboldcpp", {"frequency_penalty": 0.5}, "presence_penalty, which is the most similar"),
        ("koboldcpp", {"min_tokens": 2}, "not supported by koboldcpp"),
        ("koboldcpp", {"adaptive_target": 0}, "not supported by koboldcpp"),
        ("llama_cpp", {"top_a": 0.2}, "not supported by llama.cpp in process"),
        ("llama_server", {"smoothing_factor": 0.3}, "not supported by llama-server"),
        ("koboldcpp", {"parse_special": False}, "always parses control tokens"),
    ],
)
async def test_what_cannot_be_done_is_refused(
    ask: Ask, engine: str, fields: dict[str, Any], words: str
) -> None:
    """An unsupported field is an error that names the field and the engine and suggests another."""
    reply = await ask(engine, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == next(iter(fields))
    assert words in error["message"]


CHAT = {"messages": [HELLO], "max_tokens": 3}
PROMPTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hi"},
    "chat/completions": CHAT,
    "responses": {"input": "Hi"},
    "messages": CHAT,
}


@pytest.mark.parametrize(
    ("paths", "name", "effective", "neutral"),
    [
        (PROMPTS, "presence_penalty", [0.5], [0, None]),
        (PROMPTS, "logit_bias", [{"3": 1}], [{}, None]),
        (PROMPTS, "temperature", [0, 0.5], [1, None]),
        (PROMPTS, "top_p", [0, 0.5], [1, None]),
        (PROMPTS, "seed", [0, 7], [None]),
        (PROMPTS, "top_k", [0, 1], [None]),
        (PROMPTS, "min_tokens", [1], [0, None]),
        (["chat/completions"], "n", [2], [1, None]),
        (["chat/completions"], "logprobs", [True], [False, None]),
        (["completions"], "logprobs", [0, 1], [None]),
        (["completions"], "suffix", ["x"], ["", None]),
        (["completions"], "parse_special", [False], [True, None]),
        (["completions"], "echo", [True], [False, None]),
        (["completions"], "oai_compat", [False], [True, None]),
    ],
)
async def test_a_refused_field_is_rejected(
    paths: Iterable[str], name: str, effective: list[Any], neutral: list[Any]
) -> None:
    """A field that an engine's table refuses is an error with the table's hint, unless its value
    has no effect."""
    engine = Echo()
    engine.capabilities = replace(Echo.capabilities, refused={name: "Send less."})
    async with adapting(engine) as client:
        for path in paths:
            body = {"model": "m", **PROMPTS[path]}
            for value in effective:
                reply = await client.post(f"/v1/{path}", json={**body, name: value})
                error = reply.json()["error"]
                assert (reply.status_code, engine.jobs) == (400, []), (path, value)
                assert "not supported by echo. Send less." in error["message"]
                if path != "messages":
                    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            for value in neutral:
                reply = await client.post(f"/v1/{path}", json={**body, name: value})
                assert reply.status_code == 200, (path, value, reply.text)
            engine.jobs.clear()


async def test_strict_refuses_what_is_done_only_nearly(
    make_backend: Callable[[str], Backend],
) -> None:
    """With `strict` an approximation is an error."""
    backend = make_backend("llama_server")
    async with adapting(backend, strict=True) as client:
        reply = await client.post("/v1/completions", json={**BODY, "presence_penalty": 0.5})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "presence_penalty"
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200


async def test_koboldcpps_repeat_penalty_is_inexact(make_backend: Callable[[str], Backend]) -> None:
    """A repeat penalty on koboldcpp is named as inexact as the client spells it, except 1."""
    async with adapting(make_backend("koboldcpp"), strict=True) as client:
        for name in ("repeat_penalty", "repetition_penalty", "rep_pen"):
            error = (await client.post("/v1/completions", json={**BODY, name: 1.1})).json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        reply = await client.post("/v1/completions", json={**BODY, "repeat_penalty": 1})
        assert reply.status_code == 200


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_wrong_grammar_is_the_clients_mistake(ask: Ask, engine: str) -> None:
    """A syntax error in a grammar is a 400 with the field and position, on every engine."""
    reply = await ask(engine, grammar='root ::= "a"\n\nb ::= (')
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "grammar", "invalid_value")
    assert error["message"].startswith(
        "Invalid 'grammar': line 3, column 8, at '': expected ')' or"
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fields", [{}, {"temperature": 1, "seed": 3, "n": 2}, {"stream": True}])
async def test_a_grammar_holds(ask: Ask, engine: str, fields: dict[str, Any]) -> None:
    """The output matches the request's grammar on every engine."""
    reply = await ask(engine, grammar='root ::= "Bonjour" "!"?', max_tokens=10, **fields)
    if "stream" in fields:
        chunks = [json.loads(e[6:]) for e in reply.text.split("\n\n") if e.startswith("data: {")]
        texts = ["".join(chunk["choices"][0]["text"] for chunk in chunks)]
    else:
        texts = [choice["text"] for choice in reply.json()["choices"]]
    assert len(texts) == fields.get("n", 1)
    assert set(texts) <= {"Bonjour", "Bonjour!"}


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_grammar_is_gone_with_its_request(ask: Ask, engine: str) -> None:
    """A grammar does not affect the next request."""
    free = (await ask(engine)).json()["choices"][0]["text"]
    assert (await ask(engine, grammar='root ::= "x"')).json()["choices"][0]["text"] == "x"
    assert (await ask(engine)).json()["choices"][0]["text"] == free


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"json_schema": {"type": "object", "properties": {"x": {"type": "boolean"}},
                          "required": ["x"], "additionalProperties": False}},
         r'\{\s*"x"\s*:\s*(true|false)\s*\}'),
    ],
)  # fmt: skip
async def test_other_grammars_hold(
    ask: Ask, engine: str, fields: dict[str, Any], pattern: str
) -> None:
    """JSON schemas and regular expressions constrain the output on every engine."""
    text = (await ask(engine, **fields, max_tokens=60)).json()["choices"][0]["text"]
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_lark_holds_in_process(demo: httpx2.AsyncClient, path: str) -> None:
    """A Lark grammar constrains completions and chats in process."""
    prompt = {"prompt": "It is"} if path == "completions" else {"messages": [HELLO]}
    body = {"model": "m", "max_tokens": 60, "temperature": 0, **prompt, "lark": 'start: "a" | "b"'}
    choice = (await demo.post(f"/v1/{path}", json=body)).json()["choices"][0]
    text = choice["text"] if path == "completions" else choice["message"]["content"]
    assert text in ("a", "b")


@pytest.mark.parametrize("engine", ENGINES)
async def test_what_a_schema_cannot_be_held_to_is_named(ask: Ask, engine: str) -> None:
    """An unenforceable schema keyword is a 400 whose `param` is its path in the schema."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    reply = await ask(engine, json_schema=schema)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["param"] == "json_schema.properties.a.uniqueItems"
    assert "'uniqueItems' cannot be enforced" in error["message"]


async def test_two_grammars_are_one_too_many(ask: Ask) -> None:
    """Two grammars in one request are rejected."""
    error = (await ask("llama_cpp", grammar='root ::= "a"', regex="a")).json()["error"]
    assert (error["param"], error["code"]) == ("regex", "invalid_value")
    assert "'grammar' is set already" in error["message"]


class Plain(Echo):
    """An engine without grammars."""

    capabilities = replace(Echo.capabilities, grammars=frozenset())


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"tools": TOOLS, "tool_choice": TOOLS[0]}, "tool_choice"),
        ("chat/completions", {"functions": [FUNCTION], "function_call": {"name": "f"}},
         "function_call"),
        ("responses", {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
         "tool_choice"),
    ],
)  # fmt: skip
async def test_a_forced_call_needs_grammars(path: str, fields: dict[str, Any], param: str) -> None:
    """A call that is forced on an engine without grammars is a 400 that names the field."""
    prompt = {"input": "Hello!"} if path == "responses" else {"messages": [HELLO]}
    async with adapting(Plain()) as client:
        reply = await client.post(f"/v1/{path}", json={"model": "m", **prompt, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert "It has no grammars" in error["message"]


async def test_a_forced_call_needs_gbnf() -> None:
    """The error of a call that is forced names GBNF on an engine with other grammars."""
    engine = Plain()
    engine.capabilities = replace(Plain.capabilities, grammars=frozenset({"json_schema"}))
    body = {"model": "m", "messages": [HELLO], "tools": TOOLS, "tool_choice": "required"}
    async with adapting(engine) as client:
        error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert "It has no GBNF grammars. Let the model choose." in error["message"]
