"""`GET /v1/models` and `GET /v1/models/{model}` (contract, section 5)."""

from __future__ import annotations

from urllib.parse import unquote

import orjson

from ...backends.base import Model
from ...schemas.openai.models import ModelList, ModelObject
from ..exchange import Exchange
from ..service import Service


async def list_models(exchange: Exchange, service: Service) -> None:
    """List every model name that requests may use."""
    models = await service.models()
    reply: ModelList = {
        "object": "list",
        "data": [_object(name, model) for name, model in models.items()],
    }
    await exchange.reply(200, orjson.dumps(reply))


async def retrieve_model(exchange: Exchange, service: Service, name: str) -> None:
    """Return one model; slashes in its name may be URL-encoded, once or twice."""
    names = await service.models()
    if name not in names and unquote(name) in names:
        name = unquote(name)
    served = await service.resolve(name)
    await exchange.reply(200, orjson.dumps(_object(name, served.model)))


def _object(name: str, model: Model) -> ModelObject:
    return {"id": name, "object": "model", "created": model.modified, "owned_by": "latimer"}
