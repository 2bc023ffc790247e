"""Tests that a key may use its models only, at every path."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.limits.config import digest_of
from latimer.adapter.model_entry import ModelEntry
from latimer.adapter.routes import OPEN_ROUTES, ROUTES
from latimer.backends.errors import EngineUnavailable
from latimer.backends.speech.pieces import wav_of
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.fleet import Engine, pool_of

NAMES = ("demo", "demo-large", "other")
KEYS: dict[str, dict[str, Any]] = {
    "demos": {"digest": digest_of("sk-demos"), "models": ["demo*"]},
    "other": {"digest": digest_of("sk-other"), "models": ["other"]},
    "all": {"digest": digest_of("sk-all")},
    "none": {"digest": digest_of("sk-none"), "models": []},
    "umlaut": {"digest": digest_of("schlüssel")},
}
MESSAGES = [{"role": "user", "content": "Hi"}]
# Requests that name a model, by their path.
NAMING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["a"]},
    "/v1/v2/rerank": {"query": "Hi", "documents": ["a"]},
    "/v1/audio/speech": {"input": "Hi", "voice": "alloy"},
}
# Those that use the first model.
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
FIRST: dict[str, dict[str, Any] | None] = {
    "/v1/tokenize": {"prompt": "Hi"},
    "/v1/detokenize": {"tokens": [1]},
    "/v1/tokenizer_info": None,
}


def by(key: str) -> dict[str, str]:
    """Return the header with a key."""
    return {"authorization": f"Bearer {key}"}


def engine() -> Echo:
    """Return a backend that says a word slowly."""
    return Echo("one two three", pause=0.001)


@pytest.fixture
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of an adapter with several names and keys, and a key without a table."""
    app = OpenAIAdapter(engine(), model_names=NAMES, keys=KEYS, api_keys=["sk-plain"])
    async with client_of(app) as made:
        yield made
    await app.aclose()


@pytest.mark.parametrize("path", NAMING)
async def test_another_model_is_unknown(client: httpx2.AsyncClient, path: str) -> None:
    """A model that a key may not use has the error of one that does not exist."""
    for key, name, known in (
        ("sk-demos", "demo", True),
        ("sk-demos", "demo-large", True),
        ("sk-demos", "other", False),
        ("sk-other", "other", True),
        ("sk-other", "demo", False),
        ("sk-none", "demo", False),
        ("sk-all", "other", True),
        ("sk-plain", "other", True),
    ):
        reply = await client.post(path, json={"model": name, **NAMING[path]}, headers=by(key))
        code = reply.json()["error"]["code"] if reply.status_code >= 400 else None
        assert (code == "model_not_found") is not known, (key, name, reply.text)
        if not known:
            missing = await client.post(
                path, json={"model": "absent", **NAMING[path]}, headers=by(key)
            )
            assert reply.status_code == missing.status_code
            assert reply.text == missing.text.replace("absent", name)
            assert "demo-large" not in reply.text


async def test_a_known_model_is_for_its_keys_only() -> None:
    """An engine is not asked again for a key with models, and another key still cannot use one."""
    echo = engine()
    echo.known_model = lambda: echo.facts  # type: ignore[method-assign]
    app = OpenAIAdapter(echo, model_names=NAMES, keys=KEYS)

    async def code(key: str, name: str) -> int:
        body = {"model": name, "messages": MESSAGES}
        reply = await caller.post("/v1/chat/completions", json=body, headers=by(key))
        assert reply.status_code != 200 or reply.json()["model"] == name
        return reply.status_code

    async with client_of(app) as caller:
        for key in ("sk-all", "sk-demos", "sk-all"):
            assert await code(key, "demo") == 200
        echo.model = None  # type: ignore[assignment, method-assign]
        assert await code("sk-demos", "demo") == 200
        del echo.model
        for key, name, expected in (
            ("sk-other", "demo", 404),
            ("sk-none", "demo", 404),
            ("sk-other", "other", 200),
            ("sk-other", "other", 200),
            ("sk-demos", "other", 404),
            ("sk-demos", "demo-large", 200),
        ):
            assert await code(key, name) == expected, (key, name)
    await app.aclose()


@pytest.mark.parametrize("path", FORMS)
async def test_recordings_need_an_allowed_model(client: httpx2.AsyncClient, path: str) -> None:
    """A form that names a model which its key may not use has the error of an unknown model."""
    file = {"file": ("a.wav", wav_of(bytes(3200)))}
    for key, name, known in (("sk-demos", "demo", True), ("sk-demos", "other", False)):
        reply = await client.post(path, files=file, data={"model": name}, headers=by(key))
        code = reply.json()["error"]["code"] if reply.status_code >= 400 else None
        assert (code == "model_not_found") is not known, (name, reply.text)


async def test_a_request_without_a_model_gets_an_allowed_one(client: httpx2.AsyncClient) -> None:
    """A request that names no model gets the first name that its key may use, or an error."""
    body = {"messages": MESSAGES}
    for key, name in (("sk-demos", "demo"), ("sk-other", "other"), ("sk-all", "demo")):
        reply = await client.post("/v1/chat/completions", json=body, headers=by(key))
        assert reply.json()["model"] == name
    reply = await client.post("/v1/chat/completions", json=body, headers=by("sk-none"))
    assert reply.status_code == 400
    assert "demo" not in reply.text


@pytest.mark.parametrize("path", FIRST)
async def test_the_tokenizer_needs_a_model(client: httpx2.AsyncClient, path: str) -> None:
    """The paths of the tokenizer answer keys that may use one name of the model only."""
    for key, status in (("sk-other", 200), ("sk-all", 200), ("sk-none", 400)):
        body = FIRST[path]
        method = "GET" if body is None else "POST"
        reply = await client.request(method, path, json=body, headers=by(key))
        assert reply.status_code == status


async def test_a_list_has_the_models_of_the_key(client: httpx2.AsyncClient) -> None:
    """The list of models, and the path of each, show what the key may use."""
    for key, names in (
        ("sk-demos", ["demo", "demo-large"]),
        ("sk-other", ["other"]),
        ("sk-none", []),
        ("sk-all", [*NAMES]),
        ("sk-plain", [*NAMES]),
    ):
        listed = (await client.get("/v1/models", headers=by(key))).json()["data"]
        assert [one["id"] for one in listed] == names
        for name in NAMES:
            reply = await client.get(f"/v1/models/{name}", headers=by(key))
            assert reply.status_code == (200 if name in names else 404)


async def test_a_key_can_be_sent_in_latin_1(client: httpx2.AsyncClient) -> None:
    """A key with other letters is known in UTF-8 and in Latin-1."""
    for encoding in ("utf-8", "latin-1"):
        headers = [(b"authorization", b"Bearer " + "schlüssel".encode(encoding))]
        reply = await client.get("/v1/models", headers=headers)
        assert reply.status_code == 200
    assert (await client.get("/v1/models", headers=by("sk-unknown"))).status_code == 401
    assert (await client.get("/v1/models")).status_code == 401


def test_every_path_is_tested() -> None:
    """Each path of the API is in a test of this file, or has nothing to do with a model."""
    stored = {path for path in ROUTES if "{id}" in path or "{name}" in path}
    known = {path.removeprefix("/v1") for path in (*NAMING, *FORMS, *FIRST)}
    others = {
        "/models", "/models/{name:path}", "/conversations", "/responses/compact", "/audio/voices",
    }  # fmt: skip
    # Those of Anthropic's API are in tests/adapter/messages/test_service.py.
    messages = {path for path in ROUTES if path.startswith("/messages")}
    assert known | stored | others | messages == ROUTES.keys()
    assert OPEN_ROUTES.keys() == {"/health", "/ready"}


async def test_a_fallback_needs_permission() -> None:
    """A model that is not available is replaced only by one that the key may use."""
    broken = Engine("a")
    broken.error = EngineUnavailable("It is away.")
    pool = await pool_of(broken)
    entries = [ModelEntry(pool, ("demo",), fallback=("other",)), ModelEntry(Echo(), ("other",))]
    app = OpenAIAdapter(entries, keys=KEYS)
    async with client_of(app) as client:
        body = {"model": "demo", "messages": MESSAGES}
        for key, status in (("sk-all", 200), ("sk-demos", 503)):
            reply = await client.post("/v1/chat/completions", json=body, headers=by(key))
            assert reply.status_code == status, reply.text
    await app.aclose()


@pytest.mark.parametrize("count", [1, 2])
async def test_any_name_reaches_no_other_model(count: int) -> None:
    """A key for other models does not reach a model that accepts every name."""
    digests = {"team": ["team-*"], "own": ["demo", "gpt-*"], "all": None}
    keys = {
        name: {"digest": digest_of(f"sk-{name}"), **({"models": models} if models else {})}
        for name, models in digests.items()
    }
    entries = [ModelEntry(Echo(), ("demo",), any_model=True), ModelEntry(Echo(), ("other",))]
    app = OpenAIAdapter(entries[:count], keys=keys)
    async with client_of(app) as client:
        for key, name, status in (
            ("sk-team", "team-zzz", 404), ("sk-own", "gpt-4o", 200), ("sk-own", "demo", 200),
            ("sk-all", "team-zzz", 200),
        ):  # fmt: skip
            body = {"model": name, "messages": MESSAGES}
            reply = await client.post("/v1/chat/completions", json=body, headers=by(key))
            assert reply.status_code == status, (key, name, reply.text)
    await app.aclose()


async def test_a_fallback_keeps_the_lease() -> None:
    """A request that a fallback serves in the end holds one place of its key, and counts once."""
    lost = Engine("a")
    pool = await pool_of(lost)
    lost.fails = lost.error = EngineUnavailable("It is away.")
    entries = [ModelEntry(pool, ("demo",), fallback=("other",)), ModelEntry(Echo(), ("other",))]
    limits = {"concurrent": 1, "requests_per_minute": 3}
    app = OpenAIAdapter(entries, keys={"team": {"digest": digest_of("sk-team"), **limits}})
    async with client_of(app) as client:
        for left in (2, 1, 0):
            body = {"model": "demo", "messages": MESSAGES}
            reply = await client.post("/v1/chat/completions", json=body, headers=by("sk-team"))
            assert reply.status_code == 200, reply.text
            assert reply.json()["model"] == "other"
            assert reply.headers["x-ratelimit-remaining-requests"] == str(left)
    await app.aclose()


async def test_an_error_with_an_engine_left_has_no_fallback() -> None:
    """A request is not sent again while its own model has an engine."""
    failing = Engine("a")
    pool = await pool_of(failing)
    asked = 0

    async def fail() -> Any:
        nonlocal asked
        asked += 1
        raise EngineUnavailable("It is not loaded yet.")

    pool.known, pool.model = None, fail  # type: ignore[method-assign]
    entries = [ModelEntry(pool, ("demo",), fallback=("other",)), ModelEntry(Echo(), ("other",))]
    app = OpenAIAdapter(entries)
    async with client_of(app) as client:
        body = {"model": "demo", "messages": MESSAGES}
        reply = await client.post("/v1/chat/completions", json=body)
        assert (reply.status_code, asked) == (503, 1)
    await app.aclose()


async def test_stored_objects_of_another_model_are_unknown(tmp_path: Any) -> None:
    """When a key may no longer use a model, its stored objects made by that model are unknown."""
    store = str(tmp_path / "store.db")
    digest = digest_of("sk-team")

    def app_of(*models: str) -> OpenAIAdapter:
        keys = {"team": {"digest": digest, "models": [*models]}}
        return OpenAIAdapter(engine(), model_names=NAMES, keys=keys, store=store)

    app = app_of("*")
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer sk-team"
        chat, response = {}, {}
        for name in NAMES:
            body = {"model": name, "messages": MESSAGES, "store": True, "metadata": {"a": "b"}}
            chat[name] = (await client.post("/v1/chat/completions", json=body)).json()["id"]
            body = {"model": name, "input": "Hi"}
            response[name] = (await client.post("/v1/responses", json=body)).json()["id"]
    await app.aclose()
    app = app_of("demo", "x*")
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer sk-team"
        for query in ("", "?metadata[a]=b", "?model=other", "?model=demo", "?limit=1"):
            listed = (await client.get(f"/v1/chat/completions{query}")).json()
            expected = [] if query == "?model=other" else [chat["demo"]]
            assert [one["id"] for one in listed["data"]] == expected
            assert not listed["has_more"]
        for name in ("demo-large", "other"):
            one, other = f"/v1/chat/completions/{chat[name]}", f"/v1/responses/{response[name]}"
            for method, path in (
                ("GET", one), ("POST", one), ("DELETE", one), ("GET", f"{one}/messages"),
                ("GET", other), ("GET", f"{other}?stream=true"), ("DELETE", other),
                ("POST", f"{other}/cancel"), ("GET", f"{other}/input_items"),
            ):  # fmt: skip
                body = {"metadata": {}} if path == one else {}
                reply = await client.request(method, path, json=body if method == "POST" else None)
                assert reply.status_code == 404, (method, path, reply.text)
            body = {"model": "demo", "input": "Hi", "previous_response_id": response[name]}
            reply = await client.post("/v1/responses", json=body)
            assert reply.json()["error"]["code"] == "previous_response_not_found"
        for path in (f"chat/completions/{chat['demo']}", f"responses/{response['demo']}"):
            assert (await client.get(f"/v1/{path}")).status_code == 200
            assert (await client.delete(f"/v1/{path}")).status_code == 200
    await app.aclose()
    # Nothing of the others was changed or deleted.
    app = app_of("demo-large", "other")
    async with client_of(app) as client:
        client.headers["authorization"] = "Bearer sk-team"
        listed = (await client.get("/v1/chat/completions")).json()["data"]
        assert [one["id"] for one in listed] == [chat["demo-large"], chat["other"]]
        assert all(one["metadata"] == {"a": "b"} for one in listed)
    await app.aclose()


async def test_a_response_in_the_background_belongs_to_a_model(client: httpx2.AsyncClient) -> None:
    """A key sees its responses in the background while they run."""
    body = {"model": "demo", "input": "Hi", "background": True}
    found = (await client.post("/v1/responses", json=body, headers=by("sk-demos"))).json()
    path = f"/v1/responses/{found['id']}"
    assert (await client.get(path, headers=by("sk-demos"))).status_code == 200
    assert (await client.get(path, headers=by("sk-other"))).status_code == 404
    async with asyncio.timeout(30):
        while (await client.get(path, headers=by("sk-demos"))).json()["status"] != "completed":
            await asyncio.sleep(0.01)
