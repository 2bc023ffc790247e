"""Tests of the limits on requests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.request import _check_count
from latimer.adapter.settings import Settings
from latimer.schemas import limits

C, H = "/v1/completions", "/v1/chat/completions"
E, R = "/v1/embeddings", "/v1/rerank"
DOCS = Path(__file__).parent.parent.parent / "docs" / "security.md"


def test_the_documentation_has_the_table_of_the_code() -> None:
    """The documentation has the table of all limits, and each limit's option exists."""
    assert limits.table() in DOCS.read_text()
    named = {one for name, one in vars(limits).items() if isinstance(one, limits.Limit)}
    assert named == set(limits.LIMITS)
    for limit in limits.LIMITS:
        name = limit.option.removeprefix("--").replace("-", "_")
        assert not name or name in Settings.model_fields


def completion(**fields: Any) -> dict[str, Any]:
    """Return a completion request for one token."""
    return {"model": "demo", "prompt": "a", "max_tokens": 1, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    """Return a chat request for one token."""
    messages = [{"role": "user", "content": "a"}]
    return {"model": "demo", "messages": messages, "max_tokens": 1, **fields}


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object schema with all properties required and no others allowed."""
    return {"type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False}  # fmt: skip


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema as a chat's `response_format`."""
    named = {"name": "s", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def tools(count: int) -> list[dict[str, Any]]:
    """Return functions without parameters."""
    return [
        {"type": "function", "function": {"name": f"f{i}", "description": "d" * 1_024}}
        for i in range(count)
    ]


def nested(levels: int) -> dict[str, Any]:
    """Return a schema of nested objects."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = closed({"a": schema})
    return schema


# From OpenAI's documentation of structured outputs, chat, completions and embeddings.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "2,048 prompts": (C, completion(prompt=["a"] * 2_048)),
    "128 choices": (C, completion(n=128)),
    "128 choices of a chat": (H, chat(n=128)),
    "best_of 20": (C, completion(n=1, best_of=20)),
    "five alternatives": (C, completion(logprobs=5)),
    "twenty alternatives": (H, chat(logprobs=True, top_logprobs=20)),
    "four stops": (H, chat(stop=["one", "two", "three", "four"])),
    "300 biases": (C, completion(logit_bias={str(token): 1 for token in range(300)})),
    "128 tools": (H, chat(tools=tools(128), tool_choice="none")),
    "names of 64 characters": (H, chat(tools=[
        {"type": "function", "function": {"name": "f" * 64}}], tool_choice="none")),
    "5,000 properties": (H, chat(response_format=formatted(
        closed({f"property_{i}": {"type": "integer"} for i in range(5_000)})))),
    "120,000 characters of names": (H, chat(response_format=formatted(
        closed({f"{i:04d}" + "n" * 116: {"type": "string"} for i in range(1_000)})))),
    "1,000 values": (H, chat(response_format=formatted(
        closed({"a": {"enum": [f"value-{i:04d}" for i in range(1_000)]}})))),
    "15,000 characters of values": (H, chat(response_format=formatted(
        closed({"a": {"enum": [f"{i:03d}" + "v" * 47 for i in range(300)]}})))),
    "ten levels": (H, chat(response_format=formatted(nested(10)))),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_what_openai_takes_is_taken(
    engine: str, name: str, apps: Any, client_of: Any
) -> None:
    """A request at each of OpenAI's published limits succeeds or exceeds the context length.

    The test models have a short context.
    """
    path, body = PUBLISHED[name]
    async with client_of(apps(engine)) as client:
        reply = await client.post(path, json=body, timeout=60)
    assert reply.status_code == 200 or "maximum context length" in reply.text, reply.text[:300]


BEYOND: dict[str, tuple[str, dict[str, Any], str]] = {
    "prompts": (C, completion(prompt=["a"] * 2_049), "prompt"),
    "inputs": (E, {"input": ["a"] * 2_049}, "input"),
    "documents": (R, {"query": "a", "documents": ["a"] * 2_049}, "documents"),
    "ids of inputs": (E, {"input": [[5] * 600_000] * 2}, "input"),
    "choices": (C, completion(prompt=["a"] * 33, n=128), "n"),
    "token ids": (C, completion(prompt=[5] * 1_048_577), "prompt"),
    "token ids in lists": (C, completion(prompt=[[5] * 600_000] * 2), "prompt"),
    "a text": ("/v1/tokenize", {"prompt": "a" * (2**22 + 1)}, "prompt"),
    "ids to detokenise": ("/v1/detokenize", {"tokens": [5] * 1_048_577}, "tokens"),
    "messages": (H, chat(messages=chat()["messages"] * 65_537), "messages"),
    "a stop": (C, completion(stop="a" * 4_097), "stop"),
    "stops": (C, completion(stop=["a"] * 129), "stop"),
    "all stops": (C, completion(stop=["a" * 4_096] * 4 + ["b"]), "stop"),
    "breakers": (C, completion(dry_sequence_breakers=["a"] * 17), "dry_sequence_breakers"),
    "a breaker": (C, completion(dry_sequence_breakers=["a" * 41]), "dry_sequence_breakers[0]"),
    "a grammar": (C, completion(grammar='root ::= "' + "a" * 65_536 + '"'), "grammar"),
    "a regex": (C, completion(regex="a" * 65_537), "regex"),
    "a schema": (C, completion(json_schema={"const": "a" * 2**20}), "json_schema"),
    "ways": (C, completion(grammar='root ::= ("a" | "a")*'), "grammar"),
}


@pytest.mark.parametrize("name", BEYOND)
async def test_what_is_beyond_a_limit_is_refused_by_its_name(
    name: str, demo: httpx2.AsyncClient
) -> None:
    """A request beyond a limit is a 400 that names the field, in a short message."""
    path, body, param = BEYOND[name]
    reply = await demo.post(path, json=body)
    assert reply.status_code == 400, reply.text[:300]
    error = reply.json()["error"]
    assert error["param"] == param
    assert len(error["message"]) < 600


@pytest.mark.parametrize("text", ["[" * 3 + "]" * 3, "0"])
async def test_a_body_of_too_many_values_is_refused_before_they_are_made(
    text: str, echo: httpx2.AsyncClient
) -> None:
    """A body with too many values is rejected before parsing; text in strings is not counted."""
    many = ",".join([text] * 2_100_000)
    headers = {"content-type": "application/json"}
    body = '{"model": "demo", "prompt": "a", "max_tokens": 1, "x": [%s]}'
    reply = await echo.post(C, content=body % many, headers=headers)
    assert reply.status_code == 400
    assert "at most" in reply.json()["error"]["message"]
    reply = await echo.post(C, content=body % json.dumps(many), headers=headers)
    assert reply.status_code == 200


async def test_a_body_of_too_many_fields_is_refused_before_they_are_made(
    echo: httpx2.AsyncClient,
) -> None:
    """A body with a million equal keys, whose parsing takes long, is rejected before it."""
    headers = {"content-type": "application/json"}
    body = '{"model": "demo", "prompt": "a", ' + ",".join(['"a": 1'] * 1_000_000) + "}"
    reply = await echo.post(C, content=body, headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == (
        "Invalid request body: it has 1000002 fields; at most 393216 are allowed."
    )


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
async def test_a_prompt_that_cannot_fit_is_refused_unread(
    engine: str, apps: Any, client_of: Any
) -> None:
    """A prompt far beyond the context length is rejected with a lower bound of its tokens."""
    long = "word " * 4_000_000
    messages = [{"role": "user", "content": long}]
    async with client_of(apps(engine)) as client:
        for path, body in ((C, completion(prompt=long)), (H, chat(messages=messages))):
            error = (await client.post(path, json=body)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "at least" in error["message"]


@pytest.mark.parametrize("size", [2**20, 2**23])
def test_a_string_that_is_never_closed_is_looked_at_once(size: int) -> None:
    """Counting values takes time linear in the body's size, also in an unclosed string."""
    body = b"[," * 200_000 + b'"' + b'\\"' * size
    start = time.thread_time()
    _check_count(body)
    assert time.thread_time() - start < 1
