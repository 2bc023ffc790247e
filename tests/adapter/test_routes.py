"""Tests of routes: paths with several methods, and paths with parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.endpoints.models import list_models, retrieve_model
from latimer.adapter.request import Exchange
from latimer.adapter.routes import ROUTES, Routes
from latimer.adapter.service import Service
from latimer.backends.llama_cpp import LlamaCpp


async def noted(exchange: Exchange, service: Service, *values: str) -> None:
    """Respond with the values of the parameters in the path."""
    exchange.headers.append((b"values", ",".join(values).encode()))
    await exchange.reply(200, b"{}")


TABLE = {
    "/things": {"GET": noted, "POST": noted},
    "/things/new": {"POST": noted},
    "/things/{id}": {"DELETE": noted, "GET": noted},
    "/things/{id}/parts": {"GET": noted},
    "/things/{id}/parts/{part}": {"GET": noted},
    "/names/{name:path}": {"GET": noted},
}
PREFIXES = ("/v1", "")


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/v1/things", []),
        ("/things/", []),
        ("//v1///things//", []),
        ("/v1/things/a", ["a"]),
        ("/things/a/", ["a"]),
        ("//v1//things//a//parts//", ["a"]),
        ("/v1/things/new/parts", ["new"]),
        ("/v1/things/a b\n/parts/é", ["a b\n", "é"]),
        ("/names/a", ["a"]),
        ("/v1//names/org/b/", ["org/b"]),
        ("/v1/names//names/a//b//", ["/names/a//b"]),
    ],
)
def test_paths_have_parameters(path: str, values: Sequence[str]) -> None:
    """The parameters of a path are found below each prefix, also with slashes in excess."""
    found = Routes(PREFIXES, TABLE).find(path)
    assert found is not None
    assert found.guarded
    assert list(found.values) == values


@pytest.mark.parametrize(
    "path", ["", "/", "/v2/things", "/v1/things/a/b", "/v1/things/a/parts/b/c", "/names/", "/thing"]
)
def test_other_paths_are_unknown(path: str) -> None:
    """A path with a segment too many or too few has no route."""
    assert Routes(PREFIXES, TABLE).find(path) is None


def test_a_plain_path_has_priority() -> None:
    """A path without parameters has priority over one whose parameter would match."""
    found = Routes(PREFIXES, TABLE).find("/v1/things/new")
    assert found is not None
    assert list(found.methods) == ["POST"]


def test_a_long_path_is_matched_in_linear_time() -> None:
    """A path of many slashes or segments takes a thousandth of a second per 64 KiB, not seconds."""
    routes = Routes(PREFIXES, TABLE)
    for path in ("/v1/names" + "/" * 65_000, "/v1/things/a" + "/" * 65_000 + "b",
                 "/v1/things/" + "a/" * 32_000, "/" * 65_000 + "v1/names/a"):  # fmt: skip
        start = time.perf_counter()
        routes.find(path)
        assert time.perf_counter() - start < 0.1


def test_models_are_found_by_their_names() -> None:
    """Names of models may contain slashes, and the list of models is a path of its own."""
    for path, endpoint, values in (
        ("/v1/models", list_models, []),
        ("/v1/models//", list_models, []),
        ("/v1/models/gpt-4o", retrieve_model, ["gpt-4o"]),
        ("/models/org/model", retrieve_model, ["org/model"]),
        ("/v1/models//models/a.gguf", retrieve_model, ["/models/a.gguf"]),
    ):
        found = Routes(PREFIXES).find(path)
        assert found is not None
        assert found.methods == {"GET": endpoint, "HEAD": endpoint}
        assert list(found.values) == values


def test_health_needs_no_key_and_no_prefix() -> None:
    """`/health` is open, and served only with the empty prefix."""
    found = Routes(PREFIXES).find("/health")
    assert found is not None
    assert not found.guarded
    assert Routes(("/v1",)).find("/health") is None
    assert Routes(PREFIXES).find("/v1/health") is None


async def test_a_path_has_several_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method has its endpoint, `HEAD` that of `GET`; others are a 405 that lists them all."""
    for path, methods in TABLE.items():
        monkeypatch.setitem(ROUTES, path, methods)
    backend = LlamaCpp(context=64)
    transport = httpx2.ASGITransport(OpenAIAdapter(backend))
    async with httpx2.AsyncClient(transport=transport, base_url="http://latimer") as client:
        for method in ("GET", "HEAD", "DELETE"):
            reply = await client.request(method, "/v1/things/a")
            assert (reply.status_code, reply.headers["values"]) == (200, "a")
        reply = await client.post("/v1/things", json={})
        assert reply.status_code == 200
        for path, allowed in (
            ("/v1/things", "GET, HEAD, POST"),
            ("/things/a/", "DELETE, GET, HEAD"),
            ("/things/new", "POST"),
        ):
            reply = await client.put(path, json={})
            assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
            message = reply.json()["error"]["message"]
            assert message.startswith(f"Not allowed to PUT on {path}.")
    await backend.aclose()


@pytest.mark.parametrize("shared", [False, True])
async def test_a_key_is_known_apart_from_shared_prefixes(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    """The key's digest is known with shared prefixes too, and is the same in each process."""

    async def owners(exchange: Exchange, service: Service) -> None:
        exchange.headers += [(b"key", exchange.key.encode()), (b"owner", exchange.owner.encode())]
        await exchange.reply(200, b"{}")

    monkeypatch.setitem(ROUTES, "/owners", {"GET": owners})
    backend = LlamaCpp(context=64)
    app = OpenAIAdapter(backend, api_keys=["sk-one"], share_prefixes=shared)
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://latimer") as client:
        reply = await client.get("/v1/owners", headers={"authorization": "Bearer sk-one"})
    digest = "456f1612bd25c6c8455039437bf441f4"
    assert reply.headers["key"] == digest
    assert reply.headers["owner"] == ("" if shared else digest)
    await backend.aclose()
