"""Tests of routes: paths with several methods, and paths with parameters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.endpoints.models import list_models, retrieve_model
from latimer.adapter.request import Exchange
from latimer.adapter.routes import ROUTES, ApiRoute, Endpoint, Later, Methods, routes_of
from latimer.adapter.service import Service
from latimer.backends.llama_cpp import LlamaCpp
from starlette.routing import Match
from support.clients import client_of
from support.engines.echo import Echo


async def noted(exchange: Exchange, service: Service, *values: str) -> None:
    """Respond with the values of the parameters in the path."""
    exchange.response_headers.append((b"values", ",".join(values).encode()))
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


def find(
    path: str, table: Mapping[str, Methods] = TABLE, prefixes: Sequence[str] = PREFIXES
) -> tuple[ApiRoute, list[str]] | None:
    """Return the first route that matches a path, and the values of its parameters."""
    for route in routes_of(Service([]), prefixes, table):
        match, found = route.matches({"type": "http", "method": "GET", "path": path})
        if match is Match.FULL:
            assert isinstance(route, ApiRoute)
            return route, [*found["path_params"].values()]
    return None


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
    found = find(path)
    assert found is not None
    assert found[1] == values


@pytest.mark.parametrize(
    "path", ["", "/", "/v2/things", "/v1/things/a/b", "/v1/things/a/parts/b/c", "/names/", "/thing"]
)
def test_other_paths_are_unknown(path: str) -> None:
    """A path with a segment too many or too few has no route."""
    assert find(path) is None


def test_a_plain_path_has_priority() -> None:
    """A path without parameters has priority over one whose parameter would match."""
    found = find("/v1/things/new")
    assert found is not None
    assert list(found[0].endpoints) == ["POST"]


def test_a_long_path_is_matched_in_linear_time() -> None:
    """A path of many slashes or segments takes a thousandth of a second per 64 KiB, not seconds."""
    for path in ("/v1/names" + "/" * 65_000, "/v1/things/a" + "/" * 65_000 + "b",
                 "/v1/things/" + "a/" * 32_000, "/" * 65_000 + "v1/names/a"):  # fmt: skip
        start = time.perf_counter()
        find(path)
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
        found = find(path, ROUTES)
        assert found is not None
        found[0].load()
        assert found[0].endpoints == {"GET": endpoint, "HEAD": endpoint}
        assert found[1] == values


def endpoints_of(app: OpenAIAdapter) -> list[Endpoint]:
    """Return the endpoints of all paths of an app."""
    routes = [route for route in app.routes if isinstance(route, ApiRoute)]
    return [endpoint for route in routes for endpoint in route.endpoints.values()]


async def test_the_lifespan_imports_the_other_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after the start, no request has to wait for the imports of its endpoint."""
    monkeypatch.setattr("latimer.adapter.app._LOAD_AFTER", 0)
    backend = Echo(context=64)
    app = OpenAIAdapter(backend)
    later = [one for one in endpoints_of(app) if isinstance(one, Later)]
    assert later
    async with app.lifespan_context(app):
        end = time.monotonic() + 30
        while any(isinstance(one, Later) for one in endpoints_of(app)):
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
    assert {one.__name__ for one in later} <= {one.__name__ for one in endpoints_of(app)}


async def test_a_request_before_that_is_served() -> None:
    """The first request to an endpoint imports it, without the app's lifespan too."""
    app = OpenAIAdapter(Echo(context=64), any_model=True)
    async with client_of(app) as client:
        reply = await client.get("/v1/responses/resp_1")
        assert (reply.status_code, reply.json()["error"]["type"]) == (404, "invalid_request_error")
        for _ in range(2):
            reply = await client.post("/v1/responses", json={"model": "echo", "input": "Hello"})
            assert reply.json()["object"] == "response"
    await app.aclose()
    used = {route.path: route for route in app.routes if isinstance(route, ApiRoute)}
    for path in ("/v1/responses", "/v1/responses/{name}"):
        assert not any(isinstance(one, Later) for one in used[path].endpoints.values())


async def test_health_needs_no_key_and_no_prefix() -> None:
    """`/health` is open, and served only with the empty prefix."""
    backend = LlamaCpp(context=64)
    for prefixes, status in ((PREFIXES, 200), (("/v1",), 404)):
        app = OpenAIAdapter(backend, prefixes, api_keys=["k"])
        async with client_of(app) as client:
            assert (await client.get("/health")).status_code == status
            assert (await client.get("/v1/health")).status_code == 404
            assert (await client.get("/v1/models")).status_code == 401
    await backend.aclose()


async def test_a_path_has_several_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each method has its endpoint, `HEAD` that of `GET`; others are a 405 that lists them all."""
    for path, methods in TABLE.items():
        monkeypatch.setitem(ROUTES, path, methods)
    backend = Echo(context=64)
    async with client_of(OpenAIAdapter(backend)) as client:
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
        exchange.response_headers += [
            (b"key", exchange.key.encode()),
            (b"owner", exchange.owner.encode()),
        ]
        await exchange.reply(200, b"{}")

    monkeypatch.setitem(ROUTES, "/owners", {"GET": owners})
    backend = Echo(context=64)
    app = OpenAIAdapter(backend, api_keys=["sk-one"], share_prefixes=shared)
    async with client_of(app) as client:
        reply = await client.get("/v1/owners", headers={"authorization": "Bearer sk-one"})
    digest = "456f1612bd25c6c8455039437bf441f4"
    assert reply.headers["key"] == digest
    assert reply.headers["owner"] == ("" if shared else digest)
    await backend.aclose()
