"""Tests that no field and no value of OpenAI's published request types is unknown."""

from __future__ import annotations

import collections.abc
import types
from collections.abc import Iterator
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pytest
from latimer.adapter.validation import parse, unknown_fields
from latimer.schemas.openai.audio import SpeechRequest
from latimer.schemas.openai.chat import ChatRequest
from latimer.schemas.openai.completions import CompletionRequest
from latimer.schemas.openai.embeddings import EmbeddingRequest
from latimer.schemas.openai.responses import ResponseRequest
from openai.types import completion_create_params, embedding_create_params
from openai.types.audio import speech_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import TypeAdapter
from typing_extensions import TypeAliasType, is_typeddict

PLAIN = {str: "text", int: 5, float: 0.5, bool: True, object: "text"}
LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)
# Fields whose published types say less than their documentation.
SAMPLES = {
    "logit_bias": {"1": 1},
    # Not together with a conversation.
    "previous_response_id": None,
    "ToolChoiceAllowedParam.tools": [{"type": "function", "name": "f"}, {"type": "mcp"}],
    # The service refuses it.
    "generate_summary": None,
    "max_output_tokens": 16,
    "parameters": {"type": "object"},
    "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}],
    },
}  # fmt: skip


def samples(kind: Any) -> Iterator[Any]:
    """Return values of a type that have, between them, every field and word of every variant."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        yield PLAIN[kind]
    elif is_typeddict(kind):
        yield from objects(kind)
    elif isinstance(kind, TypeAliasType):
        yield from samples(kind.__value__)
    elif origin in (Union, types.UnionType):
        for one in arguments:
            yield from samples(one)
    elif origin is Literal:
        yield from arguments
    elif origin in (Required, NotRequired):
        yield from samples(arguments[0])
    elif origin in LISTS or getattr(kind, "__name__", "") == "SequenceNotStr":
        yield list(samples(arguments[0]))
    elif origin is dict:
        yield {"key": "text"}


def objects(kind: Any) -> Iterator[dict[str, Any]]:
    """Return objects with all fields of a type: one with the first values, one for each other."""
    variants = {
        name: sample_of(kind, name) or list(samples(hint)) or [None]
        for name, hint in get_type_hints(kind).items()
    }
    first = {name: values[0] for name, values in variants.items()}
    yield first
    for name, values in variants.items():
        for value in values[1:]:
            yield {**first, name: value}


def sample_of(kind: Any, name: str) -> list[Any]:
    """Return the value of a field whose type says less than its documentation, if it is one."""
    return [SAMPLES[key] for key in (f"{kind.__name__}.{name}", name) if key in SAMPLES]


@pytest.mark.parametrize(
    ("published", "own"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
        (response_create_params.ResponseCreateParamsStreaming, ResponseRequest),
        (embedding_create_params.EmbeddingCreateParams, EmbeddingRequest),
        (speech_create_params.SpeechCreateParams, SpeechRequest),
    ],
)
def test_openais_fields_are_known(published: Any, own: type[Any]) -> None:
    """Every field and word of OpenAI's types is accepted at its place, and none is unknown."""
    adapter: TypeAdapter[Any] = TypeAdapter(own)
    bodies = list(objects(published))
    names = {name for name, value in bodies[0].items() if value is not None or name in SAMPLES}
    assert names == set(get_type_hints(published))
    for body in bodies:
        assert unknown_fields(parse(adapter, (), body)) == []
