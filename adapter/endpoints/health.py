"""`GET /health`: the readiness of the engine, and the state of the store."""

from __future__ import annotations

from typing import Any

import orjson

from ..errors import StoreUnavailable
from ..request import Exchange
from ..service import Service

# The reasons in the error of a store that is required. Hosts and paths are in the log only.
_REASONS = {"unavailable": "the database does not answer", "full": "its queue is full"}


async def health(exchange: Exchange, service: Service) -> None:
    """Respond with 200 if the engine is ready and 503 if it is not; no API key is needed.

    A store that is not available is a 503 only if it is required.
    """
    await service.health()
    report: dict[str, Any] = {"status": "ok"}
    if service.store is not None:
        state, waiting, lost = service.store.status()
        report["store"] = {"status": state}
        if state != "ok":
            if service.store.place.required:
                raise StoreUnavailable(_REASONS[state])
            report["store"] |= {"waiting": waiting, "lost": lost}
    await exchange.reply(200, orjson.dumps(report))
