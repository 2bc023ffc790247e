"""Tests of what users of Starlette expect from a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import orjson
import pytest
from benchmarks.calls import Prepared, scope_of
from latimer.adapter import OpenAIAdapter
from latimer.adapter.auth import require_key
from latimer.adapter.request import WHOLE, Exchange
from latimer.adapter.request_log import RequestLog
from latimer.backends.errors import Busy
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, NoMatchFound, Route, Router, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket
from support.clients import Leaving
from support.engines.echo import Echo

HI = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer sk-one"}
DIGEST = "456f1612bd25c6c8455039437bf441f4"


def adapter(**options: Any) -> OpenAIAdapter:
    """Return an adapter of a backend that needs no model."""
    return OpenAIAdapter(Prepared(burst=True), **options)  # type: ignore[arg-type]


class Noted:
    """A middleware that notes keys and statuses, and adds a header."""

    def __init__(self, app: Any, notes: list[object]) -> None:
        self.app, self.notes = app, notes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.notes.append(Request(scope).state.key_digest)

        async def note(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.notes.append(message["status"])
                message["headers"] = [*message["headers"], (b"x-noted", b"yes")]
            await send(message)

        await self.app(scope, receive, note)


class Cut:
    """An app whose clients disconnect before the end of their bodies."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def received() -> Any:
            return {"type": "http.disconnect"}

        await self.app(scope, received, send)


async def home(request: Request) -> JSONResponse:
    """Respond with the parameters of the path."""
    return JSONResponse(request.path_params)


def test_the_adapter_is_a_router() -> None:
    """`app.routes` has every path with its name, and `url_path_for` finds each by an endpoint."""
    app = adapter()
    assert isinstance(app, Router)
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    assert {CHAT, "/chat/completions", "/v1/models/{name:path}", "/health"} <= paths
    assert app.url_path_for("create_chat_completion") == CHAT
    assert app.url_path_for("list_chat_completions") == CHAT
    assert app.url_path_for("retrieve_model", name="org/model") == "/v1/models/org/model"
    outer = Starlette(routes=[Mount("/ai", app, name="ai")])
    assert outer.url_path_for("ai:create_chat_completion") == f"/ai{CHAT}"
    with pytest.raises(NoMatchFound):
        app.url_path_for("create_chat_completion", name="x")


def test_routes_can_be_added() -> None:
    """Routes of the user are served after those of the API, or before them if put at the front."""
    app = adapter(routes=[Route("/v1/mine/{id:int}", home)])
    app.add_route("/late", home)
    with TestClient(app) as client:
        assert client.get("/v1/mine/5").json() == {"id": 5}
        assert client.get("/late").json() == {}
        assert client.post(CHAT, json=HI).is_success
        app.routes.append(Route(CHAT, home, methods=["PUT"]))
        assert client.put(CHAT, json={}).status_code == 405
        app.routes.insert(0, Route(CHAT, home, methods=["PUT"]))
        assert client.put(CHAT, json={}).json() == {}
        assert client.post(CHAT, json=HI).is_success
        del app.routes[0]
        assert client.put(CHAT, json={}).status_code == 405
        assert client.post(f"/{CHAT}/", json=HI).is_success


def test_responses_of_users_name_the_request() -> None:
    """A response of a route has one `x-request-id`: its own, or that of the adapter."""

    async def own(_request: Request) -> Response:
        return PlainTextResponse("own", headers={"X-Request-Id": "mine"})

    routes = [Route("/v1/usage", home), Route("/own", own), Mount("/inner", adapter())]
    for options in ({}, {"middleware": [Middleware(Noted, [])]}):
        app = adapter(routes=routes, api_keys=["sk-one"], **options)
        with TestClient(Starlette(routes=[Mount("/ai", app)])) as client:
            for path, status in (("/v1/usage", 200), ("/inner/v1/models/m", 200), ("/x", 404)):
                reply = client.get(f"/ai{path}", headers=KEY)
                assert reply.status_code == status
                (name,) = reply.headers.get_list("x-request-id")
                assert name.startswith("req_")
            assert client.get("/ai/own").headers.get_list("x-request-id") == ["mine"]
            assert client.put("/ai/own").headers["x-request-id"].startswith("req_")


def test_a_websocket_can_be_added() -> None:
    """A `WebSocketRoute` of the user is served."""

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(await socket.receive_text())
        await socket.close()

    with (
        TestClient(adapter(routes=[WebSocketRoute("/echo", echo)])) as client,
        client.websocket_connect("/echo") as socket,
    ):
        socket.send_text("Hi")
        assert socket.receive_text() == "Hi"


def test_middleware_sees_keys_and_responses() -> None:
    """Middleware knows the digest of the key, and sees all responses, also those with errors."""
    notes: list[object] = []
    app = adapter(api_keys=["sk-one"], middleware=[Middleware(Noted, notes)])
    with TestClient(app) as client:
        for path, headers, digest, status in (
            (CHAT, KEY, DIGEST, 200),
            (CHAT, {}, None, 401),
            ("/v1/none", {}, None, 404),
            ("/v1/models", KEY, DIGEST, 405),
        ):
            reply = client.post(path, json=HI, headers=headers)
            assert (reply.status_code, reply.headers["x-noted"]) == (status, "yes")
            assert notes[-2:] == [digest, status]
    with TestClient(adapter(middleware=[Middleware(Noted, notes)])) as client:
        assert client.post(CHAT, json=HI).is_success
        assert notes[-2:] == ["", 200]


async def _passed_on(request: Request, call_next: Callable[[Request], Any]) -> Response:
    response: Response = await call_next(request)
    return response


@pytest.mark.parametrize(
    "middleware",
    [Middleware(GZipMiddleware, minimum_size=1), Middleware(BaseHTTPMiddleware, _passed_on)],
    ids=["gzip", "base"],
)
def test_starlettes_middleware_works(middleware: Middleware) -> None:
    """Middleware of Starlette works with plain responses, streams and errors."""
    with TestClient(adapter(middleware=[middleware])) as client:
        assert client.post(CHAT, json=HI).json()["usage"]["prompt_tokens"] == 12
        assert client.post(CHAT, json={**HI, "stream": True}).text.endswith("data: [DONE]\n\n")
        assert client.post(CHAT, json={}).json()["error"]["param"] == "messages"


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("around", [True, False])
async def test_middleware_gets_a_response_for_a_client_that_has_left(
    around: bool, reads: bool
) -> None:
    """Middleware that waits for a response gets an empty one with 499 after a disconnect.

    The client leaves while its body is read, or while the engine works.
    """
    lines: list[bytes] = []
    engine = Echo("Hello.", pause=60)
    middleware = [Middleware(BaseHTTPMiddleware, _passed_on)]
    served = OpenAIAdapter(
        engine, middleware=[] if around else middleware, observers=[RequestLog(lines.append)]
    )
    app = Starlette(routes=[Mount("/", served)], middleware=middleware) if around else served
    leaving = Leaving(app)
    transport = httpx2.ASGITransport(Cut(app) if reads else leaving)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        asked = asyncio.create_task(client.post(CHAT, json={**HI, "model": "demo"}))
        while not (reads or engine.running):
            await asyncio.sleep(0.01)
        leaving.gone.set()
        reply = await asked
    await served.aclose()
    assert (reply.status_code, reply.content, engine.running) == (499, b"", 0)
    events = [orjson.loads(line) for line in b"".join(lines).splitlines()]
    assert [one["status"] for one in events] == [499]


@pytest.mark.parametrize("stream", [True, False])
async def test_middleware_gets_a_response_for_a_client_that_leaves_at_its_start(
    stream: bool,
) -> None:
    """Middleware that has not taken the start of a response at a disconnect gets one with 499."""
    served = OpenAIAdapter(Echo("Hello."))

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        async def later(message: Any) -> None:
            if message["type"] == "http.response.start" and not leaving.gone.is_set():
                leaving.gone.set()
                await asyncio.Event().wait()
            await send(message)

        await served(scope, receive, later)

    routes = [Mount("/", slow)]
    leaving = Leaving(
        Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, _passed_on)])
    )
    transport = httpx2.ASGITransport(leaving)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.post(CHAT, json={**HI, "model": "demo", "stream": stream})
    await served.aclose()
    assert (reply.status_code, reply.content) == (499, b"")


def test_errors_of_users_have_openais_format() -> None:
    """An error of a middleware or a route of the user becomes OpenAI's error object."""

    class Limit:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http" and scope["path"] == CHAT:
                raise Busy("Enough.", retry_after=2)
            await self.app(scope, receive, send)

    async def teapot(_: Request) -> Response:
        raise HTTPException(418, "Short.", headers={"x-tea": "yes"})

    async def mine(request: Request) -> Response:
        return PlainTextResponse(require_key(request))

    app = adapter(
        api_keys=["sk-one"],
        routes=[Route("/tea", teapot), Route("/mine", mine)],
        middleware=[Middleware(Limit)],
    )
    with TestClient(app) as client:
        reply = client.post(CHAT, json=HI, headers=KEY)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
        assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        reply = client.get("/tea")
        assert (reply.status_code, reply.headers["x-tea"]) == (418, "yes")
        assert reply.json()["error"] == {
            "message": "Short.", "type": "invalid_request_error", "param": None, "code": None,
        }  # fmt: skip
        assert client.get("/mine", headers=KEY).text == DIGEST
        assert client.get("/mine").json()["error"]["message"].startswith("You didn't provide")


def test_http_exceptions_of_a_mounted_adapter() -> None:
    """Starlette's exception in a route of a mounted adapter is OpenAI's error, unless the app
    around it has a handler of its own; a status without a body has none."""

    async def fail(request: Request) -> Response:
        raise HTTPException(int(request.query_params["status"]), {"why": "no"})  # type: ignore[arg-type]

    async def own(_request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"own {error}", 418)

    routes = [Mount("/ai", adapter(routes=[Route("/fail", fail)]))]
    with TestClient(Starlette(routes=routes)) as client:
        reply = client.get("/ai/fail?status=503")
        assert reply.json()["error"] == {
            "message": "{'why': 'no'}", "type": "server_error", "param": None, "code": None,
        }  # fmt: skip
        for status in (204, 304):
            reply = client.get(f"/ai/fail?status={status}")
            assert (reply.status_code, reply.content) == (status, b"")
    with TestClient(Starlette(routes=routes, exception_handlers={HTTPException: own})) as client:
        assert client.get("/ai/fail?status=503").text.startswith("own 503")


@pytest.mark.parametrize("error", [HTTPException(418), RuntimeError("Broken.")])
def test_an_error_after_the_start_of_a_response_is_no_second_one(error: Exception) -> None:
    """An error of a user's route that has begun to respond reaches the server as it is."""

    async def broken(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"a"
            raise error

        return StreamingResponse(parts())

    with (
        TestClient(adapter(routes=[Route("/broken", broken)])) as client,
        pytest.raises(type(error)) as caught,
    ):
        client.get("/broken")
    assert caught.value is error


def test_an_adapter_in_an_adapter() -> None:
    """An adapter that is mounted in another has its own keys, and the outer one keeps its own."""
    inner = adapter(api_keys=["sk-one"])
    with TestClient(adapter(routes=[Mount("/{tenant}", inner)])) as client:
        assert client.post(f"/inner{CHAT}", json=HI).status_code == 401
        assert client.get("/inner/v1/models/m", headers=KEY).json()["id"] == "m"
        assert client.post(CHAT, json=HI).is_success


@pytest.mark.parametrize("has_middleware", [False, True], ids=["alone", "with a middleware"])
async def test_only_a_response_without_middlewares_is_one_message(has_middleware: bool) -> None:
    """A server that takes whole responses gets one; a middleware gets the messages of ASGI."""
    notes: list[object] = []
    app = adapter(middleware=[Middleware(Noted, notes=notes)] if has_middleware else [])
    sent: list[str] = []

    body = [{"type": "http.request", "body": orjson.dumps(HI)}]

    async def receive() -> Any:
        # After the body, a server waits for the client.
        return body.pop() if body else await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        assert message.get("status", 200) == 200

    kind = (b"content-type", b"application/json")
    scope = {**scope_of(CHAT, kind), "type": "http", "method": "POST", "extensions": {WHOLE: {}}}
    await app(scope, receive, send)
    if has_middleware:
        assert sent == ["http.response.start", "http.response.body"]
        assert notes[-1] == 200
    else:
        assert sent == [WHOLE]
    await app.aclose()


def test_an_exchange_is_a_request_of_starlette() -> None:
    """An exchange has all that Starlette's own constructor sets, with the same values."""

    async def channel(*_: Any) -> Any:
        """Do nothing."""

    scope = {**scope_of("/v1/models"), "type": "http", "method": "GET"}
    exchange = Exchange(scope, channel, channel)
    for name, value in vars(Request(scope, channel, channel)).items():
        assert getattr(exchange, name) is value, name
