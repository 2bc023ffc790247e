"""`POST /v1/embeddings` (contract, section 6), and `POST /v1/rerank`.

The second has the shape that Jina, Cohere and llama-server share.
"""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from math import ceil, hypot
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import (
    Content,
    Embedding,
    EmbeddingModel,
    Embeddings,
    Ranking,
    Sampling,
    Scores,
    Text,
)
from ...backends.errors import RequestError, Unsupported, check_length
from ...schemas import limits
from ...schemas.openai.common import range_error
from ...schemas.openai.embeddings import (
    EmbeddingRequest,
    EmbeddingUsage,
    RerankMeta,
    RerankRequest,
    RerankResult,
)
from ..admission import admitted, ticket_of
from ..errors import InvalidRequest, about, worded
from ..generation.token_ids import loaded, to_input
from ..hosted import EMBEDDING_LIMITS
from ..model_entry import ServedModel
from ..parts import ChunkedJson
from ..request import Exchange
from ..service import Service
from ..validation import notes, read

if TYPE_CHECKING:
    from ..generation.token_ids import Encoding

# Bytes that a number takes in a response, for the choice of a thread.
NUMBER = 20

_EMBEDDING = TypeAdapter(EmbeddingRequest)

_FOREIGN_IDS = (
    "Invalid 'input': these token ids are read as the model's own, and --strict rejects ids whose "
    "vocabulary is not named. Send text, or name their vocabulary in 'logit_bias_vocabulary' or "
    "--logit-bias-vocabulary."
)


async def create_embeddings(exchange: Exchange, service: Service) -> None:
    """Embed one input or several."""
    request = await read(exchange, _EMBEDDING, EMBEDDING_LIMITS if service.hosted else ())
    if exchange.grant is None:
        served = await service.resolve(request.model)
    else:
        count = len(request.input) if _is_list(request.input) else 1
        served = await admitted(exchange, service, request.model, 0, prompts=count)
    exchange.model = served.label
    facts = await served.backend.embedding_model()
    wanted = request.dimensions
    if wanted is not None and facts is not None and facts.dimensions:
        _check_dimensions(wanted, facts.dimensions, served, service)
    inputs, inexact = await _inputs(exchange, request, served, facts)
    if facts is not None and facts.inexact:
        inexact = (*inexact, *facts.inexact)
    await notes(exchange, request, Sampling(), served.capabilities, served.policy.strict, inexact)
    job = Embedding(inputs, ticket_of(exchange, served), served.model.fingerprint)
    _begin(exchange, served, job)
    try:
        found = await served.backend.embed(job)
    except RequestError as error:
        if error.param == "input" and _is_list(request.input):
            raise _in_list(error) from None
        raise
    _end(exchange, found.prompt_tokens)
    if wanted is not None:
        _check_dimensions(wanted, len(found.vectors[0]), served, service)
    await send(exchange, request, served.name, found)


def _begin(exchange: Exchange, served: ServedModel, job: Embedding | Ranking) -> None:
    """Note that the engine gets a job now."""
    if exchange.record is not None:
        exchange.record.begin(served.name, served.capabilities.engine, job.ticket)


def _end(exchange: Exchange, tokens: int) -> None:
    """Note the tokens of a job that has succeeded."""
    if exchange.lease is not None:
        exchange.lease.settle(tokens)
    if exchange.record is not None:
        exchange.record.succeed(tokens, 0)


async def send(exchange: Exchange, request: EmbeddingRequest, name: str, found: Embeddings) -> None:
    """Send the vectors of a request; the event loop never waits for their encoding."""
    cost = NUMBER * len(found.vectors) * len(found.vectors[0])
    await exchange.reply_in_parts(await offload.run(cost, _vectors, request, name, found))


def _in_list(error: RequestError) -> InvalidRequest:
    """Return the error of the only input, for a request that sent it in an array."""
    facts = worded(error)
    message = facts.message.replace("'input'", "'input[0]'")
    return InvalidRequest(message, "input[0]", facts.code, facts.status)


def _is_list(given: Any) -> bool:
    """Return True if the request sent its inputs in an array, of texts or of lists of ids."""
    return isinstance(given, list) and not isinstance(given[0], int)


async def _inputs(
    exchange: Exchange, request: EmbeddingRequest, served: ServedModel, facts: EmbeddingModel | None
) -> tuple[Sequence[Content], Sequence[str]]:
    """Return the inputs, and the fields that are inexact.

    Raises:
        InvalidRequest: the inputs are ids of an unknown vocabulary, under `strict`.
    """
    given = request.input
    each: Sequence[Any] = given if _is_list(given) else [given]
    if isinstance(each[0], str):
        context = facts.context if facts is not None else None
        return await offload.run(exchange.size, _texts, given, each, context), ()
    vocabulary = request.logit_bias_vocabulary or served.policy.vocabulary
    if vocabulary is not None:
        encoding = await loaded(vocabulary)
        return await offload.run(exchange.size, _decoded, given, each, encoding)
    if served.policy.strict:
        raise InvalidRequest(_FOREIGN_IDS, "input", "invalid_value")
    return await offload.run(exchange.size, lambda: [tuple(ids) for ids in each]), ("input",)


def _param(given: Any, index: int) -> str:
    return f"input[{index}]" if _is_list(given) else "input"


def _texts(given: Any, each: Sequence[str], context: int | None) -> Sequence[Content]:
    """Return texts, of which none exceeds the context for certain."""
    for index, text in enumerate(each if context is not None else ()):
        check_length(len(text), limits.TOKEN_SIZE.maximum, context or 0, None, _param(given, index))
    return [Text(text, parse_special=False) for text in each]


def _decoded(
    given: Any, each: Sequence[Sequence[int]], encoding: Encoding
) -> tuple[Sequence[Content], Sequence[str]]:
    """Return the texts of ids in another vocabulary; inexact if a character was cut."""
    found = [to_input(encoding, ids, _param(given, index)) for index, ids in enumerate(each)]
    was_cut = any(cut for _, cut in found)
    return [text for text, _ in found], ("input",) if was_cut else ()


def _check_dimensions(wanted: int, size: int, served: ServedModel, service: Service) -> None:
    """Reject a size that the model's vectors cannot have.

    Raises:
        InvalidRequest: the model's vectors are smaller.
        Unsupported: the model is not declared as one whose vectors may be cut.
    """
    if wanted == size and not service.hosted:
        return
    if not served.policy.matryoshka:
        raise Unsupported(
            "dimensions",
            "this model",
            f"Its vectors have {size} numbers. Omit it, or send {size}; if the model was trained "
            "for shorter vectors, start the server with --matryoshka.",
        )
    if wanted > size:
        raise about("dimensions", range_error("integer", "<=", size, wanted))


def _vectors(request: EmbeddingRequest, name: str, found: Embeddings) -> Sequence[bytes]:
    """Return the response in parts, encoded vector by vector."""
    encode = _base64 if request.encoding_format == "base64" else _floats
    parts = ChunkedJson()
    parts.add(b'{"object":"list","data":[')
    for index, vector in enumerate(found.vectors):
        if request.dimensions is not None and request.dimensions < len(vector):
            vector = _shortened(vector, request.dimensions)
        comma = b"," if index else b""
        parts.add(
            b'%b{"object":"embedding","index":%d,"embedding":%b}' % (comma, index, encode(vector))
        )
    count = found.prompt_tokens
    usage = {"prompt_tokens": count, "total_tokens": count}
    parts.add(b'],"model":%b,"usage":%b}' % (orjson.dumps(name), orjson.dumps(usage)))
    return parts.end()


def _floats(vector: array[float]) -> bytes:
    return orjson.dumps(vector.tolist())


def _base64(vector: array[float]) -> bytes:
    """Return a vector as a JSON string: little-endian 32-bit floats in base64."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return b'"%b"' % b64encode(vector)


def _shortened(vector: array[float], size: int) -> array[float]:
    """Return the first numbers of a vector, scaled to unit length."""
    first = vector[:size]
    length = hypot(*first) or 1.0
    return array("f", [number / length for number in first])


_RERANK = TypeAdapter(RerankRequest)
# The documents in one of Cohere's search units (https://cohere.com/pricing).
SEARCH_UNIT = 100


async def rerank(exchange: Exchange, service: Service) -> None:
    """Sort documents by their relevance to a query."""
    request = await read(exchange, _RERANK)
    if exchange.grant is None:
        served = await service.resolve(request.model)
    else:
        count = len(request.documents)
        served = await admitted(exchange, service, request.model, 0, prompts=count)
    exchange.model = served.label
    await notes(exchange, request, Sampling(), served.capabilities, served.policy.strict)
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    job = Ranking(request.query, documents, ticket_of(exchange, served), served.model.fingerprint)
    _begin(exchange, served, job)
    found = await served.backend.rank(job)
    _end(exchange, found.prompt_tokens)
    parts = await offload.run(exchange.size, _ranking, request, served.name, documents, found)
    await exchange.reply_in_parts(parts)


def _ranking(
    request: RerankRequest, name: str, documents: Sequence[str], found: Scores
) -> Sequence[bytes]:
    """Return the response in parts; of equal scores, the earlier document is first."""
    order = sorted(range(len(documents)), key=lambda index: -found.scores[index])
    parts = ChunkedJson()
    parts.add(b'{"id":"%b","object":"list"' % str(uuid4()).encode())
    parts.add(b',"model":%b,"results":[' % orjson.dumps(name))
    for place, index in enumerate(order[: request.top_n]):
        result: RerankResult = {"index": index, "relevance_score": found.scores[index]}
        if request.return_documents:
            result["document"] = {"text": documents[index]}
        parts.add(b"," * bool(place) + orjson.dumps(result))
    count = found.prompt_tokens
    usage: EmbeddingUsage = {"prompt_tokens": count, "total_tokens": count}
    units = ceil(len(documents) / SEARCH_UNIT)
    meta: RerankMeta = {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": units},
    }
    parts.add(b'],"usage":%b,"meta":%b}' % (orjson.dumps(usage), orjson.dumps(meta)))
    return parts.end()
