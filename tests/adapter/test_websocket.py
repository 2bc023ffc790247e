"""Tests of responses over a WebSocket: handshakes, frames, lanes, and the end of a connection."""

from __future__ import annotations

import asyncio
import json
import re
import time
from functools import partial
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from latimer.adapter import OpenAIAdapter, OpenAIMiddleware
from latimer.adapter.endpoints import response_socket
from latimer.adapter.handshake import FRAMES
from latimer.adapter.limits.config import KeyConfig, digest_of
from latimer.adapter.origins import LocalRules
from latimer.adapter.request_log import RequestLog
from latimer.adapter.responses import lanes
from latimer.backends import offload
from latimer.backends.errors import EngineError
from latimer.backends.offload import FairThreads
from starlette.middleware import Middleware
from starlette.routing import Mount, Router
from starlette.testclient import TestClient, WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect
from support.engines.echo import Echo
from support.frames import (
    ENDS,
    R,
    adapting,
    answer,
    connected,
    create,
    events,
    is_last,
    text_of,
    texts_in,
)
from support.servers import serving

KEY = {"authorization": "Bearer sk-team"}
LONG = "word " * 400


class Breaks(Echo):
    """An engine that fails after its first events."""

    async def batches(self, job: Any) -> Any:
        async for batch in super().batches(job):
            yield batch
            raise EngineError("The engine broke.")


def refusal(app: Any, path: str = R, **options: Any) -> tuple[int, Any]:
    """Return the status and the error of a handshake that an app refuses."""
    with pytest.raises(WebSocketDenialResponse) as refused, connected(app, path, **options):
        pass
    return refused.value.status_code, refused.value.json()["error"]


@pytest.mark.parametrize("path", [R, "/responses", "//v1//responses/"])
def test_a_connection_answers_frames(path: str) -> None:
    """A WebSocket is served at each path of responses, and answers one frame after another."""
    with connected(OpenAIAdapter(Echo("Hello.")), path) as socket:
        for _ in range(2):
            socket.send_json(create())
            found = events(socket)
            assert [one["sequence_number"] for one in found] == list(range(len(found)))
            assert [one["type"] for one in found[:2]] == [
                "response.created", "response.in_progress",
            ]  # fmt: skip
            assert text_of(found[-1]) == "Hello."
            assert not any("stream_id" in one for one in found)


def test_an_unknown_frame_gets_a_list_of_those_that_are_known() -> None:
    """The error for a frame of another type lists all types, also that without an answer."""
    with connected(OpenAIAdapter(Echo("Hello."))) as socket:
        socket.send_json({"type": "response.processed"})
        socket.send_json({"type": "response.cancel"})
        error = socket.receive_json()["error"]
        assert (error["param"], error["code"]) == ("type", "invalid_value")
        assert error["message"] == (
            "Invalid value: 'response.cancel'. Supported values are: 'response.create' and "
            "'response.processed'."
        )


@pytest.mark.parametrize("lane", [{}, {"stream_id": "a"}])
def test_the_first_frame_has_the_notes_of_a_response(lane: dict[str, str]) -> None:
    """The first event has the headers that list ignored fields, and no other event has them."""
    with connected(OpenAIAdapter(Echo("Hello."))) as socket:
        socket.send_json(create(unknown=1, **lane))
        first, *others = events(socket)
        assert first["type"] == "response.created"
        assert first["headers"] == {"x-latimer-ignored": "unknown"}
        assert not any("headers" in one for one in others)
        assert all(one.get("stream_id") == lane.get("stream_id") for one in (first, *others))
        socket.send_json(create(**lane))
        assert not any("headers" in one for one in events(socket))


@pytest.mark.parametrize("how", ["FastAPI", "router", "middleware"])
def test_a_mounted_app_serves_a_websocket(how: str) -> None:
    """An adapter in another app answers the frames of a WebSocket under its prefix."""
    adapter = OpenAIAdapter(Echo("Hello."))
    app: Any = Router([Mount("/ai", adapter)])
    if how == "FastAPI":
        app = FastAPI()
        app.mount("/ai", adapter)
    elif how == "middleware":
        app = OpenAIMiddleware(FastAPI(), Echo("Hello."))
    with connected(app, R if how == "middleware" else f"/ai{R}") as socket:
        made = answer(socket)
        assert text_of(made) == "Hello."
        again = answer(socket, "And?", previous_response_id=made["response"]["id"])
        assert text_of(again) == "Hello."


def test_a_key_is_needed() -> None:
    """A handshake without the key gets a 401 with OpenAI's error, and one with it is accepted."""
    app = OpenAIAdapter(Echo(), api_keys=["sk-team"])
    for headers in ({}, {"authorization": "Bearer sk-other"}):
        status, error = refusal(app, headers=headers)
        assert (status, error["type"]) == (401, "invalid_request_error")
    with connected(app, headers=KEY) as socket:
        assert text_of(answer(socket)) == "Hi"


class Noting(FairThreads):
    """Threads that note the owner of each piece of work."""

    def __init__(self) -> None:
        super().__init__(1, "noting")
        self.owners: list[str] = []

    def submit(self, *arguments: Any, **named: Any) -> Any:
        self.owners.append(offload.OWNER.get())
        return super().submit(*arguments, **named)


def test_large_frames_have_the_owner_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a connection's frames belongs to its key, so that keys take turns in threads."""
    app = OpenAIAdapter(Echo(), any_model=True, api_keys=["sk-team", "sk-other"])
    found = []
    for headers in (KEY, {"authorization": "Bearer sk-other"}):
        threads = Noting()
        monkeypatch.setattr(offload, "_threads", threads)
        with connected(app, headers=headers) as socket:
            answer(socket, "x" * offload.UNKNOWN)
        threads.shutdown()
        found.append(set(threads.owners))
    assert [len(owners) for owners in found] == [1, 1]
    assert not {""} & (found[0] | found[1])
    assert found[0] != found[1]


def test_a_browser_sends_its_key_as_a_subprotocol() -> None:
    """A page, which can set no header, sends the key among the subprotocols, and gets another."""
    app = OpenAIAdapter(Echo(), api_keys=["sk-team"])
    key = "openai-insecure-api-key.sk-team"
    with connected(app, subprotocols=["realtime", key]) as socket:
        assert socket.accepted_subprotocol == "realtime"
        assert text_of(answer(socket)) == "Hi"
    with connected(app, subprotocols=[key]) as socket:
        assert socket.accepted_subprotocol == key
    assert refusal(app, subprotocols=["openai-insecure-api-key.sk-other"])[0] == 401


def test_a_key_that_was_taken_back_is_refused_in_an_open_connection() -> None:
    """A frame needs a key that is valid when the frame arrives."""
    app = OpenAIAdapter(Echo(), api_keys=["sk-team"])
    with connected(app, headers=KEY) as socket:
        answer(socket)
        app.replace_keys(["sk-new"], {})
        assert answer(socket)["status"] == 401


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ({"local_rules": LocalRules()}, 403),
        ({"local_rules": LocalRules(["https://chat.example"])}, 101),
        ({"cors_origins": ["https://other.example"]}, 403),
        ({"cors_origins": ["*"]}, 101),
        ({}, 403),
        ({"api_keys": ["sk-team"]}, 403),
    ],
)
def test_a_page_that_may_not_read_responses_opens_no_websocket(
    options: dict[str, Any], status: int
) -> None:
    """A handshake of a page gets a 403, unless the page may read responses."""
    app = OpenAIAdapter(Echo(), **options)
    headers = {"origin": "https://chat.example", "host": "localhost"}
    if status == 101:
        with connected(app, headers=headers) as socket:
            assert text_of(answer(socket)) == "Hi"
        return
    found, error = refusal(app, headers=headers)
    assert (found, error["code"]) == (403, "origin_not_allowed")


@pytest.mark.parametrize("options", [{}, {"cors_origins": ["https://other.example"]}])
def test_pages_of_the_same_host_may_open_a_websocket(options: dict[str, Any]) -> None:
    """An app's own pages need no `cors_origins`, also behind a proxy that ends TLS."""
    app = OpenAIAdapter(Echo(), **options)
    for origin, host in (
        ("https://app.example", "app.example"),
        ("http://App.example:8000", "app.example:8000"),
        ("http://[::1]:80", "[::1]"),
    ):
        with connected(app, headers={"origin": origin, "host": host}) as socket:
            assert text_of(answer(socket)) == "Hi"
    for origin, host in (
        ("http://app.example:3000", "app.example:8000"),
        ("https://app.example.evil.example", "app.example"),
        ("app://app.example", "app.example"),
        ("null", "null"),
    ):
        status, error = refusal(app, headers={"origin": origin, "host": host})
        assert (status, error["code"]) == (403, "origin_not_allowed")
        assert error["message"].endswith(" To allow it, add it to cors_origins.")


def test_a_foreign_host_name_opens_no_websocket() -> None:
    """The rules of a server without a key for host names are those of HTTP."""
    app = OpenAIAdapter(Echo(), local_rules=LocalRules())
    status, error = refusal(app, headers={"host": "evil.example"})
    assert (status, error["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    ("path", "options"), [(R, {"websocket_lifetime": 0}), ("/v1/chat/completions", {})]
)
def test_where_there_is_no_websocket_clients_use_http(path: str, options: Any) -> None:
    """A handshake is a 426 if WebSockets are off, and at other paths."""
    status, error = refusal(OpenAIAdapter(Echo(), **options), path)
    assert (status, error["code"]) == (426, "unsupported_endpoint")


def test_an_unknown_path_of_a_websocket_is_unknown() -> None:
    """A handshake at a path that no method has is the 404 of HTTP, with its advice."""
    app = OpenAIAdapter(Echo())
    for mounted, root in ((app, ""), (Router([Mount("/ai", app)]), "/ai")):
        status, error = refusal(mounted, f"{root}/v1/nope")
        assert (status, error["message"]) == (404, f"Invalid URL (GET {root}/v1/nope)")
        status, error = refusal(mounted, f"{root}/v1/v1/responses")
        own = f"ends in {root}" if root else "has no path"
        assert (status, error["message"].partition(". ")[2]) == (
            404,
            f"This client adds /v1 itself: its base URL {own}.",
        )


@pytest.mark.parametrize("mounted", [True, False])
async def test_a_server_that_cannot_send_the_error_closes(mounted: bool) -> None:
    """A server without the extension for errors of handshakes closes the connection."""
    app: Any = OpenAIAdapter(Echo(), websocket_lifetime=0)
    app = OpenAIMiddleware(app, Echo(), websocket_lifetime=0) if mounted else app
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "websocket", "path": R, "headers": []}, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def test_a_handshake_over_http(echo: httpx2.AsyncClient) -> None:
    """A handshake that a server passes on as a GET gets a 426."""
    headers = {"connection": "Upgrade", "upgrade": "websocket"}
    reply = await echo.get(R, headers=headers)
    assert reply.status_code == 426
    assert (reply.headers["upgrade"], reply.headers["connection"]) == ("HTTP/1.1", "upgrade")
    assert (await echo.get(R)).status_code == 200


def test_a_server_that_knows_websockets_itself() -> None:
    """uvicorn's own protocols serve the frames, too."""
    from websockets.sync.client import connect

    with serving(lambda: OpenAIAdapter(Echo("Hello.")), "auto") as url:
        with connect(url.replace("http", "ws") + R, proxy=None) as connection:
            connection.send(json.dumps(create()))
            while not is_last(frame := json.loads(connection.recv(10))):
                pass
        assert text_of(frame) == "Hello."


def test_a_response_that_is_not_stored_is_continued() -> None:
    """The engine gets the items of the response before, which only the connection has."""
    engine = Echo("Hello.")
    with adapting(engine) as socket:
        first = answer(socket, "one")["response"]
        second = answer(socket, "two", previous_response_id=first["id"])["response"]
        answer(socket, "three", previous_response_id=second["id"])
        lost = answer(socket, "four", previous_response_id=first["id"])
    assert lost["error"]["code"] == "previous_response_not_found"
    text = engine.jobs[-1].prompt.content.text  # type: ignore[union-attr]
    places = [text.index(word) for word in ("one", "Hello.", "two", "three")]
    assert places == sorted(places)


@pytest.mark.parametrize("store", ["memory", "off"])
def test_a_continuation_needs_no_store(store: str) -> None:
    """Without a store a connection continues its latest response, too."""
    with adapting(Echo("Hello."), store=store) as socket:
        made = answer(socket)["response"]
        again = answer(socket, previous_response_id=made["id"])
        assert again["response"]["previous_response_id"] == made["id"]


def test_a_stored_response_begins_with_what_is_not_stored() -> None:
    """A stored response that continues one which is not has the items before it as its input."""
    app = OpenAIAdapter(Echo("Hello."))
    with TestClient(app) as client:
        with client.websocket_connect(R) as socket:
            first = answer(socket, "one")["response"]
            made = answer(socket, "two", previous_response_id=first["id"], store=True)["response"]
        assert made["store"] is True
        items = client.get(f"{R}/{made['id']}/input_items?order=asc").json()["data"]
        texts = [part["text"] for item in items for part in item["content"]]
        assert texts == ["one", "Hello.", "two"]
        body = {"model": "demo", "input": "three", "previous_response_id": made["id"]}
        assert client.post(R, json=body).status_code == 200


def test_a_warm_up_is_continued_without_new_items() -> None:
    """A warm-up has no output, and its continuation with an empty input answers its prompt."""
    engine = Echo("Hello.")
    with adapting(engine) as socket:
        socket.send_json(create("Count.", generate=False))
        found = events(socket)
        assert [one["type"] for one in found] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        warm = found[-1]["response"]
        assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
        assert warm["usage"]["input_tokens"] > 0
        made = answer(socket, [], previous_response_id=warm["id"])
    assert text_of(made) == "Hello."
    first, second = (job.prompt.content.text for job in engine.jobs)  # type: ignore[union-attr]
    assert first == second


def test_a_warm_up_before_the_first_message() -> None:
    """Codex warms up without a message; nothing is evaluated, and the first message follows."""
    engine = Echo("Hello.")
    with adapting(engine) as socket:
        warm = answer(socket, [], generate=False)["response"]
        assert (warm["status"], engine.jobs[0].max_tokens) == ("completed", 0)
        made = answer(socket, "Count.", previous_response_id=warm["id"])
    assert text_of(made) == "Hello."


def test_lanes_run_at_the_same_time() -> None:
    """A lane does not wait for another one, and its events have its name."""
    engine = Echo(pause=0.002)
    with adapting(engine) as socket:
        socket.send_json(create(LONG, stream_id="slow"))
        while socket.receive_json()["type"] != "response.output_text.delta":
            pass
        socket.send_json(create("Hi", stream_id="fast"))
        while not is_last(frame := socket.receive_json()):
            pass
        assert frame["stream_id"] == "fast"
        assert text_of(frame) == "Hi"


def test_a_lane_is_answered_in_order() -> None:
    """A frame waits until the response before it on its lane has ended."""
    with adapting(Echo(pause=0.001)) as socket:
        for text in ("one", "two", "three"):
            socket.send_json(create(text))
        assert [text_of(events(socket)[-1]) for _ in range(3)] == ["one", "two", "three"]


def test_a_connection_runs_sixteen_responses() -> None:
    """Of many lanes sixteen run, and the others wait for their turn."""
    engine = Echo(pause=0.05)
    with adapting(engine) as socket:
        for number in range(20):
            socket.send_json(create("ab", stream_id=str(number)))
        ended = 0
        while ended < 20:
            ended += is_last(socket.receive_json())
            assert engine.running <= lanes.MOST_RUNNING


def test_too_many_frames_that_wait_are_refused() -> None:
    """A frame beyond those that may wait gets a 429."""
    with adapting(Echo(pause=0.01)) as socket:
        socket.send_json(create(LONG))
        for _ in range(lanes.MOST_WAITING + 1):
            socket.send_json(create("ab"))
        while not is_last(frame := socket.receive_json()):
            pass
    assert (frame["status"], frame["error"]["code"]) == (429, "websocket_queue_full")


def test_the_limits_of_a_key_hold_for_each_frame() -> None:
    """A frame beyond the requests of its key gets a 429 with the time to wait."""
    keys = {"team": KeyConfig(digest=digest_of("sk-team"), requests_per_minute=1)}
    with connected(OpenAIAdapter(Echo(), any_model=True, keys=keys), headers=KEY) as socket:
        assert "response" in answer(socket)
        refused = answer(socket)
    assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(refused["headers"]["retry-after"]) > 0
    assert refused["error"]["headers"] == refused["headers"]


def test_the_concurrency_of_a_key_counts_responses() -> None:
    """An open connection counts for nothing; two responses at a time are two requests."""
    keys = {"team": KeyConfig(digest=digest_of("sk-team"), concurrent=1)}
    app = OpenAIAdapter(Echo(pause=0.002), any_model=True, keys=keys)
    with connected(app, headers=KEY) as socket:
        socket.send_json(create(LONG, stream_id="slow"))
        while socket.receive_json()["type"] != "response.output_text.delta":
            pass
        socket.send_json(create("Hi", stream_id="fast"))
        while "status" not in (frame := socket.receive_json()):
            pass
        assert (frame["stream_id"], frame["status"]) == ("fast", 429)


def test_a_response_has_a_line_in_the_log() -> None:
    """Each frame is a request in the log, with its tokens, and the connection has no line."""
    lines: list[bytes] = []
    log = RequestLog(lines.append, "json")
    with connected(OpenAIAdapter(Echo("Hello."), any_model=True, observers=[log])) as socket:
        answer(socket)
        answer(socket, temperature=9)
    found = [json.loads(line) for line in b"".join(lines).splitlines()]
    assert [(one["path"], one["status"]) for one in found] == [(R, 200), (R, 400)]
    assert found[0]["completion_tokens"] == len("Hello.")
    assert found[0]["stream"] is True


def test_an_engine_that_fails_in_a_response() -> None:
    """After its first events a response fails as over HTTP, and the connection stays open."""
    with adapting(Breaks()) as socket:
        socket.send_json(create("Hello"))
        found = events(socket)
        assert [one["type"] for one in found[-2:]] == ["error", "response.failed"]
        assert found[-1]["response"]["error"]["message"] == "The engine broke."
        assert answer(socket, temperature=9)["status"] == 400


def test_an_engine_that_fails_before_a_response() -> None:
    """Before the first event an error is one frame with the status that HTTP would have."""
    with adapting(Echo(error=EngineError("The engine broke."))) as socket:
        frame = answer(socket, stream_id="a")
    assert (frame["status"], frame["stream_id"]) == (502, "a")
    assert frame["error"]["message"] == "The engine broke."


def test_an_unexpected_exception(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """An exception in the server is a frame with a 500 and a traceback in the log."""

    def fail(*_: Any) -> None:
        raise KeyError("oops")

    with adapting(Echo()) as socket:
        with monkeypatch.context() as patch:
            patch.setattr("latimer.adapter.endpoints.responses.begun", fail)
            frame = answer(socket)
        assert (frame["status"], frame["error"]["type"]) == (500, "server_error")
        assert "oops" in caplog.text
        assert text_of(answer(socket)) == "Hi"


def test_a_client_that_leaves_ends_its_responses() -> None:
    """The jobs of all lanes end soon after the client has closed the connection."""
    engine = Echo(pause=0.01)
    app = OpenAIAdapter(engine, any_model=True)
    with TestClient(app) as client:
        with client.websocket_connect(R) as socket:
            for number in range(4):
                socket.send_json(create(LONG, stream_id=str(number)))
            while engine.running < 4:
                socket.receive_json()
        end = time.monotonic() + 5
        while engine.running and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.running == 0
        assert not app.service.sockets
        assert app.service.kept.size == 0


def test_the_first_events_do_not_wait_for_the_first_token() -> None:
    """An engine that reads a long prompt keeps no client waiting for `response.created`."""

    class Admits(Echo):
        async def admit(self, job: Any) -> None:
            await super().admit(job)
            job.ticket.admitted = True

    engine = Admits(pause=1.0)
    with adapting(engine) as socket:
        start = time.monotonic()
        socket.send_json(create("ab"))
        assert socket.receive_json()["type"] == "response.created"
        assert socket.receive_json()["type"] == "response.in_progress"
        assert time.monotonic() - start < 0.8
        engine.pause = 0.0
        found = events(socket)
        numbers = [one["sequence_number"] for one in found]
        assert numbers == list(range(2, 2 + len(found)))
        assert text_of(found[-1]) == "ab"


class Commented:
    """A middleware that adds a comment to each part of a body, and a name to each event."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed(message: Any) -> None:
            if message.get("body"):
                body = b": first\n\n" + message["body"].replace(b"data: ", b"event: a\ndata: ")
                message = {**message, "body": body + b": last\n\n"}
            await send(message)

        await self._app(scope, receive, changed if scope["type"] == "http" else send)


def test_a_middleware_may_change_the_stream() -> None:
    """Events that pass through a middleware are frames, and its comments are not."""
    app = OpenAIAdapter(Echo("Hello."), middleware=[Middleware(Commented)])
    with connected(app) as socket:
        socket.send_json(create())
        found = events(socket)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    assert text_of(found[-1]) == "Hello."


async def test_a_middleware_gets_lines_also_if_the_server_takes_frames() -> None:
    """A middleware changes the stream on every server."""
    middleware = [Middleware(Commented)]
    app = OpenAIAdapter(Echo("Hello."), any_model=True, middleware=middleware)
    found = await messages_of(app, create(), {FRAMES: {}})
    await app.aclose()
    texts = [text for one in found for text in texts_in(one[FRAMES])]
    assert [json.loads(one)["sequence_number"] for one in texts] == [*range(len(texts))]
    assert text_of(json.loads(texts[-1])) == "Hello."


def lasting(text: str) -> str:
    """Return the text of an event without what differs in each response."""
    return re.sub(r'(?<=_)[0-9a-f]{48}|(?<=ed_at":)[0-9]+|(?<="obfuscation":)"[^"]*"', "", text)


async def messages_of(app: Any, frame: dict[str, Any], extensions: Any) -> list[Any]:
    """Return the messages that a server gets as the answer to a frame."""
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    sent: list[Any] = []
    ended = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if any(end in str(message) for end in ENDS):
            ended.set()

    scope = {"type": "websocket", "path": R, "headers": [], "query_string": b"",
             "extensions": extensions}  # fmt: skip
    task = asyncio.create_task(app(scope, arrived.get, send))
    await arrived.put({"type": "websocket.connect"})
    await arrived.put({"type": "websocket.receive", "text": json.dumps(frame)})
    await asyncio.wait_for(ended.wait(), 5)
    await arrived.put({"type": "websocket.disconnect", "code": 1000})
    await asyncio.wait_for(task, 5)
    return [one for one in sent if one["type"] == "websocket.send"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unknown": 1},
        {"stream_id": "a"},
        {"stream_id": "a", "unknown": 1},
        {"stream_options": {"include_obfuscation": True}},
        {"stream_options": {"include_obfuscation": False}, "unknown": 1},
        {"generate": False, "unknown": 1},
    ],
)
@pytest.mark.parametrize("backend", [Echo, partial(Echo, pause=0.01), Breaks])
async def test_a_server_that_takes_frames_gets_a_burst_at_once(
    backend: Any, options: dict[str, Any]
) -> None:
    """Events that were made together are one message there, and elsewhere one message each."""
    app = OpenAIAdapter(backend("Hello."), any_model=True)
    plain = await messages_of(app, create(**options), {})
    framed = await messages_of(app, create(**options), {FRAMES: {}})
    await app.aclose()
    bursts = [texts_in(one[FRAMES]) for one in framed]
    assert max(map(len, bursts)) > 1
    found = [lasting(text.decode()) for texts in bursts for text in texts]
    assert found == [lasting(one["text"]) for one in plain]


def test_deltas_are_padded_if_a_request_asks_for_it() -> None:
    """Over a WebSocket, too, deltas have random text at their end, and other events have none."""
    with connected(OpenAIAdapter(Echo("Hello."))) as socket:
        socket.send_json(create(stream_options={"include_obfuscation": True}))
        for one in events(socket):
            assert ("obfuscation" in one) == one["type"].endswith(".delta")


def test_a_connection_ends_after_its_lifetime() -> None:
    """An old connection lets its response end, says why, and closes with 1000."""
    app = OpenAIAdapter(Echo(pause=0.005), any_model=True, websocket_lifetime=0.1)
    with connected(app) as socket:
        socket.send_json(create("x" * 40))
        assert text_of(events(socket)[-1]) == "x" * 40
        error = socket.receive_json()
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
    assert closed.value.code == 1000


def test_a_drain_closes_connections_when_their_responses_have_ended() -> None:
    """In a drain a response ends, what waits and what comes is refused, and 1001 says why."""
    app = OpenAIAdapter(Echo(pause=0.005), any_model=True)
    with connected(app) as socket:
        socket.send_json(create("x" * 30))
        socket.send_json(create("waits"))
        while socket.receive_json()["type"] != "response.output_text.delta":
            pass
        app.drain()
        found = []
        with pytest.raises(WebSocketDisconnect) as closed:
            while True:
                found.append(socket.receive_json())
    ends = [one for one in found if is_last(one)]
    assert {one.get("status", 200) for one in ends} == {503, 200}
    assert (closed.value.code, closed.value.reason) == (1001, "The server is shutting down.")
    assert refusal(app)[0] == 503


def test_a_message_that_is_too_large_closes_the_connection() -> None:
    """A frame larger than a body may be closes the connection with 1009."""
    with adapting(Echo(), max_body=1000) as socket:
        assert text_of(answer(socket)) == "Hi"
        socket.send_json(create("é" * 400 + "x" * 300))
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
    assert closed.value.code == 1009


NAMES = st.sampled_from([
    "type", "model", "input", "instructions", "previous_response_id", "stream", "stream_id",
    "generate", "background", "tools", "tool_choice", "text", "store", "include", "reasoning",
    "metadata", "temperature", "client_metadata", "stream_options", "conversation",
])  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text()
    | st.sampled_from(["response.create", "response.steer", "response.processed", "demo", "Hi"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(NAMES | st.text(), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=8)
CREATES = OBJECTS.map(lambda body: {**create(), **body, "type": "response.create"})
SENT = (OBJECTS | CREATES | VALUES).map(json.dumps) | st.text()


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SENT | st.binary(max_size=20), max_size=6))
def test_no_frame_breaks_a_connection(frames: list[Any]) -> None:
    """Any frames get known answers, never a 500, and the connection answers a valid one at last."""
    with adapting(Echo("Hello."), max_body=100_000) as socket:
        for frame in frames:
            if isinstance(frame, bytes):
                socket.send_bytes(frame)
            else:
                socket.send_text(frame)
        socket.send_json(create("Hi", stream_id="last"))
        lasts = []
        while True:
            got = socket.receive_json()
            assert got["type"].startswith("response.") or got["type"] == "error", got
            if got["type"] == "error" and "status" in got:
                assert 400 <= got["status"] < 500, got
                assert isinstance(got["error"]["message"], str)
            if is_last(got) and got.get("stream_id") == "last":
                lasts.append(got)
                if got["type"] == "response.completed" and text_of(got) == "Hello.":
                    break
                assert len(lasts) <= len(frames), lasts


async def test_a_closed_connection_leaves_no_task() -> None:
    """When a connection has ended, no task of it is left."""
    app = OpenAIAdapter(Echo(pause=0.01), any_model=True)
    before = asyncio.all_tasks()
    for leaves in ("at once", "in a response"):
        arrived: asyncio.Queue[Any] = asyncio.Queue()
        sent: list[Any] = []

        async def send(message: Any, to: list[Any] = sent) -> None:
            to.append(message)

        await arrived.put({"type": "websocket.connect"})
        scope = {"type": "websocket", "path": R, "headers": [], "query_string": b""}
        task = asyncio.create_task(app(scope, arrived.get, send))
        if leaves == "in a response":
            await arrived.put({"type": "websocket.receive", "text": json.dumps(create(LONG))})
            while len(sent) < 6:
                await asyncio.sleep(0.01)
        await arrived.put({"type": "websocket.disconnect", "code": 1000})
        await asyncio.wait_for(task, 5)
    await asyncio.sleep(0.05)
    assert not asyncio.all_tasks() - before
    await app.aclose()


def test_answers_of_errors_name_the_lane() -> None:
    """The frames of errors keep OpenAI's keys, and Codex's status and headers."""
    frame = json.loads(
        response_socket._error_frame(
            429, {"error": {"message": "Busy."}}, [(b"retry-after", b"2"), (b"x", b"y")], "a"
        )
    )
    assert frame == {
        "type": "error", "status": 429, "stream_id": "a", "headers": {"retry-after": "2"},
        "error": {"message": "Busy.", "headers": {"retry-after": "2"}},
    }  # fmt: skip
