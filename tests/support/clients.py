"""HTTP clients of apps in the same event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from latimer.adapter import OpenAIAdapter
from latimer.adapter.app import Options
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
