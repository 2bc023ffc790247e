"""Tests of several engines and models behind one server, from a settings file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.engines import WrongSetup
from latimer.adapter.fleet import Fleet
from latimer.adapter.settings import Settings, schema_of_file
from latimer.adapter.settings_file import WrongSettings
from latimer.backends.llama_cpp import DEMO_MODEL
from support.clients import client_of
from support.servers import command, free_port, llama_server

SAID = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[str]]:
    """Run two llama-servers."""
    with llama_server(DEMO_MODEL, slots=2) as one, llama_server(DEMO_MODEL, slots=2) as other:
        yield [one, other]


def written(file: Path, *tables: str) -> Path:
    """Write a settings file."""
    file.write_text("\n".join(tables))
    return file


def engines(servers: list[str], **more: str) -> str:
    """Return the tables of two engines, and of others by their URLs."""
    urls = {"one": servers[0], "two": servers[1], **more}
    return "".join(f'[engines.{name}]\nurl = "{url}"\n' for name, url in urls.items())


@asynccontextmanager
async def served(file: Path) -> AsyncIterator[tuple[httpx2.AsyncClient, Fleet, OpenAIAdapter]]:
    """Serve the models of a settings file."""
    settings = Settings.load(file)
    fleet = Fleet(settings)
    app = OpenAIAdapter(fleet.entries, **settings.arguments("adapter"))
    app.service.release = fleet.aclose
    fleet.start()
    await asyncio.gather(*(pool.ask_all() for pool in fleet.pools.values()))
    try:
        async with client_of(app) as client:
            yield client, fleet, app
    finally:
        await app.aclose()


async def chat(client: httpx2.AsyncClient, model: str, **fields: Any) -> httpx2.Response:
    """Return the response to a chat."""
    headers = fields.pop("headers", {})
    body = {**SAID, "max_tokens": 8, "temperature": 0, **fields, "model": model}
    return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_model_has_several_engines(servers: list[str], tmp_path: Path) -> None:
    """Both names of a model reach both engines, and the headers name the engine."""
    file = written(
        tmp_path / "fleet.toml",
        engines(servers, away=f"http://127.0.0.1:{free_port()}"),
        '[models.demo]\nengines = ["one", "two", "away"]\naliases = ["gpt-4o"]\n'
        'affinity = "none"\n',
    )
    async with served(file) as (client, fleet, _):
        replies = [await chat(client, name) for name in ("demo", "gpt-4o") * 3]
        assert {reply.status_code for reply in replies} == {200}
        assert {reply.headers["x-latimer-engine"] for reply in replies} == {"one", "two"}
        assert len({reply.json()["choices"][0]["message"]["content"] for reply in replies}) == 1
        assert replies[1].json()["model"] == "gpt-4o"
        unknown = await chat(client, "other")
        assert unknown.status_code == 404
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["demo", "gpt-4o"]
        assert listed[0]["context_length"] == 2048
        assert (await client.get("/health")).status_code == 200
        states = {name: state for name, state, _ in fleet.states()}
        assert states == {"one": "ready", "two": "ready", "away": "unavailable"}


async def test_engines_whose_slots_fill_one_context_stay_in_use(tmp_path: Path) -> None:
    """A context that running requests fill together is a 503 that says what to do, also in a
    stream, and no reason to leave the engine."""
    shares = "--kv-unified", "-c", "512"
    body = {**SAID, "model": "demo", "max_tokens": 400, "ignore_eos": True}
    with llama_server(DEMO_MODEL, *shares) as one, llama_server(DEMO_MODEL, *shares) as two:
        file = written(
            tmp_path / "fleet.toml",
            engines([one, two]),
            '[models.demo]\nengines = ["one", "two"]\naffinity = "none"\n',
        )
        async with served(file) as (client, fleet, _):
            for stream in (True, False):
                own = {**body, "stream": stream}
                for _ in range(2):
                    replies = await asyncio.gather(
                        *(client.post("/v1/chat/completions", json=own) for _ in range(8))
                    )
                    assert {state for _, state, _ in fleet.states()} == {"ready"}
                full = [reply for reply in replies if "engine_overloaded" in reply.text]
                assert {reply.status_code for reply in full} == {200 if stream else 503}
                assert "share one context of 512 tokens" in full[0].text
                assert "engine_error" not in "".join(reply.text for reply in replies)
            assert full[0].headers["retry-after"] == "1"
            assert {one.ejections for one in fleet.replicas.values()} == {0}


async def test_a_dead_engine_takes_no_model_along(servers: list[str], tmp_path: Path) -> None:
    """A model without an engine is a 503; others, the list of models and `/health` go on."""
    file = written(
        tmp_path / "fleet.toml", engines(servers, away=f"http://127.0.0.1:{free_port()}")
    )
    async with served(file) as (client, _, _):
        start = time.monotonic()
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models/away")).json()["id"] == "away"
        assert (await chat(client, "one")).status_code == 200
        away = await chat(client, "away")
        assert away.status_code == 503
        assert "No engine of the model away is available. away: The engine at" in away.text
        assert time.monotonic() - start < 5


async def test_a_fallback_is_named(servers: list[str], tmp_path: Path) -> None:
    """The model that serves instead of another is named in the response and in a header."""
    file = written(
        tmp_path / "fleet.toml",
        engines(servers, away=f"http://127.0.0.1:{free_port()}"),
        '[models.large]\nengines = ["away"]\nfallback = ["small"]\n',
        '[models.small]\nengines = ["one"]\n',
    )
    async with served(file) as (client, _, _):
        reply = await chat(client, "large")
        assert reply.status_code == 200
        assert reply.json()["model"] == reply.headers["x-latimer-model"] == "small"
        assert "x-latimer-model" not in (await chat(client, "small")).headers


async def test_a_fallback_serves_a_request_whose_engine_is_lost(
    servers: list[str], tmp_path: Path
) -> None:
    """A request whose model has just lost its last engine is served by the fallback."""
    with llama_server(DEMO_MODEL, slots=2) as other:
        file = written(
            tmp_path / "fleet.toml",
            engines(servers, lost=other),
            '[models.large]\nengines = ["lost"]\nfallback = ["small"]\n',
            '[models.small]\nengines = ["one"]\n',
        )
        serving = served(file)
        client, _, _ = await serving.__aenter__()
        assert (await chat(client, "large")).json()["model"] == "large"
    reply = await chat(client, "large", stream=True)
    assert reply.status_code == 200
    assert reply.headers["x-latimer-model"] == "small"
    assert reply.headers["x-latimer-engine"] == "one"
    assert reply.text.endswith("data: [DONE]\n\n")
    await serving.__aexit__(None, None, None)


async def test_a_model_has_defaults_and_rules(servers: list[str], tmp_path: Path) -> None:
    """Defaults fill what a request omits, and the rules of a model are its own."""
    file = written(
        tmp_path / "fleet.toml",
        engines(servers),
        '[models.short]\nengines = ["one"]\ndefaults = { max_completion_tokens = 3 }\n',
        '[models.strict]\nengines = ["one", "two"]\nstrict = true\n',
    )
    async with served(file) as (client, _, _):
        body = {**SAID, "temperature": 0}
        replies = [
            (await client.post("/v1/chat/completions", json={**body, **fields})).json()
            for fields in ({"model": "short"}, {"model": "short", "max_completion_tokens": 5})
        ]
        assert [one["usage"]["completion_tokens"] for one in replies] == [3, 5]
        assert (await chat(client, "short", mistake=1)).status_code == 200
        assert (await chat(client, "strict", mistake=1)).status_code == 400
        assert (await chat(client, "strict")).status_code == 200


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("defaults = { temprature = 1 }", "models.m.defaults: no request has the field 'temprat"),
        ('defaults = { temperature = "hot" }', "models.m.defaults: Invalid type for 'temperature'"),
        ("logit_bias_vocabulary = 'x'", "models.m.logit_bias_vocabulary: "),
    ],
)
def test_wrong_models_are_named(tmp_path: Path, table: str, said: str) -> None:
    """An error in a model's rules names the table and the key."""
    text = f'[engines.a]\nurl = "http://127.0.0.1:1"\n[models.m]\nengines = ["a"]\n{table}\n'
    with pytest.raises(WrongSetup) as caught:
        Fleet(Settings.load(written(tmp_path / "fleet.toml", text)))
    assert caught.value.message.startswith(said)


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://a b"])
def test_wrong_engines_are_named(tmp_path: Path, url: str) -> None:
    """An error in an engine's address names its table."""
    with pytest.raises(WrongSetup, match=r"^engines\.a: "):
        Fleet(Settings.load(written(tmp_path / "f.toml", f'[engines.a]\nurl = "{url}"\n')))


def test_durations_are_up_to_a_day(tmp_path: Path) -> None:
    """An engine is unloaded after minutes or hours, up to a day."""
    for text, seconds in (("15m", 900), ("24h", 86_400)):
        tables = f'[engines.a]\nurl = "http://127.0.0.1:1"\nidle = "{text}"\n'
        found = Settings.load(written(tmp_path / "fleet.toml", tables))
        assert found.engines["a"].idle == seconds
    with pytest.raises(WrongSettings, match="at most 24h, not '25h'"):
        Settings.load(written(tmp_path / "fleet.toml", tables.replace("24h", "25h")))


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            "[engines.\"\"]\nurl = 'http://127.0.0.1:1'",
            "engines.'': a name has 1 to 200 characters",
        ),
        (f"[engines.{'x' * 201}]\nurl = 'http://127.0.0.1:1'", "engines.'xxxxxxxxx': a name has 1"),
        (
            "[engines.a]\nurl = 'http://127.0.0.1:1'\n[models.\"\"]\nengines = ['a']",
            "models.'': a name has 1 to 200 characters",
        ),
        (
            '[engines."a\\nb"]\nurl = "http://127.0.0.1:1"',
            "engines.'a\\nb': a name has no line break and no other control character",
        ),
        (
            '[engines.a]\nurl = "http://127.0.0.1:1"\n'
            '[models.m]\nengines = ["a"]\naliases = ["a\\rb"]',
            "models.m.aliases[0]: 'a\\rb' has a line break or another control character",
        ),
        ("[engines.a]\nurl = ''", "engines.a.url must not be empty"),
        ("[engines.a]\nfile = ''", "engines.a.file must not be empty"),
    ],
)
def test_names_that_no_table_may_have(tmp_path: Path, tables: str, said: str) -> None:
    """A name of a table has characters, which may be in a header, and an address has some, too."""
    with pytest.raises(WrongSettings, match=re.escape(said)):
        Settings.load(written(tmp_path / "fleet.toml", tables))


@pytest.mark.parametrize(
    "name", ["x-session-id", "x-session-affinity", "x-claude-code-session-id", ""]
)
async def test_sessions_are_named_in_many_ways(
    servers: list[str], tmp_path: Path, name: str
) -> None:
    """Requests of a session run on one engine, whichever way the client names it."""
    file = written(
        tmp_path / "fleet.toml",
        engines(servers),
        '[models.demo]\nengines = ["one", "two"]\naffinity = "session"\n',
    )
    async with served(file) as (client, _, _):
        found = set()
        for session in ("a", "b"):
            named: dict[str, Any] = {"headers": {name: session}}
            if not name:
                named = {"prompt_cache_key": session}
            replies = [await chat(client, "demo", **named) for _ in range(4)]
            where = {reply.headers["x-latimer-engine"] for reply in replies}
            assert len(where) == 1
            found |= where
            hits = [reply.headers["x-latimer-affinity"] for reply in replies]
            assert hits == ["miss", "hit", "hit", "hit"]
        assert found == {"one", "two"}


async def test_responses_of_a_conversation_are_a_session(
    servers: list[str], tmp_path: Path
) -> None:
    """A response runs on the engine of the response that it continues."""
    file = written(
        tmp_path / "fleet.toml",
        engines(servers),
        '[models.demo]\nengines = ["one", "two"]\naffinity = "session"\n',
    )
    async with served(file) as (client, _, _):
        for _ in range(3):
            before, where = None, set()
            for _ in range(3):
                body = {"model": "demo", "input": "Hi!", "max_output_tokens": 16}
                if before is not None:
                    body["previous_response_id"] = before
                reply = await client.post("/v1/responses", json=body)
                before = reply.json()["id"]
                where.add(reply.headers["x-latimer-engine"])
            assert len(where) == 1


async def test_a_changed_file_is_followed(servers: list[str], tmp_path: Path) -> None:
    """Unchanged engines go on, a removed one ends what it runs, and a new model is served."""
    file = tmp_path / "fleet.toml"
    written(file, engines(servers), '[models.demo]\nengines = ["one", "two"]\n')
    async with served(file) as (client, fleet, app):
        one, two = fleet.replicas.values()
        tasks = [
            asyncio.create_task(chat(client, "demo", max_tokens=200, ignore_eos=True))
            for _ in range(8)
        ]
        await asyncio.sleep(0.2)
        written(
            file, f'[engines.one]\nurl = "{servers[0]}"\n', '[models.demo]\nengines = ["one"]\n'
            '[models.new]\nengines = ["one"]\n',
        )  # fmt: skip
        changes = fleet.apply(Settings.load(file))
        app.replace(fleet.entries)
        assert changes == ["engine two removed", "model new added", "model demo changed"]
        assert fleet.replicas["one"] is one
        replies = await asyncio.gather(*tasks)
        assert {reply.status_code for reply in replies} == {200}
        assert {reply.headers["x-latimer-engine"] for reply in replies} == {"one", "two"}
        assert two.state == "draining"
        assert (await chat(client, "new")).headers["x-latimer-engine"] == "one"
        await asyncio.sleep(0.05)
        assert [name for name, _, _ in fleet.states()] == ["one"]


async def test_an_engine_that_leaves_while_it_loads_is_not_loaded_again(tmp_path: Path) -> None:
    """The memory of an engine in process is free again if its table changes while it loads."""
    table = f'[engines.one]\nfile = "{DEMO_MODEL}"\n'
    file = written(tmp_path / "fleet.toml", table, "context = 256\n")
    fleet = Fleet(Settings.load(file))
    replica = fleet.replicas["one"]
    question = fleet.pools["one"].ask(replica)
    await asyncio.sleep(0)
    written(file, table, "context = 512\n")
    fleet.apply(Settings.load(file))
    await question
    async with asyncio.timeout(30):
        while "draining" in {state for _, state, _ in fleet.states()}:
            await asyncio.sleep(0.01)
    assert replica.backend.load() is None
    assert fleet.replicas["one"] is not replica
    await fleet.aclose()


def test_a_fleet_of_a_machine_is_built_before_a_loop_runs(tmp_path: Path) -> None:
    """A program may read the settings of a machine before its event loop runs."""
    table = (
        '[machines.here]\nmemory = "1 GiB"\n'
        '[engines.a]\ncommand = ["llama-server", "--port", "{port}"]\nmachine = "here"\n'
    )
    fleet = Fleet(Settings.load(written(tmp_path / "fleet.toml", table)))
    assert len(fleet.machines["here"].members) == 1
    asyncio.run(fleet.aclose())


async def test_a_refused_file_changes_no_machine(tmp_path: Path) -> None:
    """A file that is refused adds no engine to a machine, and changes no limit."""

    def tables(context: int, gib: int) -> str:
        return (
            f'[machines.here]\nmemory = "{gib} GiB"\nmost_wait = "{gib}s"\n'
            f'[engines.a]\ncommand = ["llama-server", "--port", "{{port}}", "-c", "{context}"]\n'
            'machine = "here"\n'
        )

    file = written(tmp_path / "fleet.toml", tables(512, 4))
    fleet = Fleet(Settings.load(file))
    machine = fleet.machines["here"]
    before = [*machine.members], machine.memory, machine.most_wait
    other = '[machines.there]\nmemory = "1 GiB"\n'
    written(file, tables(256, 8), other, '[engines.b]\nfile = "missing.gguf"\n')
    with pytest.raises(WrongSetup):
        fleet.apply(Settings.load(file))
    assert ([*machine.members], machine.memory, machine.most_wait) == before
    assert [*fleet.machines] == ["here"]
    await fleet.aclose()


async def test_a_pinned_engine_that_is_replaced_makes_way(tmp_path: Path) -> None:
    """A request for a changed engine waits for the memory of the old one, which is not pinned."""

    def tables(context: int) -> str:
        return (
            '[machines.here]\nmemory = "1 GiB"\n[models.a]\nengines = ["a"]\npinned = true\n'
            f'[engines.a]\ncommand = ["llama-server", "--port", "{{port}}", "-c", "{context}"]\n'
            'machine = "here"\n'
        )

    fleet = Fleet(Settings.load(written(tmp_path / "fleet.toml", tables(512))))
    members = fleet.machines["here"].members
    assert [one.is_pinned for one in members] == [True]
    fleet.apply(Settings.load(written(tmp_path / "fleet.toml", tables(256))))
    assert [one.is_pinned for one in members] == [False, True]
    await fleet.aclose()


async def test_a_model_can_be_pinned_and_unpinned(tmp_path: Path) -> None:
    """A change of `pinned` counts for an engine that stays, and its machine plans again."""

    def tables(pinned: str) -> str:
        return (
            f'[models.a]\nengines = ["a"]\npinned = {pinned}\n'
            '[engines.a]\ncommand = ["llama-server", "--port", "{port}"]\n'
        )

    fleet = Fleet(Settings.load(written(tmp_path / "fleet.toml", tables("true"))))
    replica = fleet.replicas["a"]
    loader: Any = replica.loader
    for pinned in (False, True):
        loader._machine._changed.clear()
        fleet.apply(Settings.load(written(tmp_path / "fleet.toml", tables(str(pinned).lower()))))
        assert fleet.replicas["a"] is replica
        assert loader.is_pinned is pinned
        assert loader._machine._changed.is_set()
    await fleet.aclose()


@pytest.mark.slow
def test_an_invalid_file_is_not_followed(servers: list[str], tmp_path: Path) -> None:
    """A server keeps its settings if the file becomes invalid, and follows it when it is mended."""
    file = written(tmp_path / "fleet.toml", engines(servers))
    with command("--config", str(file)) as (process, address):
        assert process.stderr is not None

        def line() -> str:
            return process.stderr.readline().decode()  # type: ignore[union-attr]

        assert line().startswith("Latimer serves one, two over 2 engines at http://")
        assert line().startswith("The playground is at http://")
        assert "--reasoning-key" in line()
        written(file, "[engines.one]\nurll = 3\n")
        process.send_signal(signal.SIGHUP)
        said = f"{file}: engines.one.urll: unknown setting (did you mean 'url'?)."
        assert line() == f"Latimer keeps its settings: {said}\n"
        assert httpx2.get(f"{address}/v1/models/two").status_code == 200
        # To read a pipe would stop the server.
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        file.unlink()
        file.symlink_to(pipe)
        process.send_signal(signal.SIGHUP)
        said = f"{file}: it is a pipe, which can be read only once."
        assert line() == f"Latimer keeps its settings: {said}\n"
        file.unlink()
        # A change without a signal is noticed, too.
        written(file, "port = 7\n", f'[engines.one]\nurl = "{servers[0]}"\n')
        assert line() == (
            f"Latimer has read {file} again: engine two removed, model two removed.\n"
        )
        assert httpx2.get(f"{address}/v1/models/two").status_code == 404
        # The log names a model whose table has changed.
        table = '[models.one]\nengines = ["one"]\naliases = ["other"]\n'
        written(file, "port = 7\n", f'[engines.one]\nurl = "{servers[0]}"\n', table)
        assert line() == f"Latimer has read {file} again: model one changed.\n"
        assert httpx2.get(f"{address}/v1/models/other").status_code == 200
        body = {**SAID, "model": "one", "max_tokens": 4}
        assert httpx2.post(f"{address}/v1/chat/completions", json=body).status_code == 200


def test_the_schema_is_json(tmp_path: Path) -> None:
    """The schema of the file accepts a fleet, and no unknown keys."""
    import jsonschema

    schema = json.loads(json.dumps(schema_of_file()))
    jsonschema.Draft202012Validator.check_schema(schema)
    check: Callable[[Any], bool] = jsonschema.Draft202012Validator(schema).is_valid
    fleet = {
        "port": 8001,
        "engines": {"a": {"url": "http://x", "idle": "15m", "memory": {"gpu0": "2GiB"}}},
        "models": {"m": {"engines": ["a"], "chat_format": "chatml"}},
    }
    assert check(fleet)
    assert not check({**fleet, "engines": {"a": {"urll": "http://x"}}})
    assert not check({"engines": {"a": {"url": "http://x", "idle": "soon"}}})
