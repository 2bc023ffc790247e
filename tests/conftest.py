"""Shared fixtures: the real engines, and a koboldcpp that is replayed or live."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from support import cores

# isort: split
import gguf
import httpcore2
import httpx2
import hypothesis
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.backends import offload
from latimer.backends.base import Backend
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import DEMO_MODEL, LlamaCpp
from latimer.backends.llama_cpp.library import LoadedModel
from latimer.backends.llama_cpp.options import Options
from latimer.backends.llama_server import LlamaServer
from support import clients, gguf_files, redis_server
from support.engines.echo import Echo
from support.engines.replay import UNKNOWN, Replay, replaying
from support.postgresql import PostgreSQL, missing, postgresql
from support.redis_server import RedisServer
from support.s3 import s3_server, variables
from support.servers import llama_server, serving
from support.walks import Walker

# What test modules import and pytest collects stays: a search for garbage only takes time.
gc.disable()
# On two busy cores no deadline is reliable.
hypothesis.settings.register_profile("latimer", deadline=None)
hypothesis.settings.load_profile("latimer")

ENGINES = ("llama_cpp", "llama_server", "koboldcpp")


def pytest_report_header() -> list[str]:
    """Say to which core a worker is pinned."""
    return [] if cores.PINNED is None else [f"pinned to core {cores.PINNED}"]


def pytest_sessionstart() -> None:
    """Hide the ends of abandoned work, as `latimer serve` does; pytest takes them for failures.

    Clients share one set of the machine's certificates, since to read it takes each of them 20 ms.
    """
    offload.hide_ends_of_work()
    httpcore2.default_ssl_context = functools.cache(httpcore2.default_ssl_context)


# Folders of slow tests, and fixtures and parameters of tests that need another program.
SLOW = {"chaos", "faults"}
OTHERS = {
    "postgresql", "postgresql_server", "redis", "redis_process", "remote", "s3", "s3_variables",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of faults, and those that need PostgreSQL, Redis or the API of S3, as slow."""
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = {
            *getattr(item, "fixturenames", ()),
            *(one for one in given if isinstance(one, str)),
        }
        if names & OTHERS or item.path.parent.name in SLOW:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collections, which would take half a second each."""
    gc.freeze()
    gc.enable()


MODELS = Path(__file__).parent / "models"


@pytest.fixture(scope="session")
def demo_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model with F32 weights."""
    target = tmp_path_factory.mktemp("models") / "demo-f32.gguf"
    return gguf_files.copy(DEMO_MODEL, target, kind=gguf.GGMLQuantizationType.F32)


@pytest.fixture(scope="session")
def demo_loaded() -> Iterator[LoadedModel]:
    """Return the demo model's weights and vocabulary, for tests that need no engine."""
    model = LoadedModel(DEMO_MODEL, Options(gpu_layers=0))
    yield model
    model.close()


@pytest.fixture(scope="session")
def walker(demo_loaded: LoadedModel) -> Walker:
    """Return a walker that draws random texts from grammars, without a model's probabilities."""
    return Walker(demo_loaded)


@pytest.fixture(scope="session")
def llama_server_url() -> Iterator[str]:
    """Run a real llama-server with the demo model."""
    with llama_server(DEMO_MODEL) as address:
        yield address


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    """Run a real server with the API of S3, and return the variables by which boto3 finds it."""
    with s3_server() as address:
        yield variables(address)


@pytest.fixture(scope="session")
def koboldcpp_replay() -> Iterator[tuple[str, Replay | None]]:
    """Return a live koboldcpp if `LATIMER_KOBOLDCPP_URL` is set, else the recorded one."""
    live = os.environ.get("LATIMER_KOBOLDCPP_URL")
    if live:
        yield live, None
        return
    with replaying() as (address, replay):
        yield address, replay
        assert not replay.unknown, f"{UNKNOWN} {replay.unknown[0]}"


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[PostgreSQL]:
    """Run a real PostgreSQL; no test may stop it."""
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with postgresql() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql_server: PostgreSQL) -> Iterator[str]:
    """Return the URL of an empty database of the test's own."""
    with postgresql_server.database() as url:
        yield url


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    """Run a real Redis; no test may stop it."""
    reason = redis_server.missing()
    if reason is not None:
        pytest.skip(reason)
    with redis_server.running() as server:
        yield server


@pytest.fixture
def redis_url(redis_process: RedisServer) -> str:
    """Return the URL of an empty Redis."""
    return redis_process.clear()


@pytest.fixture(scope="session")
def make_backend(request: pytest.FixtureRequest) -> Callable[[str], Backend]:
    """Return a function that makes a backend for an engine's name."""

    def make(engine: str) -> Backend:
        if engine == "echo":
            return Echo()
        if engine == "llama_cpp":
            return LlamaCpp()
        if engine == "llama_server":
            return LlamaServer(request.getfixturevalue("llama_server_url"))
        return KoboldCpp(request.getfixturevalue("koboldcpp_replay")[0], max_waiting=256)

    return make


Client = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


@pytest.fixture(scope="session")
def client_of() -> Client:
    """Return a function that makes a client of an ASGI app in the same event loop."""
    return clients.client_of


@pytest.fixture(scope="session")
async def apps(make_backend: Callable[[str], Backend]) -> AsyncIterator[Callable[[str], Any]]:
    """Return an adapter for each engine, made on first use, that accepts every model name."""
    made: dict[str, OpenAIAdapter] = {}

    def app_of(engine: str) -> OpenAIAdapter:
        if engine not in made:
            made[engine] = OpenAIAdapter(make_backend(engine), any_model=True)
        return made[engine]

    yield app_of
    for app in made.values():
        await app.aclose()


@pytest.fixture(scope="session", params=ENGINES)
async def client(
    request: pytest.FixtureRequest, apps: Callable[[str], Any], client_of: Client
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of each engine's adapter."""
    async with client_of(apps(request.param)) as client:
        yield client


@pytest.fixture(params=["llama_cpp", "llama_server"])
async def scorer(
    request: pytest.FixtureRequest, apps: Callable[[str], Any], client_of: Client
) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of each engine that scores prompts and shows its vocabulary."""
    async with client_of(apps(request.param)) as client:
        yield client


@pytest.fixture(scope="session")
async def demo(apps: Callable[[str], Any], client_of: Client) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of the in-process adapter, for tests that need a model but any engine."""
    async with client_of(apps("llama_cpp")) as client:
        yield client


@pytest.fixture(scope="session")
async def echo(apps: Callable[[str], Any], client_of: Client) -> AsyncIterator[httpx2.AsyncClient]:
    """Return a client of an adapter without a model, for tests that need no generated text."""
    async with client_of(apps("echo")) as client:
        yield client


@pytest.fixture(scope="session", params=ENGINES)
def served_url(
    request: pytest.FixtureRequest, make_backend: Callable[[str], Backend]
) -> Iterator[str]:
    """Serve each engine's adapter with a real uvicorn."""
    with serving(lambda: OpenAIAdapter(make_backend(request.param), any_model=True)) as address:
        yield address
