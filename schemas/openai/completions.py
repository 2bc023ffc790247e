"""`POST /v1/completions` (contract, section 2)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import NotRequired, TypedDict

from .. import limits
from .common import (
    Count,
    EngineExtras,
    FinishReason,
    LogitBias,
    Penalty,
    Seed,
    Stop,
    StreamOptions,
    Temperature,
    Usage,
    invalid,
    is_unlimited,
    kind_of,
)
from .formats import ResponseFormat

MOST_PROMPTS = limits.PROMPTS.most


def _check_prompt(value: object) -> object:
    """Check that a prompt is a string, token ids, or an array of either, unmixed (contract 2.2)."""
    if value is None or isinstance(value, str):
        return value
    expected = "expected a string, array of strings, array of token ids, or array of such arrays"
    if not isinstance(value, list):
        raise invalid(
            f"Invalid type for '{{param}}': {expected}, but got {kind_of(value)} instead.",
            "invalid_type",
        )
    if not value:
        raise invalid(
            "Invalid '{param}': empty array. Expected an array with minimum length 1, but got an "
            "empty array instead.",
            "empty_array",
        )
    first = _shape(value[0])
    if first is not int and len(value) > MOST_PROMPTS:
        raise invalid(
            f"Invalid '{{param}}': array too long. Expected an array with maximum length "
            f"{MOST_PROMPTS}, but got an array with length {len(value)} instead.",
            "array_above_max_length",
        )
    _check_count(value, first)
    for index, item in enumerate(value):
        if first is None or _shape(item) != first:
            raise invalid(
                f"Invalid type for '{{param}}': {expected}, but got {kind_of(item)} instead.",
                "invalid_type",
                f"[{index}]",
            )
        if isinstance(item, list):
            _check_ids(item, f"[{index}]")
    if first is int:
        _check_ids(value, "")
    return value


def _check_count(prompts: list[object], first: type | None) -> None:
    """Reject more token ids than any context holds, before checking each of them."""
    if first is int:
        count = len(prompts)
    else:
        count = sum(len(one) for one in prompts if isinstance(one, list))
    if count > limits.IDS.most:
        raise invalid(
            f"Invalid '{{param}}': array too long. Expected at most {limits.IDS.most} token ids, "
            f"but got {count} instead.",
            "array_above_max_length",
        )


def _shape(item: object) -> type | None:
    return type(item) if type(item) in (str, int, list) else None


def _check_ids(ids: list[object], path: str) -> None:
    if not ids:
        raise invalid(
            "Invalid '{param}': empty array. Expected an array with minimum length 1, but got an "
            "empty array instead.",
            "empty_array",
            path,
        )
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise invalid(
                f"Invalid type for '{{param}}': expected an integer, but got {kind_of(token)} "
                "instead.",
                "invalid_type",
                f"{path}[{index}]",
            )
        if not 0 <= token < 2**31:
            side, sign, bound = ("below", ">=", 0) if token < 0 else ("above", "<=", 2**31 - 1)
            name = "minimum" if token < 0 else "maximum"
            raise invalid(
                f"Invalid '{{param}}': integer {side} {name} value. Expected a value {sign} "
                f"{bound}, but got {token} instead.",
                f"integer_{side}_{name[:3]}_value",
                f"{path}[{index}]",
            )


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]] | None, BeforeValidator(_check_prompt)
]


DEFAULT_MAX_TOKENS = 16


def _read_max_tokens(value: object) -> object:
    """Return the default for null, and null for no limit."""
    if value is None:
        return DEFAULT_MAX_TOKENS
    return None if is_unlimited(value) else value


class CompletionRequest(EngineExtras):
    """Body of `POST /v1/completions`.

    `max_tokens` is None if there is no limit. `response_format` is that of vLLM and llama.cpp.
    """

    model: str | None = None
    prompt: Prompt = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_read_max_tokens)] = (
        DEFAULT_MAX_TOKENS
    )
    n: Count | None = None
    response_format: ResponseFormat | None = None
    seed: Seed | None = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    user: str | None = None
    parse_special: bool | None = None


class CompletionLogprobs(TypedDict):
    """Four arrays of equal length; `top_logprobs` is null if no alternatives were requested."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One choice; `logprobs` is always present, and null unless it was requested."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(TypedDict):
    """The response to a request without streaming."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(TypedDict):
    """The part of a choice in one chunk."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(TypedDict):
    """One chunk of a streamed response.

    `usage` is present only if it was requested, and null in every chunk but the last.
    """

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    obfuscation: NotRequired[str]
