"""Embeddings of koboldcpp through its native `POST /api/extra/embeddings`."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

from ...schemas.native.koboldcpp import EmbeddingsPayload
from ..base import Content, Embedding, EmbeddingModel, Embeddings, Model, Text
from ..embeddings import field_of, grouped, is_memory, unit
from ..errors import (
    EmptyPrompt,
    EngineError,
    LatimerError,
    NotServed,
    Refused,
    Unsupported,
    read_from,
    whole_of,
)
from ..queue import Ticket
from .server import Embedder, Server
from .translate import ENGINE

NOT_STARTED = "Start koboldcpp with --embeddingsmodel."
NOT_POOLED = (
    "Its embedding model does not pool tokens, so every vector is that of the first token. Start "
    "koboldcpp with an embedding model."
)
NO_RANKS = "Use llama-server or the in-process engine with a reranking model."
NO_VECTORS = "Its embedding model returns no vectors. A reranking model does not work there."
TOO_LONG = (
    "it returned no vector for this input. Shorter input works, so this one is probably longer "
    "than the context of its embedding model (--embeddingsmaxctx)"
)


def read_vectors(reply: Any, count: int) -> tuple[list[array[float] | None], int]:
    """Return the vectors of a reply, None for a failed text, and the number of tokens.

    Raises:
        LookupError, TypeError, ValueError: the reply is malformed.
    """
    found: dict[int, array[float] | None] = {}
    entries = reply["data"]
    for entry in entries:
        vector = array("f", b64decode(entry["embedding"], validate=True))
        if sys.byteorder == "big":
            vector.byteswap()
        # The engine has six decimals of each number.
        found[whole_of(entry["index"], 0, count - 1)] = unit(vector) if any(vector) else None
    if len(entries) != count:
        raise ValueError(f"{len(entries)} vectors instead of {count}")
    return [found[index] for index in range(count)], whole_of(reply["usage"]["prompt_tokens"])


PATH = "/api/extra/embeddings"
# The largest number of texts in a call, and the largest number of characters of several texts, for
# each of the texts that may be in the call.
MOST_INPUTS, CHARACTERS = 128, 512
# The engine computes texts one after the other, and chat waits for the whole call. A call that took
# fewer seconds than the first is followed by one of twice as many texts, one that took more than
# the second by one of half as many. Each call costs 0.05 s in which the engine sleeps.
SHORT, LONG = 0.2, 0.5
# Its count of tokens includes special tokens that it adds.
INEXACT = frozenset({"usage"})
# Two texts that begin with the same token.
TEST = ("1", "1 2 3")


async def embedding_model(server: Server) -> EmbeddingModel | None:
    """Return the facts about the engine's embeddings, or None if it has none."""
    model = await server.monitor.get()
    if server.embeds and server.embedder.value is None and server.turns.is_full:
        # Unknown until a place was free once.
        return EmbeddingModel(None, None, None, server.generates, INEXACT)
    facts = await _embedder(server, model, Ticket())
    if facts.hint:
        return None
    return EmbeddingModel(facts.dimensions, None, None, server.generates, INEXACT)


async def embed(server: Server, job: Embedding) -> Embeddings:
    """Embed texts in small calls; chat and other jobs take turns with them.

    The engine parses the control tokens that a text spells. Its count of tokens includes special
    tokens that it adds.

    Raises:
        NotServed: the engine has no embedding model.
        Refused: the engine did not embed an input, but does embed short ones.
    """
    server.turns.check(job.ticket)
    model = await server.monitor.get_for(job)
    ticket = job.ticket or Ticket()
    facts = await _embedder(server, model, ticket)
    if facts.hint:
        raise NotServed("embed", ENGINE, facts.hint)
    texts = _texts(job.inputs)
    vectors: list[array[float]] = []
    count = 0
    sizes = list(map(len, texts))
    while len(vectors) < len(texts):
        start, most = len(vectors), server.embeds_at_once
        first = next(grouped(sizes[start : start + most], most, most * CHARACTERS))
        group = range(start, start + len(first))
        found, tokens = await _call(server, model, texts[group.start : group.stop], ticket)
        for index, vector in zip(group, found, strict=True):
            if vector is None:
                raise await _failed(server, model, field_of(index, len(texts)), ticket)
            if len(vector) != facts.dimensions:
                raise EngineError(f"{ENGINE} sent vectors of different lengths.")
            vectors.append(vector)
        count += tokens
    return Embeddings(vectors, count)


def _texts(inputs: Sequence[Content]) -> list[str]:
    """Return the texts of inputs.

    Raises:
        Unsupported: an input is token ids, or has a character at which the engine ends a text.
        EmptyPrompt: an input is empty.
    """
    texts = []
    for index, one in enumerate(inputs):
        param = field_of(index, len(inputs))
        if not isinstance(one, Text):
            hint = (
                "Its embedding model's vocabulary is unknown. Send text, or name the vocabulary "
                "of the ids in 'logit_bias_vocabulary' or --logit-bias-vocabulary."
            )
            raise Unsupported("input", ENGINE, hint)
        if not one.text:
            raise EmptyPrompt(param)
        if "\0" in one.text:
            hint = "It ends a text at a null character (U+0000). Remove that character."
            raise Unsupported(param, ENGINE, hint)
        texts.append(one.text)
    return texts


async def _embedder(server: Server, model: Model, ticket: Ticket) -> Embedder:
    """Return the facts about the embedding model; the first call embeds two short texts."""
    if not server.embeds:
        return Embedder(hint=NOT_STARTED)

    async def learn() -> Embedder:
        one, other = (await _call(server, model, TEST, ticket))[0]
        server.monitor.check_is(model)
        if one is None or other is None or is_memory(one):
            return Embedder(hint=NO_VECTORS)
        return Embedder(hint=NOT_POOLED) if one == other else Embedder(len(one))

    return server.embedder.value or await server.embedder.get(learn)


async def _failed(server: Server, model: Model, param: str, ticket: Ticket) -> LatimerError:
    """Return the error for an input without a vector; the engine reports no reason."""
    short = (await _call(server, model, TEST[:1], ticket))[0][0]
    if short is None:
        return EngineError(f"{ENGINE} returned no vector for '{param}', nor for a short text.")
    return Refused(param, ENGINE, TOO_LONG)


async def _call(
    server: Server, model: Model, texts: Sequence[str], ticket: Ticket
) -> tuple[list[array[float] | None], int]:
    """Embed texts with one call in a turn; return a vector or None for each, and the tokens."""
    await server.turns.take(ticket)
    # A cancelled caller does not end the call, so its turn lasts as long as the engine computes.
    reply = await asyncio.shield(server.background(_asked(server, model, texts)))
    with read_from(ENGINE, PATH):
        return read_vectors(reply, len(texts))


async def _asked(server: Server, model: Model, texts: Sequence[str]) -> Any:
    payload: EmbeddingsPayload = {
        "input": texts,
        "truncate": False,
        "encoding_format": "base64",
    }
    try:
        await server.check_still(model)
        return await server.once_free(lambda: _timed(server, payload))
    finally:
        server.turns.release()


async def _timed(server: Server, payload: EmbeddingsPayload) -> Any:
    """Send a call, and choose the size of the next one."""
    texts = payload["input"]
    begin = time.monotonic()
    reply = await server.ask("POST", PATH, payload, sum(map(len, texts)))
    seconds = time.monotonic() - begin
    if seconds > LONG:
        server.embeds_at_once = max(1, len(texts) // 2)
    elif seconds < SHORT and len(texts) >= server.embeds_at_once:
        server.embeds_at_once = min(2 * len(texts), MOST_INPUTS)
    return reply
