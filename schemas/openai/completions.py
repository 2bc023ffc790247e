"""`POST /v1/completions` (contract, section 2)."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import NotRequired, TypedDict

from .. import limits
from .common import (
    Array,
    Count,
    EngineExtras,
    FinishReason,
    LogitBias,
    Penalty,
    ReplyHead,
    Seed,
    Stop,
    StreamOptions,
    Temperature,
    Usage,
    read_limit,
)
from .inputs import check_inputs
from .messages import ResponseFormat

MOST_PROMPTS = limits.PROMPTS.maximum
# For clients that send a chat here.
_CHAT = " For a chat, send 'messages' to v1/chat/completions."


def _check_prompt(value: object) -> object:
    """Check a prompt; without one the model begins a new document (contract 2.2)."""
    return value if value is None else check_inputs(value, MOST_PROMPTS, for_objects=_CHAT)


Prompt = Annotated[
    str | Array[str] | Array[int] | Array[Array[int]] | None, BeforeValidator(_check_prompt)
]


DEFAULT_MAX_TOKENS = 16


def _read_max_tokens(value: object) -> object:
    """Return the default for null, and null for no limit."""
    return DEFAULT_MAX_TOKENS if value is None else read_limit(value)


class CompletionRequest(EngineExtras, defer_build=False):
    """Body of `POST /v1/completions`.

    `max_tokens` is None if there is no limit. `response_format` is that of vLLM and llama.cpp.
    With `logprobs_token_ids`, `logprobs` has the ids of its tokens, which is Latimer's own.
    """

    endpoint = "completions"

    model: str | None = None
    prompt: Prompt = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: LogitBias = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    logprobs_token_ids: bool | None = None
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

    @property
    def most_tokens(self) -> int | None:
        """The largest number of tokens to generate; None if there is no limit."""
        return self.max_tokens


class CompletionLogprobs(TypedDict):
    """Arrays of equal length; `top_logprobs` is null if no alternatives were requested.

    The ids are present only if `logprobs_token_ids` asks for them. `top_token_ids` has the keys of
    `top_logprobs`.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    token_ids: NotRequired[list[int]]
    top_token_ids: NotRequired[list[dict[str, int] | None] | None]


class CompletionChoice(TypedDict):
    """One choice; `logprobs` is always present, and null unless it was requested."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class Completion(ReplyHead):
    """The response to a request without streaming."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(TypedDict):
    """The part of a choice in one chunk."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class CompletionChunk(ReplyHead):
    """One chunk of a streamed response.

    `usage` is present only if it was requested, and null in every chunk but the last.
    """

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    obfuscation: NotRequired[str]
