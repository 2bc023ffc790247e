"""Tests of the check that an engine has the same model, and of engines that start later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from latimer.backends.base import Backend, Generation, Prompt, Text
from latimer.backends.errors import EngineUnavailable, LatimerError
from latimer.backends.fleet.pool import Pool
from latimer.backends.identity import LazyBackend
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.backends.single_flight import MOMENT
from support.servers import canned

PROPS = b'{"default_generation_settings":{"n_ctx":512},"model_path":"a.gguf","build_info":"b1"}'


async def test_requests_after_a_pause_share_one_check() -> None:
    """Of 64 requests after a pause, none waits for the check of its model that another began."""
    answers = {"/props": (200, PROPS), "/v1/models": (404, b"{}"), "*": (200, b'{"tokens":[]}')}
    with canned(answers) as (address, asked):
        backend = LlamaServer(address)
        await backend.model()
        backend.server.monitor.invalidate()
        asked.clear()
        first = asyncio.create_task(backend.model())
        await asyncio.sleep(0)
        await asyncio.gather(first, *(backend.model() for _ in range(63)))
        assert asked.count("/props") == 1
        await backend.aclose()


LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'


def always(backend: Backend) -> Callable[[], Awaitable[Backend]]:
    """Return a function that finds the same backend each time."""

    async def find() -> Backend:
        return backend

    return find


async def test_many_calls_cost_few_connections() -> None:
    """2,000 concurrent calls while the engine loads cost at most five requests to it."""
    with canned({"*": (503, LOADING)}) as (address, asked):
        backend = LazyBackend(always(LlamaServer(address)))
        errors = await asyncio.gather(
            *(backend.model() for _ in range(1000)),
            *(backend.health() for _ in range(500)),
            *(backend.tokenize("a", add_special=True, parse_special=True) for _ in range(500)),
            return_exceptions=True,
        )
        assert all(isinstance(error, EngineUnavailable) for error in errors)
        assert 1 <= len(asked) <= 5
        await backend.aclose()


HEALTHY = b'{"status":"ok","result":"KoboldCpp","version":"1.115.1"}'


@pytest.mark.parametrize("kind", [LlamaServer, KoboldCpp])
async def test_health_is_asked_once_for_many(kind: Callable[[str], Backend]) -> None:
    """50 concurrent health checks cost the engine one request."""
    with canned({"*": (200, HEALTHY)}) as (address, asked):
        backend = kind(address)
        await asyncio.gather(*(backend.health() for _ in range(50)))
        await backend.health()
        assert asked == ["/health" if kind is LlamaServer else "/api/extra/version"]
        await backend.aclose()


async def test_the_engine_is_found_when_it_is_there(llama_server_url: str) -> None:
    """The backend finds an engine that starts later, and reports no extras before that."""
    engines: list[Backend] = []

    async def find() -> Backend:
        if not engines:
            raise EngineUnavailable("nobody is there")
        return engines[0]

    backend = LazyBackend(find, "llama-server")
    with pytest.raises(EngineUnavailable):
        await backend.model()
    with pytest.raises(EngineUnavailable):
        backend.open(Generation(Prompt(Text("a")), 1))
    assert backend.capabilities.engine == "llama-server"
    assert not backend.capabilities.extras
    engines.append(LlamaServer(llama_server_url))
    await asyncio.sleep(MOMENT)
    assert (await backend.model()).name == "demo.gguf"
    assert backend.capabilities.extras
    async with backend.open(Generation(Prompt(Text("a")), 2)) as batches:
        assert [batch async for batch in batches]
    assert await backend.detokenize(
        await backend.tokenize("a", add_special=False, parse_special=False)
    )
    await backend.health()
    await backend.aclose()


async def test_a_call_that_leaves_does_not_take_others_with_it() -> None:
    """Another waiting call takes over the search when the call that searches is cancelled."""
    begun, asked = asyncio.Event(), 0
    engine = LlamaCpp()

    async def find() -> Backend:
        nonlocal asked
        asked += 1
        begun.set()
        if asked == 1:
            await asyncio.sleep(60)
        return engine

    backend = LazyBackend(find)
    first = asyncio.create_task(backend.model())
    await begun.wait()
    others = [asyncio.create_task(backend.model()) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    assert {model.name for model in await asyncio.gather(*others)} == {"demo"}
    assert asked == 2
    await backend.aclose()


async def test_another_engine_at_the_address_is_found(llama_server_url: str) -> None:
    """The backend searches again when the engine that it found is of another kind."""
    kinds: list[Backend] = []
    with canned({"*": (200, b"{}")}) as (address, _):
        kinds += [LlamaServer(address), LlamaServer(llama_server_url)]
        found: list[Backend] = []

        async def find() -> Backend:
            found.append(kinds[len(found)])
            return found[-1]

        backend = LazyBackend(find)
        with pytest.raises(LatimerError, match="is not llama-server"):
            await backend.model()
        await asyncio.sleep(MOMENT)
        assert (await backend.model()).name == "demo.gguf"
        await backend.model()
        assert len(found) == 2
        await backend.aclose()


# The names that a pool leaves at their defaults: metrics and probes ask each of its engines.
OF_EACH_ENGINE = {"last_byte", "load", "loads_here"}


def test_nothing_of_an_engine_is_left_out() -> None:
    """An engine that is found later, and a pool, have each name of `Backend` themselves, so that
    no default hides what their engines say."""
    names = {name for name in vars(Backend) if not name.startswith("_")}
    lazy = {*vars(LazyBackend), *vars(LazyBackend(always(LlamaServer("http://127.0.0.1:1"))))}
    # What is found is one engine.
    assert names - lazy == {"is_pooled"}
    own = Pool.__mro__[: Pool.__mro__.index(Backend)]
    assert names - {name for base in own for name in vars(base)} == OF_EACH_ENGINE


async def test_an_engine_that_loads_here_says_so() -> None:
    """A backend that is found later loads here if the engine does, and before that if it is said
    to, so that its load counts as no silence."""
    for waits in (False, True):
        backend = LazyBackend(always(LlamaCpp()), loads_here=waits)
        assert backend.loads_here is waits
        await backend.model()
        assert backend.loads_here
        await backend.aclose()
