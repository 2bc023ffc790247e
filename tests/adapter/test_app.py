"""Tests of the app and the middleware: routes, guards, mounting, lifespan."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from latimer.adapter import OpenAIAdapter, OpenAIMiddleware
from latimer.adapter.app import NEEDS_ASYNCIO
from latimer.adapter.observers import Observer
from latimer.adapter.record import Record
from latimer.backends.errors import Busy, ContextFull, EngineError, EngineSilent, EngineUnavailable
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from support.clients import client_of
from support.engines.echo import Echo

HI = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}
GREETING = "Hello! How can I help you today?"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"store": "redis://me:s3cret@x"}, "store"),
        ({"store_age": "soon"}, "store_age"),
        ({"store_size": 0}, "store_size"),
        ({"store_media": "/x"}, "store_media"),
        ({"store": "off", "store_required": True}, "store_required"),
    ],
)
def test_wrong_options_of_the_store_are_errors(options: dict[str, Any], name: str) -> None:
    """A wrong option of the store is a ValueError when the adapter is made, without passwords."""
    with pytest.raises(ValueError, match=f"^{name}: expected") as caught:
        OpenAIAdapter(Echo(error=EngineError("")), **options)
    assert "s3cret" not in str(caught.value)


@pytest.fixture(scope="module")
async def backend() -> AsyncIterator[LlamaCpp]:
    """Return the demo model's backend."""
    made = LlamaCpp(context=512)
    yield made
    await made.aclose()


async def test_models_are_listed_and_found(backend: LlamaCpp) -> None:
    """Every listed model name is accepted, slashes URL-encoded or not, and others are a 404."""
    app = OpenAIAdapter(backend, model_names=["gpt-4o", "org/model"])
    async with client_of(app) as client:
        in_list = (await client.get("/v1/models")).json()
        assert in_list["object"] == "list"
        assert [model["id"] for model in in_list["data"]] == ["gpt-4o", "org/model"]
        for model in in_list["data"]:
            assert list(model)[:4] == ["id", "object", "created", "owned_by"]
            assert isinstance(model["created"], int)
        for path in ("gpt-4o", "org/model", "org%2Fmodel", "org%252Fmodel"):
            reply = await client.get(f"/v1/models/{path}")
            assert reply.status_code == 200, path
            assert reply.json()["object"] == "model"
        assert (await client.get("/models/gpt-4o")).json()["id"] == "gpt-4o"
        assert (await client.post("/v1/chat/completions", json={**HI, "model": "gpt-4o"})).json()[
            "model"
        ] == "gpt-4o"
        for reply in (
            await client.get("/v1/models/gpt-5"),
            await client.post("/v1/chat/completions", json={**HI, "model": "gpt-5"}),
        ):
            assert reply.status_code == 404
            assert reply.json()["error"] == {
                "message": "The model `gpt-5` does not exist or you do not have access to it. This "
                "server has: gpt-4o, org/model. To accept every name, start it with "
                "any_model=True.",
                "type": "invalid_request_error",
                "param": None,
                "code": "model_not_found",
            }


async def test_advice_names_a_setting_where_it_is_set(backend: LlamaCpp) -> None:
    """An error names the keyword of a setting in an app, and the option in `latimer serve`."""
    for is_command, words in ((False, "start it with any_model=True."), (True, "--any-model.")):
        app = OpenAIAdapter(backend, store="off")
        app.service.is_command = is_command
        async with client_of(Starlette(routes=[Mount("/ai", app)])) as client:
            reply = await client.post("/ai/v1/chat/completions", json={**HI, "model": "none"})
            assert reply.json()["error"]["message"].endswith(words)
            off = (await client.get("/ai/v1/chat/completions/a")).json()["error"]["message"]
            assert ('store="off"' in off) is not is_command
            assert ("--store" in off) is is_command


async def test_the_engines_own_name_is_the_default(backend: LlamaCpp) -> None:
    """Without configured names, the engine's own model name is listed and accepted."""
    async with client_of(OpenAIAdapter(backend)) as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "demo"
        assert (await client.post("/v1/chat/completions", json={**HI, "model": "demo"})).is_success
        assert (await client.post("/v1/chat/completions", json=HI)).status_code == 404


async def test_health(backend: LlamaCpp) -> None:
    """`/health` answers 200 when the engine is ready and 503 when not, without a key."""
    async with client_of(OpenAIAdapter(backend, api_keys=["k"])) as client:
        assert (await client.get("/health")).json() == {"status": "ok", "store": {"status": "ok"}}
    broken = OpenAIAdapter(Echo(error=EngineUnavailable("down")))
    async with client_of(broken) as client:
        reply = await client.get("/health")
        assert reply.status_code == 503
        assert reply.json()["error"]["message"] == "down"


async def test_keys(backend: LlamaCpp) -> None:
    """Each configured key is accepted; a missing or wrong key is the contract's 401."""
    app = OpenAIAdapter(backend, api_keys=["sk-first-key-of-all", "other"], any_model=True)
    async with client_of(app) as client:
        for key in ("sk-first-key-of-all", "other"):
            reply = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert reply.status_code == 200
        for value in (None, "", "Bearer", "Bearer ", "Basic eDp5"):
            none = {} if value is None else {"authorization": value}
            reply = await client.get("/v1/models", headers=none)
            assert reply.status_code == 401
            error = reply.json()["error"]
            assert error["message"].startswith("You didn't provide an API key.")
            assert (error["type"], error["code"]) == ("invalid_request_error", None)
        headers = {"authorization": "Bearer sk-first-key-of-alk"}
        reply = await client.post("/v1/completions", headers=headers, json={"stream": True})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (401, "invalid_api_key")
        assert error["message"].startswith("Incorrect API key provided: sk-first****-alk.")
        assert "sk-first-key-of-alk" not in reply.text


async def test_keys_beyond_ascii(backend: LlamaCpp) -> None:
    """A key can be any UTF-8 text, and clients may also send it in Latin-1."""
    keys = ["schlüssel", "ключ", "voilà", "日本 語"]
    async with client_of(OpenAIAdapter(backend, api_keys=keys)) as client:
        for sent, status in (
            *((key.encode(), 200) for key in keys),
            ("schlüssel".encode("latin-1"), 200),
            ("voilà".encode("latin-1"), 200),
            (b"schl\xc3ssel", 401),
            (b"\xff\xfe", 401),
            (b"schlussel", 401),
        ):
            reply = await client.get("/v1/models", headers={b"authorization": b"Bearer " + sent})
            assert reply.status_code == status, sent
    headers = {b"authorization": b"Bearer \xff" + b"x" * 20}
    async with client_of(OpenAIAdapter(backend, api_keys=keys)) as client:
        error = (await client.get("/v1/models", headers=headers)).json()["error"]
    assert error["message"].startswith("Incorrect API key provided: \\xffxxxx****xxxx.")


async def test_an_empty_bearer_passes_without_keys(backend: LlamaCpp) -> None:
    """A server without keys accepts `Bearer ` with no key, as lm-eval sends it."""
    async with client_of(OpenAIAdapter(backend)) as client:
        assert (await client.get("/v1/models", headers={"authorization": "Bearer "})).is_success


async def test_bodies_have_a_limit(backend: LlamaCpp) -> None:
    """A body over the limit is a 413, with or without a content length."""
    app = OpenAIAdapter(backend, any_model=True, max_body=1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    headers = {"content-type": "application/json"}
    async with client_of(app) as client:
        for content in (b"x" * 1001, parts()):
            reply = await client.post("/v1/completions", content=content, headers=headers)
            assert reply.status_code == 413
            assert reply.json()["error"]["code"] == "request_too_large"
        assert (
            await client.post("/v1/completions", json={"model": "m", "prompt": "Hi"})
        ).is_success


async def test_browsers_may_call_it(backend: LlamaCpp) -> None:
    """Preflights and requests from allowed origins get CORS headers."""
    preflight = {
        "origin": "app://obsidian.md",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with client_of(OpenAIAdapter(backend, any_model=True, cors_origins=["*"])) as client:
        reply = await client.options("/v1/chat/completions", headers=preflight)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "authorization" in reply.headers["access-control-allow-headers"]
        assert reply.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
        deletes = {**preflight, "access-control-request-method": "DELETE"}
        reply = await client.options("/v1/chat/completions/x", headers=deletes)
        assert reply.status_code == 200
        reply = await client.post(
            "/v1/chat/completions", json=HI, headers={"origin": "app://obsidian.md"}
        )
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
        bad = await client.post("/v1/foo", headers={"origin": "app://obsidian.md"})
        assert bad.headers["access-control-allow-origin"] == "*"
    app = OpenAIAdapter(backend, cors_origins=["https://one.example"])
    async with client_of(app) as client:
        for origin, allowed in (("https://one.example", True), ("https://two.example", False)):
            reply = await client.get("/v1/models", headers={"origin": origin})
            assert reply.status_code == 200
            assert ("access-control-allow-origin" in reply.headers) is allowed
            assert reply.headers["vary"] == "Origin"
        reply = await client.options("/v1/models", headers=preflight)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "origin_not_allowed"


GOOD = "https://good.example"


def with_rule(how: str, **options: Any) -> Any:
    """Return an app with its own rule for the pages of one origin, around an adapter."""
    app = FastAPI()
    if how == "middleware":
        app.add_middleware(OpenAIMiddleware, backend=Echo(), **options)
    else:
        app.mount("/ai", OpenAIAdapter(Echo(), **options))
    app.add_middleware(CORSMiddleware, allow_origins=[GOOD], allow_methods=["*"])
    return app


@pytest.mark.parametrize("how", ["mounted", "middleware"])
async def test_the_cors_rule_of_an_app_holds(how: str) -> None:
    """Replies and errors have the CORS headers of the app around the adapter, and no others."""
    root = "/ai" if how == "mounted" else ""
    async with client_of(with_rule(how, any_model=True)) as client:
        for origin, allowed in ((GOOD, GOOD), ("https://evil.example", None), ("null", None)):
            headers = {"origin": origin}
            for reply, status in (
                (await client.post(f"{root}/v1/chat/completions", json=HI, headers=headers), 200),
                (await client.post(f"{root}/v1/chat/completions", json={}, headers=headers), 400),
                (await client.get(f"{root}/v1/responses", headers=headers), 200),
            ):
                assert reply.status_code == status
                assert reply.headers.get("access-control-allow-origin") == allowed
                assert "access-control-expose-headers" not in reply.headers
            asked = {**headers, "access-control-request-method": "POST"}
            reply = await client.options(f"{root}/v1/chat/completions", headers=asked)
            assert reply.status_code == (200 if allowed else 400)
            assert reply.headers.get("access-control-allow-origin") == allowed


async def test_an_adapter_has_no_cors_headers_by_default() -> None:
    """Without `cors_origins`, no reply has a CORS header, and a preflight is not answered."""
    for app in (OpenAIAdapter(Echo()), OpenAIMiddleware(Starlette(), Echo())):
        async with client_of(app) as client:
            headers = {"origin": GOOD, "access-control-request-method": "POST"}
            for reply, status in (
                (await client.get("/v1/models", headers=headers), 200),
                (await client.options("/v1/models", headers=headers), 405),
            ):
                assert reply.status_code == status
                assert not [name for name in reply.headers if name.startswith("access-control-")]
                assert "vary" not in reply.headers


async def test_a_mounted_app_has_any_host(backend: LlamaCpp) -> None:
    """A mounted app accepts any host and origin, since the outer app decides about them."""
    async with client_of(OpenAIAdapter(backend)) as client:
        for origin in ("https://evil.example", "null", "weird"):
            headers = {"host": "evil.example", "origin": origin}
            assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (Busy("later", 0.25), 429, "requests", "rate_limit_exceeded"),
        (ContextFull("it", "Wait."), 503, "service_unavailable_error", "engine_overloaded"),
        (EngineUnavailable("gone"), 503, "service_unavailable_error", "engine_unavailable"),
        (EngineError("boom"), 502, "server_error", "engine_error"),
        (EngineSilent("hush"), 504, "server_error", "engine_timeout"),
        (RuntimeError("secret"), 500, "server_error", None),
    ],
    ids=["busy", "full", "unavailable", "engine", "silent", "ours"],
)
async def test_errors_of_engines(
    error: Exception, status: int, kind: str, code: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each error has its status and object, streamed or not, and internal details stay hidden."""
    app = OpenAIAdapter(Echo(error=error), any_model=True)
    with caplog.at_level(logging.CRITICAL, "latimer"):
        async with client_of(app) as client:
            for stream in (False, True):
                reply = await client.post("/v1/chat/completions", json={**HI, "stream": stream})
                assert reply.status_code == status
                body = reply.json()["error"]
                assert (body["type"], body["code"], body["param"]) == (kind, code, None)
                assert "secret" not in reply.text
                if status == 429:
                    assert reply.headers["retry-after-ms"] == "250"
                    assert reply.headers["retry-after"] == "1"


async def test_a_log_cannot_steer_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """Control characters in an error are escaped in the log."""
    app = OpenAIAdapter(Echo(error=RuntimeError("\x1b]0;evil\x07")), any_model=True)
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json=HI)
    assert "\\x1b]0;evil\\x07" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize(
    "path",
    ["/v1/models/", "/v1//models", "//v1/models", "//models//", "/v1/models//"],
)
async def test_a_slash_too_many_is_ignored(backend: LlamaCpp, path: str) -> None:
    """A path with doubled or trailing slashes is served as the path without them."""
    async with client_of(OpenAIAdapter(backend, any_model=True)) as client:
        # A path that begins with two slashes would name a host.
        base = str(client.base_url).rstrip("/")
        assert (await client.get(base + path)).json()["object"] == "list"
        for asked in ("/v1/chat/completions/", "//v1//chat//completions"):
            assert (await client.post(base + asked, json={**HI, "max_tokens": 1})).is_success
        for asked in ("/v1/mod/els", "//"):
            assert (await client.get(base + asked)).status_code == 404


async def test_a_models_own_slashes_are_kept(backend: LlamaCpp) -> None:
    """A model whose name is a path is found, and so is another model after doubled slashes."""
    app = OpenAIAdapter(backend, model_names=["/models/a.gguf", "org/b"])
    async with client_of(app) as client:
        for path, name in (
            ("/v1/models//models/a.gguf", "/models/a.gguf"),
            ("/v1//models//models/a.gguf/", "/models/a.gguf"),
            ("/v1/models//org/b/", "org/b"),
        ):
            assert (await client.get(path)).json()["id"] == name
        assert (await client.get("/v1/models/a.gguf")).status_code == 404


async def test_head_is_get_without_a_body(backend: LlamaCpp) -> None:
    """`HEAD` has the status and the headers of `GET`, and no body, also for an error."""
    async with client_of(OpenAIAdapter(backend)) as client:
        for path, status in (("/v1/models", 200), ("/health", 200), ("/v1/models/none", 404)):
            head, get = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (status, b"")
            assert get.status_code == status
            for name in ("content-type", "content-length"):
                assert head.headers[name] == get.headers[name]
        assert (await client.head("/v1/completions")).status_code == 405
        assert (await client.post("/v1/models")).headers["allow"] == "GET, HEAD"


async def test_strict_refuses_what_is_ignored(backend: LlamaCpp) -> None:
    """With `strict` an unknown field is an error in the contract's words."""
    async with client_of(OpenAIAdapter(backend, any_model=True, strict=True)) as client:
        assert (await client.post("/v1/chat/completions", json=HI)).is_success
        reply = await client.post("/v1/chat/completions", json={**HI, "foo": 1})
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == "Unknown parameter: 'foo'."
        assert reply.json()["error"]["code"] == "unknown_parameter"


async def test_mounted_under_a_prefix(backend: LlamaCpp) -> None:
    """The app works mounted in Starlette and FastAPI, which do not run a mounted app's lifespan."""
    adapter = OpenAIAdapter(backend, any_model=True)
    fastapi = FastAPI()
    fastapi.mount("/ai", adapter)
    starlette = Starlette(routes=[Mount("/ai", adapter)])
    for outer in (fastapi, starlette):
        async with client_of(outer) as client:
            reply = await client.post("/ai/v1/chat/completions", json=HI)
            assert reply.json()["choices"][0]["message"]["content"] == GREETING
            assert (await client.get("/ai/v1/models")).is_success
            reply = await client.get("/ai/v1/nothing")
            assert reply.json()["error"]["message"] == "Invalid URL (GET /ai/v1/nothing)"


async def test_the_base_url_says_what_is_below_it(backend: LlamaCpp) -> None:
    """The base URL of the API is a 404 that names the list of models, and the page if there is."""
    hint = "This is the base URL of the API: GET {}/models lists the models."
    page, plain = OpenAIAdapter(backend, playground=True), OpenAIAdapter(backend)
    for app, path, base, more in (
        (page, "/v1", "/v1", " The playground is at /."),
        (plain, "/v1/", "/v1", ""),
        (plain, "/", "", ""),
        (Starlette(routes=[Mount("/ai", page)]), "/ai/v1", "/ai/v1", " The playground is at /ai/."),
    ):
        async with client_of(app) as client:
            reply = await client.get(path)
            assert reply.status_code == 404
            error = reply.json()["error"]
            assert error["message"] == f"Invalid URL (GET {path}). {hint.format(base)}{more}"
            assert (error["type"], error["code"]) == ("invalid_request_error", None)
            assert (await client.get(f"{base}/models")).is_success


async def test_another_latimer_is_no_engine(backend: LlamaCpp) -> None:
    """A server of OpenAI's API in place of an engine is the server's fault, which says so."""
    transport = httpx2.ASGITransport(OpenAIAdapter(backend))
    outer = OpenAIMiddleware(Starlette(), LlamaServer("http://inner", client=transport))
    async with client_of(outer) as client:
        reply = await client.post("/v1/chat/completions", json=HI)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_error")
    assert reply.json()["error"]["message"] == (
        "http://inner is not llama-server: it rejects GET /props. If it serves OpenAI's API, use "
        "the address of the engine behind it."
    )


async def test_a_root_path_is_a_whole_segment(backend: LlamaCpp) -> None:
    """A root path that ends inside the first segment of a path is not cut from it."""
    transport = httpx2.ASGITransport(OpenAIAdapter(backend), root_path="/v")
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
        assert (await client.get("/v1/models")).is_success


async def test_the_middleware_answers_openais_paths_only(backend: LlamaCpp) -> None:
    """The middleware answers only OpenAI's paths below `/v1`, and the app answers the others."""

    async def home(request: Any) -> PlainTextResponse:
        return PlainTextResponse(f"mine: {request.url.path}")

    paths = ("/", "/health", "/models", "/v1/own")
    app = OpenAIMiddleware(Starlette(routes=[Route(path, home) for path in paths]), backend,
                           any_model=True)  # fmt: skip
    mounted = Starlette(routes=[Mount("/deep", app)])
    for outer, prefix in ((app, ""), (mounted, "/deep")):
        async with client_of(outer) as client:
            for path in paths:
                assert (await client.get(prefix + path)).text.startswith("mine: ")
            reply = await client.post(f"{prefix}/v1/chat/completions", json=HI)
            assert reply.json()["choices"][0]["message"]["content"] == GREETING
            assert (await client.get(f"{prefix}/v1/completions")).status_code == 405


def test_the_lifespan_releases_the_backend() -> None:
    """The lifespans of the app and of the middleware close the backend."""
    backend = Echo(error=EngineError("x"))
    with TestClient(OpenAIAdapter(backend)):
        assert backend.closed == 0
    assert backend.closed == 1
    seen: list[str] = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        seen.append("up")
        yield
        seen.append("down")

    with TestClient(OpenAIMiddleware(Starlette(lifespan=lifespan), backend)):
        assert seen == ["up"]
    assert seen == ["up", "down"]
    assert backend.closed == 2


def test_the_middleware_has_the_lifespan_of_an_app_without_one(tmp_path: Path) -> None:
    """Around an app that has no lifespan, as Django's, the middleware stores what waits at the end,
    and releases the backend."""

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise ValueError("only HTTP")

    async def ignores(scope: Any, receive: Any, send: Any) -> None:
        """Do nothing."""

    body = {**HI, "model": "a", "store": True}
    for number, app in enumerate((refuses, ignores)):
        backend = Echo("Hi")
        store = str(tmp_path / f"{number}.db")
        with TestClient(OpenAIMiddleware(app, backend, any_model=True, store=store)) as client:
            id_ = client.post("/v1/chat/completions", json=body).json()["id"]
            assert backend.closed == 0
        assert backend.closed == 1
        with TestClient(OpenAIMiddleware(app, Echo(), store=store)) as client:
            assert client.get(f"/v1/chat/completions/{id_}").is_success


@pytest.mark.parametrize("reports", [True, False])
def test_a_start_that_fails_is_that_of_the_app(reports: bool) -> None:
    """An app that cannot start, whether it reports that or only raises, fails behind the middleware
    too."""

    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if reports:
            await send({"type": "lifespan.startup.failed", "message": "broken"})
        raise ValueError("broken")

    backend = Echo()
    with pytest.raises(ValueError, match="broken"), TestClient(OpenAIMiddleware(fails, backend)):
        pass
    assert backend.closed == 0


def test_an_observer_that_cannot_close_holds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An observer whose end fails is logged, and the backend is closed all the same."""

    class Broken(Observer):
        def take(self, ended: Sequence[Record]) -> None:
            pass

        def close(self) -> None:
            raise ValueError("broken")

    backend = Echo()
    with TestClient(OpenAIAdapter(backend, observers=[Broken()])):
        pass
    assert backend.closed == 1
    assert "An observer of requests has failed." in caplog.text


def test_the_middleware_has_observers_and_its_adapter() -> None:
    """Observers of the middleware get its requests, and its adapter opens its store."""
    seen: list[str] = []

    class Noted(Observer):
        def take(self, ended: Sequence[Record]) -> None:
            seen.extend(record.path for record in ended)

    app = OpenAIMiddleware(Starlette(), Echo("Hi"), any_model=True, observers=[Noted()])
    with TestClient(app) as client:
        assert client.post("/v1/chat/completions", json=HI).is_success
        app.adapter.drain()
    assert seen == ["/v1/chat/completions"]


def test_another_event_loop_is_one_clear_error(caplog: pytest.LogCaptureFixture) -> None:
    """Trio's loop is named in the error of the start, and in that of a request without a start."""
    with (
        pytest.raises(RuntimeError, match=r"^Latimer needs asyncio"),
        TestClient(OpenAIMiddleware(Starlette(), Echo()), backend="trio"),
    ):
        pass
    client = TestClient(OpenAIAdapter(Echo("Hi"), any_model=True), backend="trio")
    for _ in range(2):
        caplog.clear()
        reply = client.post("/v1/chat/completions", json=HI)
        assert reply.status_code == 500
        assert "Latimer needs asyncio" in reply.json()["error"]["message"]
        assert [record.message for record in caplog.records] == [NEEDS_ASYNCIO]


def test_unknown_options_are_refused() -> None:
    """A misspelt option raises a TypeError, so that no server starts without its keys."""
    with pytest.raises(TypeError, match="unknown options: api_kyes"):
        OpenAIAdapter(Echo(), api_kyes=["key"])  # type: ignore[call-arg]
