"""An application whose ingress reads the body, and calls the deployment with the engine.

A router could choose the engine by the prompt's prefix there. It is used to measure what this costs
(tests/ray), and is not a part of Latimer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from latimer.adapter import OpenAIAdapter
from latimer.backends.llama_cpp import LlamaCpp
from ray import serve
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

# What the adapter reads of a scope.
FIELDS = ("type", "method", "path", "root_path", "raw_path", "query_string", "headers", "scheme")


class Engine:
    """The deployment with the engine."""

    def __init__(self) -> None:
        self._app = OpenAIAdapter(LlamaCpp(), store="off")

    async def answer(self, scope: Scope, body: bytes) -> AsyncIterator[MutableMapping[str, Any]]:
        """Yield the ASGI messages of a response."""
        messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> MutableMapping[str, Any]:
            for message in received:
                return message
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(self._app(scope, receive, messages.put))
        while True:
            message = await messages.get()
            yield message
            if message["type"] == "http.response.body" and not message.get("more_body"):
                break
        await task


def _ingress() -> Starlette:
    async def pass_on(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        known = {name: scope[name] for name in FIELDS if name in scope}
        engine = serve.get_deployment_handle("Engine", app_name="two-hops")
        async for message in engine.answer.options(stream=True).remote(known, body):
            await send(message)

    return Starlette(routes=[Mount("/", pass_on)])


class Front:
    """The deployment with the ingress."""

    def __init__(self, engine: Any) -> None:
        # Ray Serve starts the deployments that are bound.
        del engine


options: dict[str, Any] = {"max_ongoing_requests": 32, "ray_actor_options": {"num_cpus": 0.1}}
app = serve.deployment(**options)(serve.ingress(_ingress)(Front)).bind(
    serve.deployment(**options)(Engine).bind()
)
