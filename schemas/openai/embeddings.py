"""`POST /v1/embeddings` (contract, section 6), and `POST /v1/rerank`.

Reranking is not an endpoint of OpenAI; Jina, Cohere and llama-server share its shape.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import NotRequired, TypedDict

from .. import limits
from .common import Array, Request, invalid, unexpected
from .inputs import Inputs, check_inputs


def _check_input(value: object) -> object:
    return check_inputs(value, limits.INPUTS.maximum, allow_empty=False)


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


class Document(Request):
    """A document as an object."""

    text: str


def _check_documents(value: object) -> object:
    """Check that each document is a string, or an object with a text."""
    if not isinstance(value, list):
        return value
    for index, item in enumerate(value):
        if isinstance(item, str):
            continue
        where, found = f"[{index}]", item
        if isinstance(item, dict):
            if isinstance(item.get("text"), str):
                continue
            where, found = f"{where}.text", item.get("text")
            if "text" not in item:
                raise invalid(
                    "Missing required parameter: '{param}'.", "missing_required_parameter", where
                )
        expected = "a string" if isinstance(item, dict) else "one of a string or object with 'text'"
        raise unexpected(found, expected, where)
    return value


Documents = Annotated[
    Array[str | Document],
    Field(min_length=1, max_length=limits.INPUTS.maximum),
    BeforeValidator(_check_documents),
]


class RerankRequest(Request):
    """Body of `POST /v1/rerank`; `top_n` is the number of results, by default all."""

    query: Annotated[str, Field(min_length=1)]
    documents: Documents
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class DocumentText(TypedDict):
    """A document in the response."""

    text: str


class RerankResult(TypedDict):
    """The score of the document at `index` in the request; it is the model's own number."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class RerankVersion(TypedDict):
    """The version of Cohere's API."""

    version: Literal["2"]


class RerankUnits(TypedDict):
    """Cohere's units: one for a query with up to 100 documents."""

    search_units: int


class RerankMeta(TypedDict):
    """Facts that Cohere's clients read."""

    api_version: RerankVersion
    billed_units: RerankUnits


class Reranking(TypedDict):
    """The response, with the best document first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: RerankMeta
