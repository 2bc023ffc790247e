"""The errors of docs/errors.md that no snapshot has, its examples, and the codes in the sources."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
from latimer.adapter import OpenAIAdapter
from latimer.adapter.admin import engine_not_found, not_on_demand
from latimer.adapter.auth import require_key
from latimer.adapter.cli.protocol import MOST_HEAD
from latimer.adapter.cli.relay import WorkerGone
from latimer.adapter.endpoints.operations import EngineLoading
from latimer.adapter.endpoints.response_socket import expiry
from latimer.adapter.endpoints.spoken import not_streamed
from latimer.adapter.errors import (
    LateRequest,
    LimitsUnavailable,
    Overloaded,
    RateLimited,
    ReplicaEnded,
    ReplicaUnavailable,
    ShuttingDown,
    StoreUnavailable,
    WebSocketRefused,
    render,
    unexpected,
)
from latimer.adapter.limits.config import digest_of
from latimer.adapter.origins import LocalRules, OriginMiddleware
from latimer.adapter.responses.lanes import MOST_LANES, Create, KeptTurns, Lanes, lane_of
from latimer.adapter.service import DEFAULT_MAX_BODY
from latimer.backends.errors import (
    Busy,
    ContextFull,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    LatimerError,
    TooComplex,
)
from latimer.backends.llama_cpp import LlamaCpp
from starlette.requests import Request

from support.pdf_files import pdf, pdf_url
from support.projector import listener, png, projector
from support.servers import serving
from support.trees import tree_of
from support.wrong_requests import ASKED, C, H

ROOT = Path(__file__).parent.parent.parent
DEMO_WIDTH = 192
# A status and an error object.
Reply: TypeAlias = tuple[int, Any]

# The beginnings of the messages that the page shows. Other codes have their shortest message.
EXAMPLES = (
    "Invalid 'stop': array too long. Expected an array with maximum length 128",
    "This model's maximum context length is 2048 tokens. However, you requested 5009",
    "Invalid 'temperature': decimal above maximum value. Expected a value <= 100",
    "Invalid 'temperature': decimal below minimum value.",
    "Invalid 'messages': empty array.",
    "Invalid 'n': integer above maximum value. Expected a value <= 128, but got 129",
    "Invalid type for 'messages[0].content': expected",
    "Invalid value: 'some'. Supported values are",
    "Missing required parameter: 'messages[0].role'.",
    "Unknown parameter: 'tempature'",
    "The 'stream_options' parameter is only allowed",
    "Invalid 'max_tokens': integer below minimum value. Expected a value >= 1, but got 0",
    "Unsupported parameter: 'messages[0].content[0].type' is not supported by llama.cpp in process",
    "The engine has not responded yet.",
    "llama-server responded with status 500.",
    "1024 requests are waiting",
    "The model `none` does not exist or you do not have access to it. This server has: demo.",
    "Not allowed to GET on /v1/completions.",
)
OTHERS: tuple[LatimerError, ...] = (
    Busy("1024 requests are waiting for the engine.", 1.0),
    ContextFull("llama-server", "Its operator can start it with a larger context.", 8192),
    EngineError("llama-server responded with status 500."),
    EngineLoading("demo: llama-server is loading."),
    EngineUnavailable("The engine has not responded yet."),
    LimitsUnavailable("for the log"),
    RateLimited("demo", "team-a", "tokens per min (TPM)", 200_000, 199_000, 1_060, 1.5),
    EngineSilent("The engine at http://127.0.0.1:8080 sent nothing for 60 s."),
    engine_not_found("big", ["small", "tiny"]),
    not_on_demand("small"),
    not_streamed("wav"),
    Overloaded(),
    LateRequest(),
    ReplicaEnded(),
    ReplicaUnavailable(),
    ShuttingDown(),
    StoreUnavailable("the database is locked by another process"),
    TooComplex(30.0),
    WebSocketRefused("/v1/responses"),
    WorkerGone(),
)


def encoded(data: bytes) -> str:
    """Return data in base64."""
    return base64.b64encode(data).decode()


# The header of an image of 1.6 gigapixels, and a FLAC that declares 2**36 - 1 samples.
HUGE = png(1, 2, 3)[:16] + (40_000).to_bytes(4) * 2 + png(1, 2, 3)[24:]
ENDLESS = (
    b"fLaC\x80\0\0\x22" + b"\x10\0\x10\0" + bytes(6)
    + (16_000 << 44 | 15 << 36 | 2**36 - 1).to_bytes(8) + bytes(32)
)  # fmt: skip
URLS = (
    "data:image/png;base64,%%%",
    f"data:image/png;base64,{encoded(b'hello')}",
    f"data:text/plain;base64,{encoded(png(1, 2, 3))}",
    f"data:image/png;base64,{encoded(HUGE)}",
    "picture.png",
)
SOUND = {"type": "input_audio", "input_audio": {"data": encoded(ENDLESS), "format": "wav"}}
PARTS = [*({"type": "image_url", "image_url": {"url": url}} for url in URLS), SOUND]

Client: TypeAlias = Callable[[Any], AbstractAsyncContextManager[httpx2.AsyncClient]]


async def others(client_of: Client, folder: Path) -> AsyncIterator[Reply]:
    """Yield the errors that no snapshot has."""
    for error in (*OTHERS, *_rejected(), *_of_frames()):
        status, reply, _ = render(error)
        yield status, reply["error"]
    status, reply = unexpected()
    yield status, reply["error"]
    async for unserved in _unserved():
        yield unserved
    app = OpenAIAdapter(LlamaCpp(), store="off")
    app.service.is_command = True
    async with client_of(app) as client:
        got = await client.get(H)
        yield got.status_code, got.json()["error"]
    await app.aclose()
    keys = {"team": {"digest": digest_of("team"), "models": ["demo"]}}
    app = OpenAIAdapter(LlamaCpp(), keys=keys)
    async with client_of(app) as client:
        got = await client.get("/metrics", headers={"authorization": "Bearer team"})
        yield got.status_code, got.json()["error"]
    await app.aclose()
    for make in (projector, listener):
        backend = LlamaCpp(mmproj=make(folder / f"{make.__name__}.gguf", DEMO_WIDTH))
        app = OpenAIAdapter(backend, any_model=True, strict=True)
        app.service.is_command = True
        async with client_of(app) as client:
            for path, body, headers in _requests():
                got = await client.post(path, content=body, headers=headers)
                if got.status_code != 200:
                    yield got.status_code, got.json()["error"]
        await app.aclose()


def _requests() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yield paths, bodies and headers."""
    yield C, b" " * (DEFAULT_MAX_BODY + 1), {}
    yield C, b"{}", {"content-type": "text/plain"}
    bodies: list[dict[str, Any]] = [
        {"messages": [ASKED], "tempature": 1},
        {"messages": [ASKED], "logit_bias": dict.fromkeys(map(str, range(70_000)), 1)},
        *({"messages": [{"role": "user", "content": [part]}]} for part in PARTS),
    ]
    both = {"previous_response_id": "resp_1", "conversation": "conv_1", "input": "Hi"}
    # A page of 100 MB in 100 KB.
    file = {"type": "input_file", "file_data": pdf_url(pdf(b" " * 100_000_000))}
    for fields in (both, {"input": [{"role": "user", "content": [file]}]}):
        yield "/v1/responses", json.dumps({"model": "demo", **fields}).encode(), {}
    for body in bodies:
        yield H, json.dumps({"model": "demo", **body}).encode(), {}


def _rejected() -> Iterator[LatimerError]:
    """Yield the errors of requests without permission."""
    access = OriginMiddleware(OpenAIAdapter(LlamaCpp()), [], LocalRules())
    host, origin = (b"host", b"latimer.example"), (b"origin", b"https://page.example")
    local, method = (b"origin", b"http://localhost"), b"access-control-request-method"
    names = (b"access-control-request-headers", b"a b;")
    for asked, headers in (
        ("POST", [host]),
        ("POST", [origin]),
        ("OPTIONS", [local, (method, b"PUT")]),
        ("OPTIONS", [local, (method, b"POST"), names]),
    ):
        verdict = access.judge(asked, "http", headers)
        assert verdict is not None
        assert verdict.error is not None
        yield verdict.error
    for headers in ([], [(b"authorization", b"Bearer wrong")]):
        scope = {"type": "http", "headers": headers, "state": {"key_digest": None}}
        try:
            require_key(Request(scope))
        except LatimerError as error:
            yield error


def _of_frames() -> Iterator[LatimerError]:
    """Yield the errors of a WebSocket: of a lane, of too many of them, of a queue, and of age."""
    yield expiry(3600).error
    frame = Create({}, 1, "one", True, KeptTurns().of_connection())
    lanes = [Lanes(1), Lanes(10**9)]
    lanes[0].add(frame)
    for number in range(MOST_LANES):
        lanes[1].add(replace(frame, lane=str(number)))
        for running in lanes[1].start():
            lanes[1].end(running)
    calls: list[Callable[[], object]] = [partial(one.add, frame) for one in lanes]
    calls.append(partial(lane_of, {"stream_id": ""}))
    for call in calls:
        try:
            call()
        except LatimerError as error:
            yield error


async def _unserved() -> AsyncIterator[Reply]:
    """Yield the errors of requests that HTTP does not allow, or whose headers are too long."""
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: %b\r\n\r\n"
    sent = (
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (MOST_HEAD // 4),
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        chunked % b"gzip, chunked",
        chunked % b"chunked" + b"x\r\n",
    )
    with serving(lambda: OpenAIAdapter(LlamaCpp())) as address:
        for data in sent:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[2]))
            writer.write(data)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read()
            writer.close()
            yield int(head.split()[1]), json.loads(body)["error"]


# The position of the code among the arguments of the functions that make errors.
_CODES = {"InvalidRequest": 2, "wrong_value": 2, "invalid": 1, "_body": 3}


def codes() -> set[str]:
    """Return a pattern for each error code in the sources; parts that vary are `[a-z]+`."""
    found: set[str] = set()
    for folder in ("adapter", "backends", "schemas"):
        for path in (ROOT / folder).rglob("*.py"):
            # To parse all files takes seconds.
            if not re.search(rf"\bcode\b|{'|'.join(_CODES)}", path.read_text()):
                continue
            for node in ast.walk(tree_of(path)):
                for value in _values(node):
                    found |= set(_patterns(value))
    return found


def _values(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of error codes in a call or an assignment."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        yield from (word.value for word in node.keywords if word.arg == "code")
        yield from node.args[_CODES[name] :][:1] if name in _CODES else ()
    elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "code":
        yield node.value
    elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "code":
        yield from [node.value] if node.value is not None else ()


def _patterns(value: ast.expr) -> Iterator[str]:
    if isinstance(value, ast.IfExp):
        yield from (*_patterns(value.body), *_patterns(value.orelse))
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        # The schemas' `wrong_value` has a path there, such as ".type".
        yield from () if value.value.startswith(".") else (re.escape(value.value),)
    elif isinstance(value, ast.JoinedStr):
        yield "".join(
            re.escape(str(part.value)) if isinstance(part, ast.Constant) else "[a-z]+"
            for part in value.values
        )
