"""Tests that `service_tier` decides which request is next, on engines that run one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx2
import pytest
from latimer.backends.base import Generation, Prompt, Sampling, Text
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.backends.queue import MOST_PASSED
from support.clients import adapting
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.llama_server import FakeLlamaServer

ENDLESS = Generation(
    Prompt(Text("endless slow:1")), 1_900, sampling=Sampling(0.0, extras={"ignore_eos": True})
)


@dataclass
class Engine:
    """A served engine that runs one choice at a time.

    Attributes:
        order: the names of the requests whose responses have arrived.
    """

    backend: LlamaCpp | LlamaServer | KoboldCpp
    client: httpx2.AsyncClient
    order: list[str]

    async def ask(self, name: str, **fields: object) -> None:
        """Send a chat request, and note its name when its response has arrived."""
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1, **fields}
        reply = await self.client.post("/v1/chat/completions", json=body)
        assert reply.is_success, reply.text
        self.order.append(name)

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        if isinstance(self.backend, LlamaCpp):
            return self.backend._requests - 1
        return len(self.backend.server.turns._waiting.requests)

    @asynccontextmanager
    async def occupied(self, count: int) -> AsyncIterator[None]:
        """Occupy the engine until the requests of the block wait."""
        async with self.backend.open(ENDLESS) as batches:
            await anext(aiter(batches))
            yield
            while self.waiting < count:
                await asyncio.sleep(0.001)


@pytest.fixture(params=["llama_cpp", "llama_server", "koboldcpp"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """An engine that runs one choice at a time."""
    async with AsyncExitStack() as stack:
        backend: LlamaCpp | LlamaServer | KoboldCpp
        if request.param == "llama_cpp":
            backend = LlamaCpp(context=2048, parallel=1, threads=1)
        elif request.param == "llama_server":
            backend = LlamaServer((await stack.enter_async_context(FakeLlamaServer(slots=1))).url)
        else:
            backend = KoboldCpp((await stack.enter_async_context(FakeKoboldcpp())).url)
        client = await stack.enter_async_context(adapting(backend))
        yield Engine(backend, client, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_priority_goes_first_and_flex_last(engine: Engine, stream: bool) -> None:
    """Requests that wait are served by tier, plain or streamed."""
    tiers = ("flex", "auto", "default", "scale", None, "fast", "priority")
    async with engine.occupied(len(tiers)):
        waiting = []
        for tier in tiers:
            fields = {"service_tier": tier} if tier else {}
            waiting.append(asyncio.create_task(engine.ask(str(tier), stream=stream, **fields)))
    await asyncio.gather(*waiting)
    assert {*engine.order[:2]} == {"fast", "priority"}
    assert {*engine.order[2:-1]} == {"auto", "default", "scale", "None"}
    assert engine.order[-1] == "flex"


async def test_choices_have_the_tier_of_their_request(engine: Engine) -> None:
    """All choices of a request with priority precede the choices of other requests."""
    async with engine.occupied(3):
        waiting = [
            asyncio.create_task(engine.ask(tier, service_tier=tier, n=4))
            for tier in ("flex", "default", "priority")
        ]
    await asyncio.gather(*waiting)
    assert engine.order == ["priority", "default", "flex"]


@pytest.mark.parametrize("engine", ["llama_server", "koboldcpp"], indirect=True)
async def test_native_responses_have_tiers(engine: Engine) -> None:
    """Requests for the engine's own response are served by tier, too."""
    async with engine.occupied(2):
        waiting = [
            asyncio.create_task(engine.ask(tier, service_tier=tier, oai_compat=False))
            for tier in ("flex", "priority")
        ]
    await asyncio.gather(*waiting)
    assert engine.order == ["priority", "flex"]


async def test_flex_is_served_within_the_bound(engine: Engine) -> None:
    """A flex request is served while clients send one request with priority after another."""

    async def client() -> None:
        while "flex" not in engine.order:
            await engine.ask("priority", service_tier="priority")

    async with engine.occupied(21):
        flex = asyncio.create_task(engine.ask("flex", service_tier="flex"))
        clients = asyncio.gather(*(client() for _ in range(20)))
    await flex
    await clients
    # Responses of two turns can arrive in the other order.
    assert MOST_PASSED - 3 <= engine.order.index("flex") <= MOST_PASSED + 2
