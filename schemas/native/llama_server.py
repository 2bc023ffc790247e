"""llama-server's native API (llama.cpp b11434, tools/server)."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class MultimodalPrompt(TypedDict):
    """A prompt with media: text with a marker for each file, and the files in base64."""

    prompt_string: str
    multimodal_data: list[str]


class CompletionPayload(TypedDict):
    """Body of `POST /completion`; server-schema.cpp lists every field.

    `grammar` is omitted rather than null, because the key alone disables `json_schema`.
    """

    prompt: str | list[int] | MultimodalPrompt
    n_predict: int
    stream: bool
    seed: int
    cache_prompt: bool
    stop: list[str]
    preserved_tokens: NotRequired[list[str]]
    timings_per_token: NotRequired[bool]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: NotRequired[float]
    dry_allowed_length: NotRequired[int]
    dry_penalty_last_n: NotRequired[int]
    dry_sequence_breakers: NotRequired[list[str]]
    adaptive_target: float
    adaptive_decay: NotRequired[float]
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    ignore_eos: bool
    logit_bias: list[list[int | float | bool]]
    n_probs: int
    samplers: NotRequired[list[str]]
    grammar: NotRequired[str]
    response_fields: NotRequired[list[str]]


class EmbeddingPayload(TypedDict):
    """Body of `POST /embedding`; a norm of 2 is the Euclidean one."""

    content: Sequence[Sequence[int]]
    embd_normalize: int


class RerankPayload(TypedDict):
    """Body of `POST /rerank`."""

    query: str
    documents: list[str]


class TokenizePayload(TypedDict):
    """Body of `POST /tokenize`; ids in a list are part of the result, unchanged."""

    content: str | list[int | str]
    add_special: bool
    parse_special: bool
