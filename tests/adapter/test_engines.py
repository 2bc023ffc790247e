"""Tests of the engines: choosing one from the settings, and its table of capabilities."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from latimer.adapter import OpenAIAdapter, engines
from latimer.adapter.engines import WrongSetup, backend_of, describe, starts_engines, unused
from latimer.adapter.request_log import RequestLog
from latimer.adapter.settings import BackendName, Settings
from latimer.backends.errors import EngineUnavailable
from latimer.backends.koboldcpp import KoboldCpp
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.llama_server import command
from support.clients import adapting, client_of
from support.embeddings import ENGINES, MODELS, embedding
from support.engines.koboldcpp import FakeKoboldcpp
from support.engines.model import Model
from support.servers import canned

LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'
NO_KEY = b'{"error":{"message":"Invalid API Key","type":"authentication_error","code":401}}'


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("ftp://127.0.0.1", "it must start with http:// or https://"),
        ("http://", "it has no host"),
        ("http:/127.0.0.1", "it has no host"),
        ("http://127.0.0.1:0", "port 0"),
        ("http://127.0.0.1:abc", "not a valid address such as http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/?x=1", "it must not contain '?'"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("http://\u20ac", "it must be ASCII"),
        ("http://a b", "without spaces"),
        ("http://a..b", "a label of its host name is empty"),
        ("http://" + "a" * 64, "longer than 63"),
        ("http://me:secret@127.0.0.1", "must not contain a user name or password"),
        ("http://me:secret@[::1", "The engine's URL is not a valid"),
        ("localhost:8080", "Did you mean http://localhost:8080?"),
        ("127.0.0.1:8080/v1", "Did you mean http://127.0.0.1:8080/v1?"),
        ("[::1]:8080", "Did you mean http://[::1]:8080?"),
        ("a" * 5000, "File name too long"),
        ("nowhere.gguf", "no model at nowhere.gguf. Specify a GGUF file, a model of the hub (hf:"),
        ("", "The model is empty. Omit it for the demo model, or specify a GGUF file"),
        ("ORG/REPO", "Did you mean hf:ORG/REPO?"),
        ("ORG/REPO:Q4_K_M", "Did you mean hf:ORG/REPO:Q4_K_M?"),
        (f"{DEMO_MODEL.parent}/demon.gguf", f"Did you mean {DEMO_MODEL}?"),
        (f"{DEMO_MODEL.parent}/x.gguf", "Its folder has demo.gguf. Specify one of these files."),
        (str(DEMO_MODEL.parent), "is a directory. It has demo.gguf. Specify one of these files."),
        (__file__, "is not a GGUF file. Specify one: convert other formats with llama.cpp's"),
    ],
    ids=lambda text: text[:24],
)
def test_what_is_neither_file_nor_address(model: str, said: str) -> None:
    """An invalid model is an error that says what to write, without a password in it."""
    with pytest.raises(WrongSetup) as caught:
        backend_of(Settings.load(None, model=model))
    assert said in caught.value.message
    assert "secret" not in caught.value.message


def test_every_engine_has_a_row() -> None:
    """Each name of `--backend` is detected, is llama.cpp in process, or has a row of the table."""
    assert {*get_args(BackendName)} == {"auto", "llama-cpp", *engines.ENGINES}
    for name, engine in engines.ENGINES.items():
        made = engine.backend()("http://127.0.0.1:1", **Settings().arguments(name))
        assert made.capabilities.engine == name


@pytest.mark.parametrize(
    "place", ['url = "http://127.0.0.1:1"', 'command = ["x", "{port}"]'], ids=lambda line: line[:3]
)
def test_a_table_of_another_process_is_not_in_process(place: str, tmp_path: Path) -> None:
    """A table with a URL or a command and the engine in process is an error that says so."""
    file = tmp_path / "latimer.toml"
    file.write_text(f'[models.a]\nengines = ["x"]\n[engines.x]\n{place}\nbackend = "llama-cpp"\n')
    with pytest.raises(WrongSetup, match="needs a GGUF file, not a URL or a command"):
        engines.member_of(Settings.load(file), "x", {})


def test_a_folder_is_no_model(tmp_path: Path) -> None:
    """A folder as the model is an error that says so."""
    with pytest.raises(WrongSetup, match=r"is a directory\. Specify a GGUF file"):
        backend_of(Settings.load(None, model=str(tmp_path)))


def test_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an engine, the error names a way that needs no compiler, and a URL."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(WrongSetup, match=r"'\.\[prebuilt\]' .* no compiler, .* URL of a running"):
        backend_of(Settings.load(None))


def test_backends_that_do_not_fit() -> None:
    """A remote backend requires a URL, and the in-process backend a GGUF file."""
    with pytest.raises(WrongSetup, match="needs the URL of its engine, such as http://"):
        backend_of(Settings.load(None, backend="koboldcpp"))
    with pytest.raises(WrongSetup, match="5001, not '/x'"):
        backend_of(Settings.load(None, backend="koboldcpp", model="/x"))
    with pytest.raises(WrongSetup, match=r"There is no model at x\.gguf"):
        backend_of(Settings.load(None, backend="llama-server", model="x.gguf"))
    with pytest.raises(WrongSetup, match="needs a GGUF file"):
        backend_of(Settings.load(None, backend="llama-cpp", model="http://127.0.0.1:1"))


def test_settings_that_count_for_nothing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings without effect are reported by the flag or variable that set them."""
    address = "http://127.0.0.1:8080"
    monkeypatch.setenv("LATIMER_THREADS", "2")
    assert unused(Settings.load(None, model=address, context=512, engine_key="x")) == [
        "Ignored: --context, LATIMER_THREADS (only for a GGUF file)."
    ]
    assert unused(Settings.load(None, store="off", engine_key="secret", store_age="1h")) == [
        "Ignored: --engine-key (only for an engine at a URL).",
        "Ignored: --store-age (the store is off).",
    ]
    assert unused(Settings.load(None, context=512, store_age="1h")) == []


@pytest.mark.parametrize(
    ("answer", "path", "said"),
    [
        ((503, LOADING), "", "is loading its model"),
        ((404, b"<html>"), "", "neither llama-server nor koboldcpp."),
        ((200, b"[" * 100_000), "", "neither llama-server nor koboldcpp."),
        ((404, b""), "/v1", "Remove /v1"),
        ((404, b'{"error":{}}'), "", "If it serves OpenAI's API, use the address of the engine"),
        ((401, NO_KEY), "", "requires an API key. Set it with --engine-key"),
        ((200, b'{"result":"KoboldCpp","version":"1.115","llm":false}'), "", "no text model"),
    ],
    ids=["loading", "unknown", "nonsense", "v1", "another API", "key", "no model"],
)
async def test_what_answers_but_is_not_ready(
    answer: tuple[int, bytes], path: str, said: str
) -> None:
    """A server that is not ready is a 503 that names the reason."""
    with canned({"*": answer}) as (address, _):
        backend = backend_of(Settings.load(None, model=address + path))
        with pytest.raises(EngineUnavailable, match=said):
            await backend.model()
        error, rows = await describe(backend)
        assert isinstance(error, EngineUnavailable)
        assert rows[-1] == ("reachable", f"no: {error.message}")
        await backend.aclose()


async def table_of(backend: Any) -> dict[str, str]:
    """Return the rows of the table of an engine that is reachable."""
    error, rows = await describe(backend)
    assert error is None
    return dict(rows)


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_model_that_embeds(engine: str) -> None:
    """The table has the dimensions and the longest input, and nothing about generation."""
    with embedding(engine, "bert-mean") as backend:
        rows = await table_of(backend)
        await backend.aclose()
    assert rows["embeddings"].startswith("64 dimensions, ")
    assert rows["embeddings"].endswith("up to 512 tokens")
    assert rows["rerank"].startswith("no: ")
    assert rows["chat, completions"].startswith("no: ")
    assert not {"grammars", "sampling extras", "chat template"} & rows.keys()


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_model_that_ranks(engine: str) -> None:
    """The table says that a model ranks, and why it does not embed."""
    with embedding(engine, "rank") as backend:
        rows = await table_of(backend)
        await backend.aclose()
    assert rows["rerank"] == "up to 512 tokens"
    assert rows["embeddings"].startswith("no: ")


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"embeddings": True}, "192 dimensions, last pooling, up to 2048 tokens"),
        ({"embeddings": True, "pooling": "mean"}, "192 dimensions, mean pooling, up to 2048 tok…"),
        ({"model": str(MODELS / "bert-mean.gguf"), "pooling": "cls"}, "64 dimensions, cls pool…"),
        ({}, "no: …"),
    ],
)
async def test_settings_reach_the_engine(settings: dict[str, Any], row: str) -> None:
    """`embeddings` and `pooling` change what the in-process engine does."""
    backend = backend_of(Settings.load(None, **settings))
    found = (await table_of(backend))["embeddings"]
    await backend.aclose()
    assert found.startswith(row.removesuffix("…"))


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server", "koboldcpp"])
async def test_a_model_for_chat(engine: str, make_backend: Any) -> None:
    """The table of a model for chat says what would make the engine embed, or what to use."""
    backend = make_backend(engine)
    rows = await table_of(backend)
    await backend.aclose()
    assert "context" in rows
    for name in ("embeddings", "rerank"):
        assert rows[name].startswith("no: ")
        assert len(rows[name]) > len("no: ")


def test_only_commands_and_files_of_llama_servers_start_engines(tmp_path: Path) -> None:
    """A server of engines that run elsewhere or in its process looks for no orphans."""
    url = "http://127.0.0.1:8080"
    assert not starts_engines(Settings(model=url))
    assert not starts_engines(Settings(model="a.gguf", backend="llama-cpp"))
    assert starts_engines(Settings(model="a.gguf", backend="llama-server"))
    file = tmp_path / "fleet.toml"
    file.write_text(f'[engines.a]\nurl = "{url}"\n')
    assert not starts_engines(Settings.load(file))
    file.write_text('[engines.a]\ncommand = ["llama-server", "--port", "{port}"]\n')
    assert starts_engines(Settings.load(file))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_background_response_after_a_change_of_koboldcpps_model(stream: bool) -> None:
    """A background response whose call finds another model is prepared once more, under its id."""
    body: dict[str, Any] = {"model": "m", "input": "echo:a", "background": True, "stream": stream}
    lines: list[bytes] = []
    async with FakeKoboldcpp() as fake:
        log = RequestLog(lines.append)
        app = OpenAIAdapter(KoboldCpp(fake.url), any_model=True, observers=[log])
        async with client_of(app) as client:
            assert (await client.post("/v1/responses", json={**body, "stream": False})).is_success
            while not fake.seen:
                await asyncio.sleep(0.01)
            # Start times that are closer together count as the same.
            await asyncio.sleep(0.1)
            fake.model = Model("other", template="[OTHER] {{ messages[0].content }}")
            await fake.restart()
            reply = await client.post("/v1/responses", json=body)
            found = json.loads(reply.text.split("\n\n")[0].partition("data: ")[2] or reply.text)
            found = found.get("response", found)
            name = found["id"]
            while found["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
                found = (await client.get(f"/v1/responses/{name}")).json()
            events = (await client.get(f"/v1/responses/{name}?stream=true")).text
        app.service.observers.flush()
        await app.aclose()
    assert (found["status"], found["id"]) == ("completed", name)
    assert found["output"][0]["content"][0]["text"] == "a"
    assert fake.seen[-1].startswith("[OTHER]")
    kinds = re.findall(r"^event: (\S+)", events, re.MULTILINE)
    assert kinds.count("response.in_progress") == 1
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    work = [one for one in map(json.loads, b"".join(lines).splitlines()) if "tried" in one]
    assert [(one["event"], one["attempts"], one["tried"]) for one in work] == [
        ("background", 2, [{"engine": "koboldcpp", "reason": "model_changed"}])
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_after_a_change_of_koboldcpps_model(stream: bool) -> None:
    """A chat whose call finds another model is prepared once more, with that model's template."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "echo:a"}]}
    async with FakeKoboldcpp() as fake, adapting(KoboldCpp(fake.url)) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        # Start times that are closer together count as the same.
        await asyncio.sleep(0.1)
        fake.model = Model("other", template="[OTHER] {{ messages[0].content }}")
        await fake.restart()
        reply = await client.post("/v1/chat/completions", json={**body, "stream": stream})
    assert reply.status_code == 200
    assert '"content":"a"' in reply.text
    assert fake.seen[-1].startswith("[OTHER]")
