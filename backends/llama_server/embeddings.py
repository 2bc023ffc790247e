"""Embeddings and rankings of llama-server through its native `POST /embedding` and `/rerank`."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from ...schemas.native.llama_server import EmbeddingPayload, RerankPayload, TokenizePayload
from .. import offload
from ..base import (
    Content,
    Embedding,
    EmbeddingModel,
    Embeddings,
    Model,
    Pooling,
    Ranking,
    Scores,
    Text,
    TokenIds,
)
from ..embeddings import field_of, grouped, is_memory, unit
from ..errors import (
    LARGEST,
    ContextExceeded,
    EmptyPrompt,
    EngineError,
    EngineUnavailable,
    LatimerError,
    NotServed,
    RequestError,
    check_ids,
    read_from,
    whole_of,
)
from ..queue import Ticket
from ..streams import map_concurrently
from .server import RERANKING_OFF, Embedder, Server
from .translate import ENGINE, to_error

# Seconds that the first questions may take, which a list of models waits for.
PATIENCE = 2.0
# An id between the texts of one `/tokenize`. The server passes ids on unchanged, and no text has a
# negative one.
SEPARATOR = -1

EMBEDDINGS_OFF = "Start llama-server with --embeddings."
NOT_POOLED = (
    "Its embeddings are not pooled. Start llama-server with --pooling mean (or cls, or last)."
)
NO_VECTORS = (
    "It returns no vectors. If the model is a reranker, start llama-server with --reranking."
)
RANKS_ONLY = "Did you mean to use v1/rerank?"
TOO_OLD = "This llama-server has no endpoint for it. Update llama-server."


def around(whole: TokenIds, plain: TokenIds) -> tuple[TokenIds, TokenIds]:
    """Return the tokens before and after a text in its ids with special tokens.

    Raises:
        ValueError: the text's own ids are not among them.
    """
    size = len(plain)
    for start in range(len(whole) - size + 1):
        if whole[start : start + size] == plain:
            return whole[:start], whole[start + size :]
    raise ValueError("special tokens change the tokens of a text")


def separated(texts: list[str]) -> list[int | str]:
    """Return the content of a `/tokenize` that tokenizes each text on its own."""
    return [part for text in texts for part in (SEPARATOR, text)]


def parted(value: Any, count: int, size: int) -> list[TokenIds]:
    """Return the ids of each of `count` texts that one `/tokenize` returned.

    Args:
        size: the number of tokens in the vocabulary.

    Raises:
        TypeError, ValueError: the value is not a list of ids, or has other separators.
    """
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        raise TypeError(f"expected a list of token ids, but got {type(value).__name__}")
    if min(value) != SEPARATOR or max(value) >= size or value[0] != SEPARATOR:
        raise ValueError("a token id is not in the vocabulary")
    if value.count(SEPARATOR) != count:
        raise ValueError(f"the ids of {value.count(SEPARATOR)} texts instead of {count}")
    found, start = [], 1
    for _ in range(count - 1):
        end = value.index(SEPARATOR, start)
        found.append(tuple(value[start:end]))
        start = end + 1
    return [*found, tuple(value[start:])]


def tested(data: bytes) -> tuple[int, str]:
    """Return the length of the vector of a test, and what to do if it is not a vector.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed.
    """
    (entry,) = orjson.loads(data)
    rows = entry["embedding"]
    if not rows or any(type(row) is not list or not row for row in rows):
        raise TypeError("expected rows of numbers")
    # JSON has no number that is not finite; the server sends null.
    if not {type(value) for row in rows for value in row} <= {float, int, type(None)}:
        raise TypeError("expected numbers")
    if len(rows) > 1:
        return 0, NOT_POOLED
    if is_memory(rows[0]):
        return 0, NO_VECTORS
    return len(unit(rows[0])), ""


def read_vectors(data: bytes, count: int, dimensions: int) -> list[array[float]]:
    """Return the vectors of a reply of `/embedding`, in the order of the inputs.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed, or a vector has another length.
    """
    found: dict[int, array[float]] = {}
    entries = orjson.loads(data)
    for entry in entries:
        (row,) = entry["embedding"]
        if len(row) != dimensions:
            raise ValueError(f"{len(row)} dimensions instead of {dimensions}")
        found[whole_of(entry["index"], 0, count - 1)] = unit(row)
    if len(entries) != count:
        raise ValueError(f"{len(entries)} vectors instead of {count}")
    return [found[index] for index in range(count)]


def read_scores(data: bytes, count: int) -> tuple[list[float], int]:
    """Return the scores of a reply of `/rerank` in the order of the documents, and its tokens.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed.
    """
    reply = orjson.loads(data)
    found: dict[int, float] = {}
    for entry in reply["results"]:
        score = entry["relevance_score"]
        if type(score) not in (float, int) or not math.isfinite(score):
            raise ValueError(f"{score!r} is not a score")
        found[whole_of(entry["index"], 0, count - 1)] = float(score)
    if len(reply["results"]) != count:
        raise ValueError(f"{len(reply['results'])} scores instead of {count}")
    return [found[index] for index in range(count)], whole_of(reply["usage"]["prompt_tokens"])


def untested(what: str, message: str) -> EngineError:
    """Return the error for a short test input that the server rejected."""
    return EngineError(f"{ENGINE} rejected a test of its {what}: {message}")


# The most characters of text in one `/tokenize`: its reply is parsed in about a millisecond.
TOKENIZED = 2**16
# The most bytes of a reply of `/embedding`, and the bytes of a number in it: parsing holds the
# interpreter lock.
REPLY, NUMBER = 2**18, 20
# The most tokens of a call with several inputs, so that other requests have their turn soon.
CALL_TOKENS = 1_024
# The most inputs of a call, and of a `/tokenize`.
MOST_INPUTS = 256
# A text with tokens in every vocabulary.
WORD = "a"


async def embedding_model(server: Server) -> EmbeddingModel | None:
    """Return the facts about the server's embeddings; None without vectors and scores.

    Facts that need a place for a call are unknown, or assumed, until a place was free once. So are
    those that a server does not show in time, because it generates for others.
    """
    model = await server.monitor.get()
    if server.embedder.value is None and server.turns.is_full and await _served(server) is None:
        return EmbeddingModel(None, None, context_of(model))
    facts, generates = server.embedder.value, True
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            facts = await embedder(server, model, Ticket())
            if facts.ranks or not facts.hint:
                generates = await _generates(server, model)
    if facts is None:
        return EmbeddingModel(None, None, context_of(model))
    if facts.hint and not facts.ranks:
        return None
    pooling: Pooling | None = "rank" if facts.ranks else None
    return EmbeddingModel(facts.dimensions, pooling, context_of(model), generates)


async def embed(server: Server, job: Embedding) -> Embeddings:
    """Embed inputs in calls of bounded size, several at a time; each takes a place in the queue.

    Raises:
        NotServed: the server has no embeddings, or does not pool them.
        ContextExceeded: an input is longer than the context or the server's batch.
    """
    server.turns.check(job.ticket)
    model = await server.monitor.get_for(job)
    ticket = job.ticket or Ticket()
    facts = await embedder(server, model, ticket)
    if facts.hint:
        raise NotServed("embed", ENGINE, facts.hint)
    ids, count = await _input_ids(server, job.inputs, facts, model)
    most = min(max(REPLY // (NUMBER * facts.dimensions), 1), MOST_INPUTS)
    found = await map_concurrently(
        _vectors(server, model, facts, ids, group, ticket)
        for group in grouped(map(len, ids), most, CALL_TOKENS)
    )
    return Embeddings([vector for part in found for vector in part], count)


async def embedder(server: Server, model: Model, ticket: Ticket) -> Embedder:
    """Return the facts about the server's embeddings; the first call asks for them."""

    async def learn() -> Embedder:
        facts = await _read_embedder(server, ticket)
        server.monitor.check_is(model)
        return facts

    return server.embedder.value or await server.embedder.get(learn)


def context_of(model: Model) -> int:
    """Return the largest number of tokens in an input."""
    return min(model.context, model.sizes.get("n_ctx_train") or model.context)


async def _served(server: Server) -> Embedder | None:
    """Return the facts about a server that returns no vectors, or None if it does.

    The questions are incomplete, so that they need no place: a server that serves the task rejects
    them, and others respond that they do not.
    """
    status, data = await server.reply("POST", "/embedding", b"{}")
    if status in (404, 501):
        return Embedder(hint=EMBEDDINGS_OFF if status == 501 else TOO_OLD)
    if status not in (200, 400):
        raise _test_failed("embeddings", to_error(status, data))
    status, data = await server.reply("POST", "/rerank", b"{}")
    if status in (404, 501):
        return None
    if status not in (200, 400):
        raise _test_failed("reranking", to_error(status, data))
    return Embedder(hint=RANKS_ONLY, rank_hint="")


async def _read_embedder(server: Server, ticket: Ticket) -> Embedder:
    facts = await _served(server)
    if facts is not None:
        return facts
    plain = await server.plain(WORD)
    whole = await server.tokenize(WORD, add_special=True, parse_special=False)
    with read_from(ENGINE, "its special tokens"):
        prefix, suffix = around(whole, plain)
    # Of two tokens at least, so that vectors that are not pooled show.
    status, data = await _post(server, "/embedding", _payload([whole + whole]), ticket)
    if status != 200:
        raise _test_failed("embeddings", to_error(status, data))
    with read_from(ENGINE, "its embeddings"):
        dimensions, hint = tested(data)
    return Embedder(dimensions, hint, prefix=prefix, suffix=suffix)


def _test_failed(what: str, error: LatimerError) -> LatimerError:
    """Return the error for a failed test; the request is not at fault."""
    return untested(what, error.message) if isinstance(error, RequestError) else error


async def _generates(server: Server, model: Model) -> bool:
    """Return True unless the server refuses to generate; the first call generates one token."""
    generates = server.generates
    if generates is None and server.turns.is_full:
        return True
    if generates is None:
        first = (await server.tokenize(WORD, add_special=True, parse_special=False))[:1]
        test = {"prompt": first, "n_predict": 1, "stream": False, "cache_prompt": False}
        status, data = await _post(server, "/completion", test, Ticket())
        error = None if status == 200 else to_error(status, data)
        if isinstance(error, EngineUnavailable):
            raise error
        generates = not isinstance(error, NotServed)
        server.monitor.check_is(model)
        server.generates = generates
    return generates


async def _post(server: Server, path: str, payload: Any, ticket: Ticket) -> tuple[int, bytes]:
    return await server.call(path, orjson.dumps(payload), ticket)


def _payload(ids: list[TokenIds]) -> EmbeddingPayload:
    # 2 is the Euclidean norm.
    return {"content": ids, "embd_normalize": 2}


async def _input_ids(
    server: Server, inputs: Sequence[Content], facts: Embedder, model: Model
) -> tuple[list[TokenIds], int]:
    """Return the ids of each input with special tokens, and the number of all without them.

    Raises:
        EmptyPrompt, UnknownToken, ContextExceeded: an input has no tokens, an id that is not in the
            vocabulary, or too many tokens.
    """
    texts = [one.text for one in inputs if isinstance(one, Text)]
    tokenized = await _tokenized(server, texts, model) if texts else []
    size = await server.vocabulary_size() if len(texts) < len(inputs) else 0
    context = context_of(model)

    def checked() -> tuple[list[TokenIds], int]:
        rest = iter(tokenized)
        found: list[TokenIds] = []
        count = 0
        for index, one in enumerate(inputs):
            param = field_of(index, len(inputs))
            ids = own = next(rest) if isinstance(one, Text) else one
            if isinstance(one, Text):
                ids = (*facts.prefix, *own, *facts.suffix)
            else:
                check_ids(param, own, size)
            if not ids:
                raise EmptyPrompt(param)
            if len(ids) > context:
                raise ContextExceeded(context, len(ids), param=param)
            count += len(own)
            found.append(ids)
        return found, count

    total = sum(map(len, tokenized)) + sum(len(one) for one in inputs if not isinstance(one, Text))
    return await offload.run(total, checked)


async def _tokenized(server: Server, texts: list[str], model: Model) -> list[TokenIds]:
    """Return the ids of texts, in as few calls as their length allows."""
    size = model.sizes.get("n_vocab", LARGEST)
    sizes = [len(text) for text in texts]

    async def ids(group: range) -> list[TokenIds]:
        payload: TokenizePayload = {
            "content": separated(texts[group.start : group.stop]),
            "add_special": False,
            "parse_special": False,
        }
        length = sum(sizes[group.start : group.stop])
        reply = await server.ask("POST", "/tokenize", payload, length)
        with read_from(ENGINE, "/tokenize"):
            return await offload.run(length, parted, reply["tokens"], len(group), size)

    found = await map_concurrently(ids(group) for group in grouped(sizes, MOST_INPUTS, TOKENIZED))
    return [one for part in found for one in part]


async def _vectors(
    server: Server,
    model: Model,
    facts: Embedder,
    ids: list[TokenIds],
    group: range,
    ticket: Ticket,
) -> list[array[float]]:
    """Embed a group of inputs with one call."""
    own = ids[group.start : group.stop]
    data = await offload.run(6 * sum(map(len, own)), orjson.dumps, _payload(own))
    status, body = await server.batch("/embedding", data, ticket, model)
    if status != 200:
        raise _named(_embedding_error(status, body), ids, group)
    with read_from(ENGINE, "/embedding"):
        return await offload.run(len(body), read_vectors, body, len(group), facts.dimensions)


def _embedding_error(status: int, body: bytes) -> LatimerError:
    return NotServed("embed", ENGINE, EMBEDDINGS_OFF) if status == 501 else to_error(status, body)


def _named(error: LatimerError, ids: list[TokenIds], group: range) -> LatimerError:
    """Return an error that names the input that is too long, by its number of tokens."""
    if not isinstance(error, ContextExceeded):
        return error
    longest = [index for index in group if len(ids[index]) == error.prompt_tokens]
    param = field_of(longest[0], len(ids)) if longest else "input"
    return ContextExceeded(error.context, error.prompt_tokens, param=param, hint=error.hint)


# The most documents of a call, and the most bytes of a call of several: about 2,000 tokens.
MOST_DOCUMENTS, CALL_BYTES = 64, 2**13


async def rank(server: Server, job: Ranking) -> Scores:
    """Score documents in calls of bounded size; each takes a place in the queue.

    The server itself makes the prompt. If the model's file has a template for it, the server parses
    control tokens that a document or the query spells; otherwise they are text.

    Raises:
        NotServed: the model is not a reranker, or the server was not started for it.
        ContextExceeded: query and document are longer than the context or the server's batch.
    """
    server.turns.check(job.ticket)
    model = await server.monitor.get_for(job)
    ticket = job.ticket or Ticket()
    facts = await embedder(server, model, ticket)
    if not facts.ranks:
        raise NotServed("rank", ENGINE, facts.rank_hint)
    query = len(job.query.encode())
    sizes = [query + len(document.encode()) for document in job.documents]
    found = await map_concurrently(
        _scores(server, model, job, list(group), sizes, ticket)
        for group in grouped(sizes, MOST_DOCUMENTS, CALL_BYTES)
    )
    scores = {index: score for part, _ in found for index, score in part.items()}
    ordered = [scores[index] for index in range(len(job.documents))]
    return Scores(ordered, sum(tokens for _, tokens in found))


async def _scores(
    server: Server,
    model: Model,
    job: Ranking,
    group: list[int],
    sizes: list[int],
    ticket: Ticket,
) -> tuple[dict[int, float], int]:
    """Return the score of each document of a group, by its index, and the number of tokens."""
    payload: RerankPayload = {
        "query": job.query,
        "documents": [job.documents[index] for index in group],
    }
    data = await offload.run(sum(sizes[index] for index in group), orjson.dumps, payload)
    status, body = await server.batch("/rerank", data, ticket, model)
    if status == 200:
        with read_from(ENGINE, "/rerank"):
            scores, tokens = await offload.run(len(body), read_scores, body, len(group))
            return dict(zip(group, scores, strict=True)), tokens
    error = _ranking_error(status, body)
    if not isinstance(error, ContextExceeded):
        raise error
    if len(group) == 1:
        param = f"documents[{group[0]}]"
        # A larger batch helps up to the context only.
        hint = error.hint if error.context < context_of(model) else ""
        raise ContextExceeded(error.context, error.prompt_tokens, param=param, hint=hint)
    # The server does not say which document is too long: most likely the one with the most bytes.
    scored: dict[int, float] = {}
    total = 0
    for index in sorted(group, key=lambda index: -sizes[index]):
        one, tokens = await _scores(server, model, job, [index], sizes, ticket)
        scored |= one
        total += tokens
    return scored, total


def _ranking_error(status: int, body: bytes) -> LatimerError:
    return NotServed("rank", ENGINE, RERANKING_OFF) if status == 501 else to_error(status, body)
