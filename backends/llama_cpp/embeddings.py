"""Jobs of embeddings and rankings for the engine's thread."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .. import offload
from ..base import Content, Embedding, EmbeddingModel, Embeddings, Ranking, Scores, Text, TokenIds
from ..embeddings import field_of
from ..errors import (
    ContextExceeded,
    EmptyPrompt,
    NotServed,
    WordTooLong,
    check_ids,
    check_length,
)
from .options import ENGINE

if TYPE_CHECKING:
    from .embedder import Embedder
    from .loading import Engine
    from .vocabulary import Vocabulary


def facts_of(engine: Engine) -> EmbeddingModel | None:
    """Return the facts about an engine's embeddings; None if it has none."""
    if engine.embedder is None:
        return None
    context = engine.embedder.context
    return EmbeddingModel(
        0 if context.pooling == "rank" else context.dimensions,
        context.pooling,
        context.length,
        engine.generator is not None,
    )


async def embed(engine: Engine, job: Embedding) -> Embeddings:
    """Run a job of embeddings.

    Raises:
        NotServed: the engine has no embeddings, or the model is a reranker.
        ContextExceeded: an input is too long.
        EmptyPrompt: an input has no tokens.
        UnknownToken: an id is not in the vocabulary.
    """
    embedder, vocabulary = engine.embedder, engine.vocabulary
    if embedder is None:
        hint = "Start the server with --embeddings, or with an embedding model."
        raise NotServed("embed", ENGINE, hint)
    if embedder.context.pooling == "rank":
        raise NotServed("embed", ENGINE, "Did you mean to use v1/rerank?")
    length, size = embedder.context.length, sum(map(_size, job.inputs))

    def tokens() -> tuple[list[TokenIds], int]:
        found = [
            _ids(one, vocabulary, length, field_of(index, len(job.inputs)))
            for index, one in enumerate(job.inputs)
        ]
        # Special tokens are added to texts only.
        added = sum(isinstance(one, Text) for one in job.inputs) * vocabulary.special_count
        return found, sum(map(len, found)) - added

    inputs, count = await offload.run(size, tokens)
    return Embeddings(await _run(engine, embedder, inputs), count)


async def rank(engine: Engine, job: Ranking) -> Scores:
    """Run a ranking.

    Raises:
        NotServed: the model is not a reranker.
        ContextExceeded: the query and a document are too long together.
    """

    from .embedder import RankPrompts

    embedder, vocabulary = engine.embedder, engine.vocabulary
    if embedder is None or embedder.context.pooling != "rank":
        raise NotServed("rank", ENGINE, "Start the server with a reranking model.")
    length = embedder.context.length
    total = len(job.query) + sum(map(len, job.documents))

    def tokens() -> tuple[list[TokenIds], int]:
        prompts = RankPrompts(vocabulary, engine.rerank, job.query)
        found, count = [], 0
        for index, document in enumerate(job.documents):
            param = f"documents[{index}]"
            with _read(len(job.query) + len(document), vocabulary, length, param):
                ids, own = prompts.ids(document)
            _check(ids, length, param)
            found.append(ids)
            count += own
        return found, count

    inputs, count = await offload.run(total, tokens)
    return Scores([one[0] for one in await _run(engine, embedder, inputs)], count)


async def _run(
    engine: Engine, embedder: Embedder, inputs: Sequence[TokenIds]
) -> list[array[float]]:
    """Return the vectors of inputs; equal inputs are evaluated once, and so have equal vectors."""
    from .embedder import EmbeddingTask, Mailbox

    # A thousand long inputs take milliseconds to compare.
    distinct, places = await offload.run(sum(map(len, inputs)), _distinct, inputs)
    mailbox = Mailbox(asyncio.get_running_loop())
    task = EmbeddingTask(distinct, mailbox)
    engine.loop.submit(embedder, task)
    try:
        found = await mailbox.found
    finally:
        task.cancelled = True
    return [found[place] for place in places]


def _distinct(inputs: Sequence[TokenIds]) -> tuple[list[TokenIds], list[int]]:
    """Return the inputs without repetitions, and the place of each input among these."""
    found: dict[TokenIds, int] = {}
    places = [found.setdefault(one, len(found)) for one in inputs]
    return list(found), places


def _size(content: Content) -> int:
    return len(content.text) if isinstance(content, Text) else len(content)


def _ids(content: Content, vocabulary: Vocabulary, length: int, param: str) -> TokenIds:
    """Return the tokens of an input, with special tokens if it is text."""
    if isinstance(content, Text):
        with _read(len(content.text), vocabulary, length, param):
            ids = vocabulary.tokenize(
                content.text, add_special=True, parse_special=content.parse_special
            )
    else:
        check_ids(param, content, vocabulary.size)
        ids = content
    _check(ids, length, param)
    return ids


@contextmanager
def _read(size: int, vocabulary: Vocabulary, length: int, param: str) -> Iterator[None]:
    """Reject a text that cannot fit, before it is tokenized; name its field in other errors."""
    if vocabulary.covers_texts:
        check_length(size, vocabulary.longest, length, None, param)
    try:
        yield
    except WordTooLong as error:
        raise WordTooLong(error.most, error.beginning, param) from None


def _check(ids: TokenIds, length: int, param: str) -> None:
    if not ids:
        raise EmptyPrompt(param)
    if len(ids) > length:
        raise ContextExceeded(length, len(ids), param=param)
