"""koboldcpp's native API (1.115): generation, token counts, log-probabilities and server state."""

from collections.abc import Sequence
from typing import Literal, NotRequired, TypedDict


class GeneratePayload(TypedDict):
    """Body of `POST /api/extra/generate/stream` and `/api/v1/generate`.

    `stop_sequence` must be a list, because a string is split into characters.
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
    repeat_penalty: float
    repetition_penalty: float
    rep_pen_range: int
    rep_pen_slope: float
    presence_penalty: float
    dynatemp_range: float
    dynatemp_exponent: float
    smoothing_factor: float
    smoothing_curve: NotRequired[float]
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: NotRequired[float]
    dry_allowed_length: NotRequired[int]
    dry_penalty_last_n: NotRequired[int]
    dry_sequence_breakers: NotRequired[Sequence[str]]
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
    using_openai_tools: bool
    memory: str
    guidance_scale: float
    reasoning_effort: str
    logit_bias: dict[str, float]
    custom_token_bans: str
    banned_tokens: list[str]
    images: NotRequired[list[str]]
    audio: NotRequired[list[str]]
    grammar: str
    grammar_retain_state: bool
    logprobs: NotRequired[bool]
    sampler_order: NotRequired[list[int]]


class StreamEvent(TypedDict):
    """One event of the stream, with several tokens, one, or none."""

    token: str
    finish_reason: Literal["stop", "length", "error"] | None


class TokenCountPayload(TypedDict):
    """Body of `POST /api/extra/tokencount`; `special` adds a BOS token."""

    prompt: str
    special: bool


class TokenCount(TypedDict):
    """Response of `POST /api/extra/tokencount`."""

    value: int
    ids: list[int]


class EmbeddingsPayload(TypedDict):
    """Body of `POST /api/extra/embeddings`; numbers in base64 are 32-bit floats."""

    input: Sequence[str]
    truncate: bool
    encoding_format: str


class SpeechPayload(TypedDict):
    """Body of `POST /api/extra/tts`; the reply is a WAV file, or empty if it has failed."""

    input: str
    voice: str
    seed: int
    instruction: NotRequired[str]


class TopLogprob(TypedDict):
    """A token and its log-probability after sampling."""

    token: str
    token_id: int
    logprob: float


class TokenLogprob(TopLogprob):
    """A generated token, and the ten most likely tokens after sampling."""

    top_logprobs: list[TopLogprob]


class LastLogprobs(TypedDict):
    """`logprobs` of `POST /api/extra/last_logprobs`: every token of the last generation.

    `tokens` are decoded without invalid UTF-8, so a token that is a part of a character is empty.
    """

    content: list[TokenLogprob]
    tokens: list[str]
    token_ids: list[int]


class Perf(TypedDict):
    """Response of `GET /api/extra/perf`; `idle` is 1 while nothing is generated."""

    idle: int
    stop_reason: int
    last_token_count: int
    total_gens: int
    last_seed: NotRequired[int]
