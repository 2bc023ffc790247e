"""`POST /v1/rerank`, in the shape that Jina, Cohere and llama-server share."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Ranking, Sampling, Scores
from ...backends.turns import Party
from ...schemas.openai.rerank import RerankRequest, RerankResult
from ..parts import Parts
from ..request import Exchange
from ..service import Service
from ..validation import notes, read

_REQUEST = TypeAdapter(RerankRequest)


async def rerank(exchange: Exchange, service: Service) -> None:
    """Sort documents by their relevance to a query."""
    request = await read(exchange, _REQUEST)
    served = await service.resolve(request.model)
    await notes(exchange, request, Sampling(), served.capabilities, served.policy.strict)
    documents = [one if isinstance(one, str) else one.text for one in request.documents]
    job = Ranking(request.query, documents, Party(), served.model.fingerprint)
    found = await served.backend.rank(job)
    parts = await offload.run(exchange.size, _reply, request, served.name, documents, found)
    await exchange.reply_in_parts(parts)


def _reply(
    request: RerankRequest, name: str, documents: Sequence[str], found: Scores
) -> Sequence[bytes]:
    """Return the response in parts; of equal scores, the earlier document is first."""
    order = sorted(range(len(documents)), key=lambda index: -found.scores[index])
    parts = Parts()
    parts.add(b'{"object":"list","model":%b,"results":[' % orjson.dumps(name))
    for place, index in enumerate(order[: request.top_n]):
        result: RerankResult = {"index": index, "relevance_score": found.scores[index]}
        if request.return_documents:
            result["document"] = {"text": documents[index]}
        parts.add(b"," * bool(place) + orjson.dumps(result))
    count = found.prompt_tokens
    parts.add(b'],"usage":%b}' % orjson.dumps({"prompt_tokens": count, "total_tokens": count}))
    return parts.end()
