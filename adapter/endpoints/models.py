"""`GET /v1/models` and `GET /v1/models/{model}` (contract, section 5)."""

from __future__ import annotations

from urllib.parse import unquote

import orjson

from ...backends.base import Model
from ...schemas.openai.models import ModelList, ModelObject
from ..exchange import Exchange
from ..service import Service


async def list_models(exchange: Exchange, service: Service) -> None:
    """Answer with every name that requests may use."""
    model = await service.backend.model()
    reply: ModelList = {
        "object": "list",
        "data": [_object(name, model) for name in service.names_of(model)],
    }
    await exchange.reply(200, orjson.dumps(reply))


async def retrieve_model(exchange: Exchange, service: Service, name: str) -> None:
    """Answer with one model; slashes in its name may be URL-encoded, once or twice."""
    names = service.names_of(await service.backend.model())
    if name not in names and unquote(name) in names:
        name = unquote(name)
    model = await service.resolve(name)
    await exchange.reply(200, orjson.dumps(_object(name, model)))


def _object(name: str, model: Model) -> ModelObject:
    return {"id": name, "object": "model", "created": model.modified, "owned_by": "latimer"}
