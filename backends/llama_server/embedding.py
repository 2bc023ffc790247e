"""Embeddings of llama-server through its native `POST /embedding`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import orjson

from ...schemas.native.llama_server import EmbeddingPayload, TokenizePayload
from .. import offload
from ..base import Content, Embedding, EmbeddingModel, Embeddings, Model, Pooling, Text, TokenIds
from ..embeddings import field_of, grouped
from ..errors import (
    LARGEST,
    ContextExceeded,
    EmptyPrompt,
    EngineUnavailable,
    LatimerError,
    NotServed,
    RequestError,
    check_ids,
    read_from,
)
from ..streams import in_order
from ..turns import Party
from .events import ENGINE
from .server import Server
from .translate import to_error
from .vectors import (
    EMBEDDINGS_OFF,
    RANKS_ONLY,
    TOO_OLD,
    Embedder,
    around,
    parted,
    read_vectors,
    separated,
    tested,
    untested,
)

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

    Facts that need a place for a call are unknown, or assumed, until a place was free once.
    """
    model = await server.known.get()
    if server.embedder is None and server.turns.is_full and await _served(server) is None:
        return EmbeddingModel(None, None, context_of(model))
    facts = await embedder(server, model, Party())
    if facts.hint and not facts.ranks:
        return None
    generates = await _generates(server, model)
    pooling: Pooling | None = "rank" if facts.ranks else None
    return EmbeddingModel(facts.dimensions, pooling, context_of(model), generates)


async def embed(server: Server, job: Embedding) -> Embeddings:
    """Embed inputs in calls of bounded size, several at a time; each takes a place in the queue.

    Raises:
        NotServed: the server has no embeddings, or does not pool them.
        ContextExceeded: an input is longer than the context or the server's batch.
    """
    server.turns.check(job.party)
    model = await server.known.get_for(job)
    party = job.party or Party()
    facts = await embedder(server, model, party)
    if facts.hint:
        raise NotServed("embed", ENGINE, facts.hint)
    ids, count = await _input_ids(server, job.inputs, facts, model)
    most = min(max(REPLY // (NUMBER * facts.dimensions), 1), MOST_INPUTS)
    found = await in_order(
        _vectors(server, model, facts, ids, group, party)
        for group in grouped(map(len, ids), most, CALL_TOKENS)
    )
    return Embeddings([vector for part in found for vector in part], count)


async def embedder(server: Server, model: Model, party: Party) -> Embedder:
    """Return the facts about the server's embeddings; the first call asks for them."""
    facts = server.embedder
    if facts is None:
        async with server.learning_embedder:
            facts = server.embedder
            if facts is None:
                facts = await _read_embedder(server, party)
                server.known.check_is(model)
                server.embedder = facts
    return facts


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


async def _read_embedder(server: Server, party: Party) -> Embedder:
    facts = await _served(server)
    if facts is not None:
        return facts
    plain = await server.plain(WORD)
    whole = await server.tokenize(WORD, add_special=True, parse_special=False)
    with read_from(ENGINE, "its special tokens"):
        prefix, suffix = around(whole, plain)
    # Of two tokens at least, so that vectors that are not pooled show.
    status, data = await _post(server, "/embedding", _payload([whole + whole]), party)
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
        status, data = await _post(server, "/completion", test, Party())
        error = None if status == 200 else to_error(status, data)
        if isinstance(error, EngineUnavailable):
            raise error
        generates = not isinstance(error, NotServed)
        server.known.check_is(model)
        server.generates = generates
    return generates


async def _post(server: Server, path: str, payload: Any, party: Party) -> tuple[int, bytes]:
    return await server.call(path, orjson.dumps(payload), party)


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

    found = await in_order(ids(group) for group in grouped(sizes, MOST_INPUTS, TOKENIZED))
    return [one for part in found for one in part]


async def _vectors(
    server: Server,
    model: Model,
    facts: Embedder,
    ids: list[TokenIds],
    group: range,
    party: Party,
) -> list[array[float]]:
    """Embed a group of inputs with one call."""
    own = ids[group.start : group.stop]
    data = await offload.run(6 * sum(map(len, own)), orjson.dumps, _payload(own))
    status, body = await server.batch("/embedding", data, party, model)
    if status != 200:
        raise _named(_error(status, body), ids, group)
    with read_from(ENGINE, "/embedding"):
        return await offload.run(len(body), read_vectors, body, len(group), facts.dimensions)


def _error(status: int, body: bytes) -> LatimerError:
    return NotServed("embed", ENGINE, EMBEDDINGS_OFF) if status == 501 else to_error(status, body)


def _named(error: LatimerError, ids: list[TokenIds], group: range) -> LatimerError:
    """Return an error that names the input that is too long, by its number of tokens."""
    if not isinstance(error, ContextExceeded):
        return error
    longest = [index for index in group if len(ids[index]) == error.prompt_tokens]
    param = field_of(longest[0], len(ids)) if longest else "input"
    return ContextExceeded(error.context, error.prompt_tokens, param=param, hint=error.hint)
