"""Endpoints of OpenAI's API that are refused by name."""

from __future__ import annotations

from ...backends.errors import shortened
from ..errors import InvalidRequest
from ..request import Exchange
from ..service import Service


async def refuse(exchange: Exchange, _service: Service, *_values: str) -> None:
    """Refuse a request; with 404, because clients repeat it after an error of the server.

    Raises:
        InvalidRequest: always.
    """
    asked = shortened(f"{exchange.scope['method']} {exchange.scope['path']}")
    raise InvalidRequest(
        f"This server does not serve {asked}.", code="unsupported_endpoint", status=404
    )
