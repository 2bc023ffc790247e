"""`POST /v1/embeddings` (contract, section 6)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from .. import limits
from .common import Request
from .inputs import Inputs, check_inputs


def _check_input(value: object) -> object:
    return check_inputs(value, limits.INPUTS.most, allow_empty=False)


class EmbeddingRequest(Request):
    """Body of `POST /v1/embeddings`.

    `logit_bias_vocabulary` names the OpenAI vocabulary of the request's token ids, as in
    completions.
    """

    input: Annotated[Inputs, BeforeValidator(_check_input)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    logit_bias_vocabulary: str | None = None


class EmbeddingObject(TypedDict):
    """The vector of one input: numbers, or little-endian 32-bit floats in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Two equal counts: the tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The response: one vector for each input, in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage
