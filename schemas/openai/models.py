"""`GET /v1/models` and `GET /v1/models/{model}` (contract, section 5).

OpenAI defines the first four keys. The others are keys of servers whose clients need more than the
name: llama-server (`meta`, `architecture`), vLLM (`max_model_len`), OpenRouter (`context_length`,
`supported_parameters`), Ollama and LM Studio (`capabilities`).
"""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class Architecture(TypedDict):
    """The kinds of input and output of a model."""

    input_modalities: list[str]
    output_modalities: list[str]


class ModelObject(TypedDict):
    """One model; `created` is in seconds since 1970.

    `context_length`, `max_model_len` and `meta.n_ctx` are the same: the maximum number of
    tokens in prompt and completion. `meta` also has the other known sizes of the model.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int
    architecture: Architecture
    capabilities: list[str]
    supported_parameters: list[str]
    meta: dict[str, int]


class ModelList(TypedDict):
    """A list of all models; it is never paged."""

    object: Literal["list"]
    data: list[ModelObject]
