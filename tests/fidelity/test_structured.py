"""Tests that every answer satisfies the schema of its request, on every engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import ENGINES
from support.samples import sample
from support.schemas import SCHEMAS, error_of

pytestmark = pytest.mark.slow

ASK = [{"role": "user", "content": "Tell me about a person."}]


def body(schema: Any, **more: Any) -> dict[str, Any]:
    """Return a chat request with a schema, at the default temperature of 1."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"model": "m", "messages": ASK, "response_format": form, "max_tokens": 600, **more}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SCHEMAS)
async def test_every_answer_satisfies_its_schema(
    apps: Callable[[str], Any], client_of: Any, engine: str, name: str
) -> None:
    """Every answer at temperature 1 satisfies the schema; those of koboldcpp are recorded."""
    schema = SCHEMAS[name]
    bodies = [body(schema, n=10, seed=10 * number) for number in range(sample(3, 10))]
    if engine == "koboldcpp":
        bodies = [body(schema, n=2, seed=3)]
    async with client_of(apps(engine)) as client:
        replies = await asyncio.gather(
            *(client.post("/v1/chat/completions", json=one) for one in bodies)
        )
    choices = [choice for reply in replies for choice in reply.json()["choices"]]
    assert len(choices) == sum(one["n"] for one in bodies)
    for choice in choices:
        assert choice["finish_reason"] == "stop", choice
        assert error_of(json.loads(choice["message"]["content"]), schema) is None, choice
