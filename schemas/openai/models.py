"""Responses of the models endpoints, and requests and responses of the tokenizer's.

OpenAI defines the first four keys of a model. The others are keys of servers whose clients need
more than the name: llama-server (`meta`, `architecture`), vLLM (`max_model_len`), OpenRouter
(`context_length`, `supported_parameters`), Ollama and LM Studio (`capabilities`).

`/tokenizer_info`, `/tokenize` and `/detokenize` are endpoints of vLLM. Evaluation harnesses use
them as a model's tokenizer (lm-eval's `tokenizer_backend=remote`).
"""

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from .. import limits
from .audio import SpokenVoice
from .common import Request, TokenIds


class Architecture(TypedDict):
    """The kinds of input and output of a model."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelObject(TypedDict):
    """One model; `created` is in seconds since 1970.

    `context_length`, `max_model_len` and `meta.n_ctx` are the same: the maximum number of
    tokens in prompt and completion. `meta` also has the other known sizes of the model. A model
    that only speaks or transcribes has none of these. One that no engine has described yet has the
    first four keys only. `voices` are those of a model that speaks.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: NotRequired[int]
    max_model_len: NotRequired[int]
    architecture: NotRequired[Architecture]
    capabilities: NotRequired[list[str]]
    supported_parameters: NotRequired[list[str]]
    voices: NotRequired[list[SpokenVoice]]
    meta: NotRequired[dict[str, int]]


class ModelList(TypedDict):
    """A list of all models; it is never paged."""

    object: Literal["list"]
    data: list[ModelObject]


class TokenizeRequest(Request):
    """Body of `POST /tokenize`."""

    prompt: Annotated[str, Field(max_length=limits.TEXT.maximum)]
    model: str | None = None
    add_special_tokens: bool | None = None


class Tokenized(TypedDict):
    """Response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Request):
    """Body of `POST /detokenize`."""

    tokens: TokenIds
    model: str | None = None


class Detokenized(TypedDict):
    """Response of `POST /detokenize`."""

    prompt: str


class TokenizerInfo(TypedDict):
    """Response of `GET /tokenizer_info`."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None
