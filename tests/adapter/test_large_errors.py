"""Tests that a wrong request costs little, also if it is large."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.messages.request import from_validation as for_messages
from latimer.adapter.validation import from_validation, parse
from latimer.schemas import limits
from pydantic import TypeAdapter, ValidationError

# The modules of endpoints that have bodies.
MODULES = (
    "audio", "chat", "completions", "conversations", "embeddings", "messages", "models",
    "responses", "stored", "transcriptions",
)  # fmt: skip
USER = [{"role": "user", "content": "a"}]
MANY = 20_000


def adapters(module: str) -> dict[str, TypeAdapter[Any]]:
    """Return the validators of requests in a module of endpoints, by their names."""
    found = vars(importlib.import_module(f"latimer.adapter.endpoints.{module}"))
    return {name: one for name, one in found.items() if isinstance(one, TypeAdapter)}


def arrays(schema: Any) -> Iterator[dict[str, Any]]:
    """Return the arrays in pydantic's core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for name, one in schema.items():
            if name != "metadata":
                yield from arrays(one)
    elif isinstance(schema, list | tuple):
        for one in schema:
            yield from arrays(one)


@pytest.mark.parametrize("module", MODULES)
def test_arrays_stop_at_the_first_wrong_item(module: str) -> None:
    """No long array of a request has more than one error: two million take a gigabyte."""
    found = adapters(module)
    assert found
    for name, adapter in found.items():
        assert all(
            one.get("fail_fast") or one.get("max_length", MANY) <= limits.TOOLS.maximum
            for one in arrays(adapter.core_schema)
        ), name


@pytest.mark.parametrize(
    ("module", "field", "value"),
    [
        ("responses", "include", [1] * MANY),
        ("responses", "input", [{"role": "user", "content": [{}] * MANY}]),
        ("responses", "metadata", dict.fromkeys(map(str, range(MANY)), 1)),
        ("chat", "modalities", [1] * MANY),
        ("chat", "messages", [{"role": "user", "content": [1] * MANY}]),
        ("chat", "messages", [{"role": "x"}] * MANY),
        ("messages", "system", [{}] * MANY),
        ("messages", "messages", [{"role": "user", "content": [{}] * MANY}]),
    ],
)
def test_a_large_wrong_request_has_few_errors(module: str, field: str, value: Any) -> None:
    """The number of errors that are collected does not grow with the request."""
    adapter = adapters(module)["_REQUEST"]
    body = {"model": "m", "messages": USER, "max_tokens": 1, field: value}
    with pytest.raises(ValidationError) as refused:
        adapter.validator.validate_python(body)
    assert refused.value.error_count() < 10


@pytest.mark.parametrize("module", ["chat", "messages"])
def test_an_error_does_not_keep_the_request(module: str) -> None:
    """The error of a wrong request does not refer to pydantic's, which has the body."""
    adapter = adapters(module)["_REQUEST"]
    body = {"model": "m", "messages": [{"role": "x"}], "max_tokens": 1}
    with pytest.raises(InvalidRequest) as refused:
        parse(adapter, (), body, for_messages if module == "messages" else from_validation)
    assert refused.value.__context__ is None
