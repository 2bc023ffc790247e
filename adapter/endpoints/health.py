"""`GET /health`: whether the engine can answer now."""

from __future__ import annotations

from ..exchange import Exchange
from ..service import Service


async def health(exchange: Exchange, service: Service) -> None:
    """Answer 200 when the engine is ready, 503 when it is not; needs no API key."""
    await service.health()
    await exchange.reply(200, b'{"status":"ok"}')
