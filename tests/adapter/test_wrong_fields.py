"""Tests that an error names the field that is wrong, at every depth of a chat request."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from latimer.adapter.errors import InvalidRequest
from latimer.adapter.validation import parse
from latimer.schemas.openai.chat import ChatRequest
from pydantic import TypeAdapter

ADAPTER = TypeAdapter(ChatRequest)
MARK = {"mode": "explicit", "ttl": "30m"}
GRAMMAR = {"definition": "[a-z]+", "syntax": "regex"}
BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "a"}], "name": "n"},
        {"role": "user", "name": "n", "content": [
            {"type": "text", "text": "a", "prompt_cache_breakpoint": MARK},
            {"type": "image_url", "image_url": {"url": "data:,", "detail": "original"}},
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            {"type": "file", "file": {"file_data": "", "file_id": "", "filename": ""}},
        ]},
        {"role": "assistant", "content": "a", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "2", "type": "custom", "custom": {"name": "f", "input": ""}},
        ]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "a"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "", "strict": True,
                                          "parameters": {}}},
        {"type": "custom", "custom": {"name": "g", "format": {"type": "text"}}},
        {"type": "custom", "custom": {"name": "h", "format": {
            "type": "grammar", "grammar": GRAMMAR}}},
    ],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
        {"type": "function", "function": {"name": "f"}},
        {"type": "custom", "custom": {"name": "g"}},
    ]}},
    "functions": [{"name": "f", "parameters": {}}],
    "response_format": {"type": "json_schema", "json_schema": {
        "name": "n", "schema": {}, "strict": True}},
    "prediction": {"type": "content", "content": [{"type": "text", "text": "a"}]},
    "audio": {"voice": "v", "format": "mp3"},
    "modalities": ["text"],
    "stream_options": {"include_usage": True, "include_obfuscation": True},
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "metadata": {"k": "v"},
    "stop": ["a"],
    "web_search_options": {"search_context_size": "low"},
}  # fmt: skip
# Objects with any content, and fields that take any value of their type.
FREE = {"parameters", "schema"}


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Return the place of every field and element in a value."""
    steps: Any = ()
    if isinstance(value, dict):
        steps = value.items()
    elif isinstance(value, list):
        steps = enumerate(value)
    for step, inner in steps:
        yield (*path, step)
        if step not in FREE:
            yield from places(inner, (*path, step))


def spelled(path: tuple[str | int, ...]) -> str:
    """Return a place in OpenAI's form."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


PLACES = list(places(BODY))


def changed(path: tuple[str | int, ...], *new: Any) -> Any:
    """Return the body with another value at a place, or without it."""
    body = copy.deepcopy(BODY)
    here: Any = body
    for step in path[:-1]:
        here = here[step]
    if new:
        here[path[-1]] = new[0]
    else:
        del here[path[-1]]
    return body


def test_the_body_is_valid() -> None:
    """The request that the other tests change has no error."""
    parse(ADAPTER, (), BODY)


def error_of(body: Any) -> InvalidRequest | None:
    """Return the error of a body, or None if it is valid."""
    try:
        parse(ADAPTER, (), body)
    except InvalidRequest as error:
        return error
    return None


@pytest.mark.parametrize("path", PLACES, ids=spelled)
def test_a_wrong_field_is_named(path: tuple[str | int, ...]) -> None:
    """A value of a wrong type, null or a missing value is reported at its own place."""
    number = error_of(changed(path, -5.5))
    assert number is not None
    for error in (number, error_of(changed(path, None)), error_of(changed(path))):
        # A missing model has no `param` (contract 1.2), and null content has OpenAI's older path.
        if error is not None and (error.param is not None or path != ("model",)):
            assert (error.param or "").replace(".[", "[") == spelled(path), error.message
