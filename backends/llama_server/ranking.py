"""Rankings of llama-server through its native `POST /rerank`."""

from __future__ import annotations

import orjson

from ...schemas.native.llama_server import RerankPayload
from .. import offload
from ..base import Model, Ranking, Scores
from ..embeddings import grouped
from ..errors import ContextExceeded, LatimerError, NotServed, read_from
from ..streams import in_order
from ..turns import Party
from .embedding import embedder
from .events import ENGINE
from .server import Server
from .translate import to_error
from .vectors import RERANKING_OFF, read_scores

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
    server.turns.check(job.party)
    model = await server.known.get_for(job)
    party = job.party or Party()
    facts = await embedder(server, model, party)
    if not facts.ranks:
        raise NotServed("rank", ENGINE, facts.rank_hint)
    query = len(job.query.encode())
    sizes = [query + len(document.encode()) for document in job.documents]
    found = await in_order(
        _scores(server, model, job, list(group), sizes, party)
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
    party: Party,
) -> tuple[dict[int, float], int]:
    """Return the score of each document of a group, by its index, and the number of tokens."""
    payload: RerankPayload = {
        "query": job.query,
        "documents": [job.documents[index] for index in group],
    }
    data = await offload.run(sum(sizes[index] for index in group), orjson.dumps, payload)
    status, body = await server.batch("/rerank", data, party, model)
    if status == 200:
        with read_from(ENGINE, "/rerank"):
            scores, tokens = await offload.run(len(body), read_scores, body, len(group))
            return dict(zip(group, scores, strict=True)), tokens
    error = _error(status, body)
    if not isinstance(error, ContextExceeded):
        raise error
    if len(group) == 1:
        param = f"documents[{group[0]}]"
        raise ContextExceeded(error.context, error.prompt_tokens, param=param, hint=error.hint)
    # The server does not say which document is too long: most likely the one with the most bytes.
    scored: dict[int, float] = {}
    total = 0
    for index in sorted(group, key=lambda index: -sizes[index]):
        one, tokens = await _scores(server, model, job, [index], sizes, party)
        scored |= one
        total += tokens
    return scored, total


def _error(status: int, body: bytes) -> LatimerError:
    return NotServed("rank", ENGINE, RERANKING_OFF) if status == 501 else to_error(status, body)
