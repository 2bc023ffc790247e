"""HTTP clients of apps in the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from latimer.adapter import OpenAIAdapter
from latimer.adapter.arguments import Options
from latimer.backends.base import Backend
from typing_extensions import Unpack


@asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an ASGI app."""
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(
        transport=transport, base_url="http://latimer", timeout=60
    ) as client:
        yield client


class Leaving:
    """An app whose clients disconnect after their requests, as soon as `gone` is set."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        sent = False

        async def received() -> Any:
            nonlocal sent
            if sent:
                await self.gone.wait()
                return {"type": "http.disconnect"}
            message = await receive()
            sent = not message.get("more_body", False)
            return message

        await self.app(scope, received, send)


@asynccontextmanager
async def adapting(
    backend: Backend, **options: Unpack[Options]
) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an adapter over a backend, which accepts every model name."""
    options.setdefault("any_model", True)
    app = OpenAIAdapter(backend, **options)
    async with client_of(app) as client:
        yield client
    await app.aclose()
