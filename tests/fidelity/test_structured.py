"""Answers satisfy the schema that the request names: every one, on every engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from support.schemas import SCHEMAS, error_of

ASK = [{"role": "user", "content": "Tell me about a person."}]


def body(schema: Any, **more: Any) -> dict[str, Any]:
    """A request for a chat at temperature 1."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"model": "m", "messages": ASK, "response_format": form, "max_tokens": 600, **more}


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server"])
@pytest.mark.parametrize("name", SCHEMAS)
async def test_a_hundred_of_a_hundred(
    apps: Callable[[str], Any], client_of: Any, engine: str, name: str
) -> None:
    """At temperature 1 a hundred answers are all JSON that satisfies the schema."""
    schema = SCHEMAS[name]
    async with client_of(apps(engine)) as client:
        bodies = [body(schema, n=10, seed=10 * number) for number in range(10)]
        replies = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=one) for one in bodies)
        )
    choices = [choice for reply in replies for choice in reply.json()["choices"]]
    assert len(choices) == 100
    for choice in choices:
        assert choice["finish_reason"] == "stop", choice
        assert error_of(json.loads(choice["message"]["content"]), schema) is None, choice


@pytest.mark.parametrize("name", SCHEMAS)
async def test_koboldcpp_too(apps: Callable[[str], Any], client_of: Any, name: str) -> None:
    """Recorded answers of koboldcpp satisfy the same schemas."""
    async with client_of(apps("koboldcpp")) as client:
        reply = await client.post("/v1/chat/completions", json=body(SCHEMAS[name], n=2, seed=3))
    for choice in reply.json()["choices"]:
        assert choice["finish_reason"] == "stop", choice
        assert error_of(json.loads(choice["message"]["content"]), SCHEMAS[name]) is None, choice
