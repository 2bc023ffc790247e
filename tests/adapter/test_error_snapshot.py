"""Tests that every error stays word for word the same until someone changes it on purpose.

`LATIMER_SNAPSHOT=1 pytest -p no:randomly tests/adapter/test_error_snapshot.py` writes them again,
and their Git diff is the change that clients see.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import pytest
from chaos.cases.engine import ENTRY, EVENTS
from latimer.adapter import OpenAIAdapter
from latimer.adapter.hosted import Limits
from latimer.adapter.limits.config import digest_of
from latimer.backends.base import Backend
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import LlamaCpp
from latimer.backends.llama_server import LlamaServer
from latimer.schemas.openai.chat import ChatRequest
from latimer.schemas.openai.common import EngineExtras
from latimer.schemas.openai.completions import CompletionRequest
from latimer.schemas.openai.conversations import CreateConversation
from latimer.schemas.openai.embeddings import EmbeddingRequest, RerankRequest
from latimer.schemas.openai.models import DetokenizeRequest, TokenizeRequest
from latimer.schemas.openai.responses import ResponseRequest
from pydantic import BaseModel
from support import error_page
from support.clients import adapting
from support.engines.echo import Echo
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.llama_server import FakeLlamaServer
from support.engines.mistakes import BODIES
from support.engines.mistakes import VALUES as WRONG
from support.engines.wire import Engine
from support.wrong_requests import BASE, CASES, C, E, H, R, body_of

SNAPSHOTS = Path(__file__).parent / "errors"
WRITES = bool(os.environ.get("LATIMER_SNAPSHOT"))
ADDRESS = re.compile(r"127\.0\.0\.1:\d+")

PAGE = Path(__file__).parent.parent.parent / "docs" / "errors.md"

RESPONSES = "/v1/responses"
Asked: TypeAlias = tuple[str, str, str, Any]
Errors: TypeAlias = dict[str, Any]

# Values of a wrong type, and values beyond the limits of numbers, texts and lists.
VALUES: dict[str, Any] = {
    "true": True, "0": 0, "-1": -1, "0.5": 0.5, "10**6": 10**6, "10**30": 10**30, "''": "",
    "'x'": "x", "5,000 x": "x" * 5000, "[]": [], "[null]": [None], "[5]": [5], "[[]]": [[]],
    "200 texts": ["x"] * 200, "{}": {}, "{type}": {"type": "x", "name": 5},
    "{ids}": {"0": 1, "x": 500},
}  # fmt: skip
ENDPOINTS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    C: (CompletionRequest, {**BASE[C], "max_tokens": 1}),
    H: (ChatRequest, {**BASE[H], "max_tokens": 1}),
    E: (EmbeddingRequest, BASE[E]),
    R: (RerankRequest, BASE[R]),
    # The stop sequence ends the answer as early as one token does.
    RESPONSES: (
        ResponseRequest,
        {
            "model": "demo",
            "input": "Hi",
            "max_output_tokens": 16,
            "temperature": 0,
            "stop": "H",
        },
    ),
    "/v1/conversations": (CreateConversation, {}),
    "/v1/tokenize": (TokenizeRequest, {"prompt": "a"}),
    "/v1/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}


def hurried(url: str) -> KoboldCpp:
    """Return a backend that does not wait for a busy engine."""
    backend = KoboldCpp(url)
    backend.server.patience = 0.0
    return backend


# The statuses that the errors of streams have before a stream begins.
STATUS = {
    "engine_error": 502, "engine_unavailable": 503, "engine_timeout": 504,
    "rate_limit_exceeded": 429,
}  # fmt: skip
FAKES: dict[str, tuple[type[Engine], Callable[[str], Backend]]] = {
    "llama-server": (FakeLlamaServer, LlamaServer),
    "koboldcpp": (FakeKoboldcpp, hurried),
}


def requests() -> Iterator[Asked]:
    """Yield the name, method, path and body of each request."""
    for number, (path, changes) in enumerate(CASES):
        fields = ", ".join(changes)
        yield f"{path} case {number}: {fields}", "POST", path, body_of(path, changes)
    for path, (schema, right) in ENDPOINTS.items():
        for field, info in schema.model_fields.items():
            # Chat has the fields of engines, and any value of a field without a type is valid.
            if path == RESPONSES and (field in EngineExtras.model_fields or info.annotation is Any):
                continue
            for name, value in VALUES.items():
                yield f"{path} {field}: {name}", "POST", path, {**right, field: value}
    for method, path in (
        ("GET", C), ("DELETE", H), ("POST", "/v1/models"), ("GET", "/v1/models/none"),
        ("GET", "/v1/none"), ("POST", "/v1/images/generations"), ("GET", E), ("POST", RESPONSES),
    ):  # fmt: skip
        yield f"{method} {path}", method, path, None


def faults(engine: str) -> Iterator[str]:
    """Yield the faults in an engine's responses (`support.engines.mistakes`)."""
    for status in ("400", "401", "404", "429", "500", "501", "503"):
        yield from (f"status/{status}/{body}" for body in BODIES)
    for which, names in EVENTS[f"fake-{engine}"].items():
        for name in names:
            yield f"drop/{which}/{name}"
            yield from (f"set/{which}/{name}/{value}" for value in WRONG)
    for what in ("half", "notjson", "null", "list", "utf8", "deep", "error", "error-list"):
        yield from (f"event/{which}/{what}" for which in ("first", "last"))
    yield from ("close/headers", "reset/event", "length/huge", "chunk/garbage", "no-http")
    if engine == "llama-server":
        yield from (f"set/first/{name}/{value}" for name in ENTRY for value in WRONG)


@asynccontextmanager
async def faked(engine: str) -> AsyncIterator[tuple[Engine, Backend]]:
    """Run a fake engine and return it with a backend for it."""
    make, backend = FAKES[engine]
    async with make() as fake:
        yield fake, backend(fake.url)


async def error_of(client: httpx2.AsyncClient, method: str, path: str, body: Any) -> Any:
    """Return the status and error of a request, or of an event; None if it succeeds."""
    reply = await client.request(method, path, json=body)
    text = ADDRESS.sub("ADDRESS", reply.text)
    if reply.status_code >= 400:
        return [reply.status_code, json.loads(text)["error"]]
    event = re.search(r'^data: (\{"error".*)', text, re.MULTILINE)
    if event is None:
        return None
    error = json.loads(event[1])["error"]
    return [STATUS[error["code"]], error]


NAMED = re.compile(r"(?P<path>/\S+) (?P<field>\w+): (?P<value>.*)")


def packed(errors: Errors) -> str:
    """Return a snapshot: a line for each kind of error, with the fields of each endpoint and value.

    `FIELD` in an error stands in for the name of the request's field.
    """
    kinds: dict[str, dict[str, list[str]]] = {}
    for name, error in errors.items():
        found, text = NAMED.fullmatch(name), json.dumps(error)
        field = found["field"] if found else ""
        general = re.sub(rf"(?<=['\"]){field}\b", "FIELD", text) if field else text
        request = f"{found['path']} {found['value']}" if found else name
        kinds.setdefault(general, {}).setdefault(request, []).append(field)
    rows = (
        f"[{kind},\n  {json.dumps({one: ' '.join(fields) for one, fields in requests.items()})}]"
        for kind, requests in kinds.items()
    )
    return "[\n" + ",\n".join(rows) + "\n]\n"


def unpacked(text: str) -> Errors:
    """Return the error of each request in a snapshot."""
    found = {}
    for error, requests in json.loads(text):
        for request, fields in requests.items():
            path, _, value = request.partition(" ")
            for field in fields.split(" "):
                name = f"{path} {field}: {value}" if field else request
                found[name] = json.loads(json.dumps(error).replace("FIELD", field))
    return found


def compare(name: str, errors: Errors, known: Mapping[str, Any] = {}) -> None:
    """Compare errors with a snapshot, or write it, without those in `known`."""
    path = SNAPSHOTS / f"{name}.json"
    found = {key: error for key, error in errors.items() if known.get(key, ()) != error}
    if WRITES:
        path.write_text(packed(found))
    advice = f"`make snapshots` writes {path.name} again; review what has changed in it"
    assert found == unpacked(path.read_text()), advice


async def all_errors(
    backend: Backend,
    client_of: Callable[[Any], AbstractAsyncContextManager[httpx2.AsyncClient]],
    limits: Limits = "engine",
) -> Errors:
    """Return the error of each request."""
    app = OpenAIAdapter(backend, model_names=["demo"], limits=limits)
    # The errors of `latimer serve` name its options.
    app.service.is_command = True
    async with client_of(app) as client:
        found = {
            name: await error_of(client, method, path, body)
            for name, method, path, body in requests()
        }
    await app.aclose()
    return found


async def test_errors_of_requests_stay(client_of: Any) -> None:
    """The errors of requests stay the same in process."""
    inside = await all_errors(LlamaCpp(gpu_layers=0), client_of)
    compare("in-process", {name: error for name, error in inside.items() if error is not None})


@pytest.mark.slow
async def test_errors_with_openais_limits_stay(client_of: Any) -> None:
    """The errors that OpenAI's limits change or add stay the same."""
    found = await all_errors(LlamaCpp(gpu_layers=0), client_of, "openai")
    compare("openai-limits", found, of_process(found))


@pytest.mark.slow
@pytest.mark.parametrize("engine", FAKES)
async def test_errors_of_requests_stay_over_engines(engine: str, client_of: Any) -> None:
    """The errors that are others over an engine than in process stay the same."""
    async with faked(engine) as (_, backend):
        found = await all_errors(backend, client_of)
    compare(engine, found, of_process(found))


def of_process(requests: Iterable[str]) -> Errors:
    """Return the error of each request in process; None for a request that succeeds there."""
    known = unpacked((SNAPSHOTS / "in-process.json").read_text())
    return {name: known.get(name) for name in requests}


@pytest.mark.slow
@pytest.mark.parametrize("engine", FAKES)
async def test_errors_of_engines_stay(engine: str) -> None:
    """Errors for faulty responses of an engine stay the same."""
    found: Errors = {}
    async with faked(engine) as (fake, backend), adapting(backend) as client:
        for fault in faults(engine):
            body = {"model": "demo", "prompt": "Hi", "max_tokens": 4}
            if fault.startswith("set/first/completion_probabilities"):
                body["logprobs"] = 2
            fake.faults = dict.fromkeys(fake.generations, fault)
            found[fault] = await error_of(client, "POST", C, body)
            if engine == "koboldcpp":
                # Streams come from another endpoint.
                streamed = {**body, "stream": True}
                found[f"{fault} streamed"] = await error_of(client, "POST", C, streamed)
            fake.faults = {}
    compare(f"{engine}-faults", {name: error for name, error in found.items() if error})


WAIT = re.compile(r"(?<=try again in )[0-9.ms]+(?=s\.)")
KEYS: dict[str, dict[str, Any]] = {
    "requests": {"requests_per_minute": 1},
    "tokens": {"tokens_per_minute": 10},
    "concurrent": {"concurrent": 1},
    "models": {"models": ["other*"]},
}


async def test_errors_of_limits_stay(client_of: Any) -> None:
    """The errors of models and limits of keys stay the same at each endpoint that has them."""
    keys = {name: {"digest": digest_of(name), **table} for name, table in KEYS.items()}
    found: Errors = {}
    for path, body in (
        (C, BASE[C]), (H, BASE[H]), (RESPONSES, {"input": "Hi"}), (E, BASE[E]), (R, BASE[R]),
    ):  # fmt: skip
        app = OpenAIAdapter(Echo("Hi", pause=0.02), model_names=["demo"], keys=keys)
        async with client_of(app) as client:
            for name in KEYS:
                headers = {"authorization": f"Bearer {name}"}
                asked = {**body, "model": "demo", "max_tokens": 5} if path in (C, H) else body
                replies = await asyncio.gather(
                    *(client.post(path, json={"model": "demo", **asked}, headers=headers)
                      for _ in range(2))
                )  # fmt: skip
                reply = max(replies, key=lambda one: (one.status_code == 429, one.status_code))
                text = WAIT.sub("TIME", reply.text)
                found[f"{path} {name}"] = [reply.status_code, json.loads(text)["error"]]
        await app.aclose()
    compare("limits", found)


@pytest.mark.slow
async def test_the_page_of_errors_is_generated(client_of: Any, tmp_path: Path) -> None:
    """docs/errors.md lists every status and code of the snapshots and of other errors."""
    messages: dict[tuple[int, str, str], set[str]] = {}
    snapshots = [error for path in sorted(SNAPSHOTS.glob("*.json")) for error in load(path)]
    found = [error async for error in error_page.others(client_of, tmp_path)]
    for status, error in filter(None, [*snapshots, *found]):
        key = status, error["code"] or "", error["type"]
        messages.setdefault(key, set()).add(error["message"])
    unknown = set(error_page.EXAMPLES)
    rows = []
    for (status, code, kind), texts in sorted(messages.items()):
        chosen = {one for one in unknown for text in texts if text.startswith(one)}
        unknown -= chosen
        fitting = [text for text in texts if text.startswith(tuple(chosen))] or texts
        example = escaped(min(fitting, key=lambda text: (len(text), text)))
        rows.append(f"| {status} | {f'`{code}`' if code else 'null'} | `{kind}` | {example} |")
    assert not unknown, "examples that are no error's message"
    table = "\n".join(["| status | code | type | example |", "|--:|---|---|---|", *rows])
    before, _, rest = PAGE.read_text().partition("| status |")
    _, _, after = rest.partition("\n\n")
    text = f"{before}{table}\n\n{after}"
    if WRITES:
        PAGE.write_text(text)
    assert PAGE.read_text() == text


def test_every_code_is_on_the_page() -> None:
    """docs/errors.md has every error code in the sources."""
    listed = re.findall(r"^\| \d+ \| `(\w+)`", PAGE.read_text(), re.MULTILINE)
    patterns = error_page.codes()
    assert len(patterns) > 30
    assert not {one for one in patterns if not any(re.fullmatch(one, code) for code in listed)}
    assert not {code for code in listed if not any(re.fullmatch(one, code) for one in patterns)}


def load(path: Path) -> Iterator[Any]:
    """Yield the errors of a snapshot."""
    yield from unpacked(path.read_text()).values()


def escaped(text: str) -> str:
    """Return a message for a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;")
