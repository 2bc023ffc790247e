"""`GET /health`: the readiness of the engine."""

from __future__ import annotations

from ..exchange import Exchange
from ..service import Service


async def health(exchange: Exchange, service: Service) -> None:
    """Respond with 200 if the engine is ready and 503 if it is not; no API key is needed."""
    await service.health()
    await exchange.reply(200, b'{"status":"ok"}')
