"""koboldcpp's native API (1.115): generation, abort, token counts, and what it tells of itself."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class GeneratePayload(TypedDict):
    """Body of `POST /api/extra/generate/stream` and `/api/v1/generate`.

    `stop_sequence` must be a list (a string is split into characters) and
    `replace_instruct_placeholders` must be false, or text like `{{[INPUT]}}` is rewritten.
    """

    prompt: str
    max_length: int
    max_context_length: int
    genkey: str
    sampler_seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical: float
    tfs: float
    top_a: float
    nsigma: float
    rep_pen: float
    rep_pen_range: int
    rep_pen_slope: float
    presence_penalty: float
    dynatemp_range: float
    smoothing_factor: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    xtc_probability: float
    xtc_threshold: float
    adaptive_target: float
    stop_sequence: list[str]
    trim_stop: bool
    bypass_eos: bool
    ban_eos_token: bool
    use_default_badwordsids: bool
    render_special: bool
    replace_instruct_placeholders: bool
    logit_bias: NotRequired[dict[str, float]]
    images: NotRequired[list[str]]
    audio: NotRequired[list[str]]
    grammar: NotRequired[str]
    grammar_retain_state: NotRequired[bool]
    logprobs: NotRequired[bool]
    reasoning_effort: NotRequired[str]


class StreamEvent(TypedDict):
    """One event of the stream; several tokens, one, or none."""

    token: str
    finish_reason: Literal["stop", "length", "error"] | None


class TokenCountPayload(TypedDict):
    """Body of `POST /api/extra/tokencount`; `special` means: add BOS."""

    prompt: str
    special: bool


class TokenCount(TypedDict):
    """Reply of `POST /api/extra/tokencount`."""

    value: int
    ids: list[int]


class TopLogprob(TypedDict):
    """A token and its log-probability after sampling."""

    token: str
    token_id: int
    logprob: float


class TokenLogprob(TopLogprob):
    """A token that was generated, and the ten most likely that sampling left."""

    top_logprobs: list[TopLogprob]


class LastLogprobs(TypedDict):
    """`logprobs` of `POST /api/extra/last_logprobs`: every token of the last generation.

    `tokens` were decoded with broken UTF-8 left out, so a token inside a character is empty there.
    """

    content: list[TokenLogprob]
    tokens: list[str]
    token_ids: list[int]


class Perf(TypedDict):
    """`GET /api/extra/perf`; `idle` is 1 while nothing is generated."""

    idle: int
    stop_reason: int
    last_token_count: int
    total_gens: int


class Version(TypedDict):
    """`GET /api/extra/version`."""

    result: str
    version: str
    llm: NotRequired[bool]


class Props(TypedDict):
    """`GET /props`."""

    chat_template: str
