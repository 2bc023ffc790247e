"""Tests of resolving model names to backends."""

from __future__ import annotations

from pathlib import Path

import pytest
from latimer.adapter.limits.leases import Grant
from latimer.adapter.model_entry import ModelEntry, Policy
from latimer.adapter.service import Service
from latimer.backends.errors import EngineUnavailable, RequestError
from latimer.backends.fleet.pool import Pool
from latimer.backends.fleet.replica import Replica
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from support.servers import free_port

MODELS = Path(__file__).parent.parent / "models"


async def test_a_second_model_stands_behind_another_name(llama_server_url: str) -> None:
    """Each name resolves to its own backend, model and policy."""
    inside = LlamaCpp(MODELS / "spm.gguf", gpu_layers=0)
    there = LlamaServer(llama_server_url)
    strict = Policy(strict=True)
    service = Service([ModelEntry(inside, ["one", "both"], policy=strict), ModelEntry(there)])
    one = await service.resolve("one")
    other = await service.resolve("demo.gguf")
    assert (one.backend, one.model.name, one.policy) == (inside, "spm", strict)
    assert (other.backend, other.model.name, other.policy.strict) == (there, "demo.gguf", False)
    assert (await service.first()).backend is inside
    models = await service.models()
    assert list(models) == ["one", "both", "demo.gguf"]
    both = models["both"]
    assert both is not None
    assert both.model is one.model
    with pytest.raises(RequestError, match="The model `two` does not exist"):
        await service.resolve("two")
    await service.health()
    await service.aclose()


async def test_a_replaced_model_is_not_served_again(llama_server_url: str) -> None:
    """A name loses its known model when another replaces it, also if an engine answers later."""
    there = LlamaServer(llama_server_url)
    pools = [Pool("demo", [Replica("a", there)]) for _ in range(2)]
    before, after = (ModelEntry(pool, ["demo"]) for pool in pools)
    service = Service([before])
    assert service.latest("demo", None) is None
    served = await service.served(*service.chosen("demo", None))
    assert service.latest("demo", None) is served
    assert service.latest("demo", Grant("team", names=frozenset({"other"}))) is None
    service.replace([after])
    await service.served(before, "demo", False)
    assert service.latest("demo", None) is None
    assert (await service.resolve("demo")).backend is pools[1]
    await service.aclose()
    await pools[0].aclose()
    await there.aclose()


async def test_a_name_is_known_while_its_engine_was_checked(llama_server_url: str) -> None:
    """A name needs no question to an engine that was checked a moment ago; of the names of clients,
    which can be any, few are kept."""
    there = LlamaServer(llama_server_url)
    service = Service([ModelEntry(there, ["demo"], any_model=True)])
    assert service.latest("demo", None) is None
    served = await service.resolve("demo")
    assert service.latest("demo", None) is served
    assert service.latest("demo", Grant("team", names=frozenset({"other"}))) is None
    there.server.monitor.invalidate()
    assert service.latest("demo", None) is None
    assert (await service.resolve("demo")).model is served.model
    assert service.latest("demo", None) is not None
    names = [*(str(number) for number in range(100)), "x" * 1000]
    for _ in range(2):
        for name in names:
            assert (await service.resolve(name)).name == name
        kept = [name for name in names if service.latest(name, None)]
        assert 0 < len(kept) <= 64
        assert kept[-1] == "99"
        # An engine that has another model leaves no name behind which is never known again.
        there.server.monitor.lose(EngineUnavailable("another model"))
    await service.aclose()


async def test_an_engine_that_is_away_hides_no_other(llama_server_url: str) -> None:
    """An unavailable engine makes its own name an error; others are served, or unknown."""
    away = LlamaServer(f"http://127.0.0.1:{free_port()}")
    there = LlamaServer(llama_server_url)
    service = Service([ModelEntry(away, ["away"]), ModelEntry(there, ["here"])])
    assert (await service.resolve("here")).backend is there
    with pytest.raises(EngineUnavailable):
        await service.resolve("away")
    with pytest.raises(RequestError, match="The model `unknown` does not exist"):
        await service.resolve("unknown")
    await service.aclose()
