"""Tests of `/ready`: whether requests are served now, and why not."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter.endpoints import operations
from latimer.adapter.model_entry import ModelEntry
from latimer.backends.errors import EngineSilent, EngineUnavailable, ModelLoading
from latimer.backends.llama_server import LlamaServer
from support.clients import client_of
from support.engines.echo import Echo
from support.engines.fleet import Engine, pool_of
from support.prometheus import scrape
from support.servers import free_port


async def ready(app: OpenAIAdapter) -> tuple[int, str, str]:
    """Return the status of `/ready`, and the code and the message of its error."""
    async with client_of(app) as client:
        reply = await client.get("/ready")
    error = reply.json().get("error", {})
    return reply.status_code, error.get("code", ""), error.get("message", "")


@pytest.mark.parametrize("engine", ["llama_cpp", "llama_server", "koboldcpp"])
async def test_an_engine_that_answers_is_ready(make_backend: Any, engine: str) -> None:
    """Every engine is ready, with keys and without sending one."""
    app = OpenAIAdapter(make_backend(engine), api_keys=["secret"])
    assert await ready(app) == (200, "", "")
    await app.aclose()


async def test_an_engine_that_is_down_is_named() -> None:
    """A server that does not answer is a 503 with the reason, and a state in the metrics."""
    app = OpenAIAdapter(LlamaServer(f"http://127.0.0.1:{free_port()}"), model_names=["m"])
    status, code, message = await ready(app)
    assert (status, code) == (503, "engine_unavailable")
    assert message.startswith("The model m is not served: llama_server is unavailable: ")
    async with client_of(app) as client:
        found = await scrape(client)
    assert found.sum("latimer_engine_state", model_name="m", state="unavailable") == 1
    await app.aclose()


async def test_the_only_engine_has_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that answered is lost once and returns once, by requests and by probes."""
    caplog.set_level("INFO", "latimer")
    engine = Engine("one")
    app = OpenAIAdapter(engine, any_model=True)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    async with client_of(app) as client:
        engine.error = EngineUnavailable("It has not started.")
        await client.get("/ready")
        assert not caplog.records
        for error in (None, EngineUnavailable("It is gone."), None):
            engine.error = error
            for _ in range(2):
                await client.post("/v1/chat/completions", json=body)
                await client.get("/ready")
    await app.aclose()
    found: list[Any] = caplog.records
    assert [one.event for one in found] == ["engine_lost", "engine_returned"]
    assert found[0].fields == {"engine": "echo", "model": "demo", "reason": "It is gone."}


CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("names", [["m"], []])
@pytest.mark.parametrize("by", ["request", "probe"])
async def test_another_model_of_the_only_engine_is_in_the_log(
    caplog: pytest.LogCaptureFixture, names: list[str], by: str
) -> None:
    """The log warns once that the only engine has another model, by a request or by a probe."""
    engine = Engine("one")
    app = OpenAIAdapter(engine, model_names=names, any_model=not names)
    async with client_of(app) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        if by == "probe":
            engine.error = EngineUnavailable("It is gone.")
            await client.get("/ready")
        # After a restart, the same model is not another one.
        engine.facts = replace(engine.facts, modified=1)
        engine.error = None
        await client.get("/ready")
        await client.post("/v1/chat/completions", json=CHAT)
        engine.error = EngineUnavailable("It is gone.") if by == "probe" else None
        await client.get("/ready")
        engine.facts = replace(engine.facts, name="evil", template="another")
        engine.error = None
        if by == "probe":
            await client.get("/ready")
        for _ in range(2 * (by == "request")):
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    await app.aclose()
    records: list[Any] = caplog.records
    found = [one for one in records if one.event == "model_changed"]
    label = names[0] if names else "demo"
    reason = "it serves another model (evil): its chat template is not as before"
    assert [one.fields for one in found] == [{"engine": "echo", "model": label, "reason": reason}]
    assert found[0].getMessage() == f"model {label}: {reason}; all requests get it now"


async def test_a_model_of_another_name_says_what_requests_need(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Without a name of the server's own, the log says which name requests need now, if it is
    another one."""
    engine = Engine("one")
    app = OpenAIAdapter(engine)
    async with client_of(app) as client:
        await client.get("/ready")
        engine.facts = replace(engine.facts, name="evil", eos_token="another")
        await client.get("/ready")
        # A fine-tuned model can differ in its weights only.
        engine.facts = replace(engine.facts, name="tuned")
        await client.get("/ready")
        engine.facts = replace(engine.facts, context=4)
        await client.get("/ready")
        engine.facts = replace(engine.facts, name="small", context=2)
        await client.get("/ready")
    await app.aclose()
    assert caplog.messages == [
        "model demo: it serves another model (evil): its end token is not as before; requests have "
        "to name evil now",
        "model evil: it serves another model (tuned), not evil; requests have to name tuned now",
        "model tuned: its context is 4 tokens, less than 4096",
        "model tuned: it serves another model (small), not tuned: its context is 2 tokens, less "
        "than 4; requests have to name small now",
    ]


async def test_an_engine_is_not_ready_when_the_server_ends_before_its_answer() -> None:
    """`/ready` is a 503 if the app is closed while it waits for a hung engine."""
    app = OpenAIAdapter(Slow(), any_model=True)
    async with client_of(app) as client:
        asking = asyncio.create_task(client.get("/ready"))
        await asyncio.sleep(0.05)
        await app.aclose()
        assert (await asking).status_code == 503


class Slow(Echo):
    """An engine that loads until its gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()

    async def health(self) -> None:
        """Wait for the gate."""
        await self.gate.wait()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let probes and scrapes wait hardly for an engine."""
    monkeypatch.setattr("latimer.adapter.endpoints.operations._READY", 0.05)
    monkeypatch.setattr("latimer.adapter.endpoints.operations.SCRAPE", 0.05)


@pytest.mark.usefixtures("hasty")
async def test_a_model_that_loads_is_named() -> None:
    """A model that loads is a 503 within about a second, and no scrape waits for it."""
    engine = Slow()
    app = OpenAIAdapter(engine, model_names=["m"])
    begun = time.monotonic()
    status, code, _ = await ready(app)
    assert (status, code) == (503, "engine_loading")
    async with client_of(app) as client:
        found = await scrape(client)
    assert found.sum("latimer_engine_state", state="loading") == 1
    assert time.monotonic() - begun < 10
    engine.gate.set()
    assert (await ready(app))[0] == 200
    await app.aclose()


def test_an_engine_that_hangs_delays_a_probe_for_less_than_a_second() -> None:
    """A probe of Kubernetes, which waits for a second by default, has its answer before that."""
    assert operations._READY <= 0.8


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("here", [False, True])
async def test_an_engine_that_hangs_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """An engine elsewhere that says nothing for some seconds is down; one in process loads."""
    monkeypatch.setattr("latimer.adapter.service.SILENCE", 0.05)
    engine = Slow()
    engine.loads_here = here
    app = OpenAIAdapter(engine)
    await ready(app)
    state = "loading" if here else "unavailable"
    async with client_of(app) as client:
        for _ in range(2):
            found = await scrape(client)
            assert found.sum("latimer_engine_state", state=state) == 1
    engine.gate.set()
    await asyncio.sleep(0)
    assert (await ready(app))[0] == 200
    await app.aclose()


async def test_an_engine_that_was_down_and_hangs_is_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that was never ready is loading for some seconds when it accepts connections."""
    monkeypatch.setattr("latimer.adapter.service.SILENCE", 0.4)
    monkeypatch.setattr("latimer.adapter.endpoints.operations._READY", 0.05)
    engine = Failing()
    app = OpenAIAdapter(engine, model_names=["m"])
    assert (await ready(app))[1] == "engine_unavailable"
    engine.pause = 60.0
    _, code, message = await ready(app)
    assert code == "engine_loading"
    # The time is measured.
    assert re.search(r"The engine has not answered within 0\.0\d+ s\.", message)
    await asyncio.sleep(0.4)
    assert (await ready(app))[1] == "engine_unavailable"
    await app.aclose()


async def test_an_engine_that_takes_its_time_to_fail_stays_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine whose host is down, which takes a while to find, is not loading in between."""
    monkeypatch.setattr("latimer.adapter.endpoints.operations._READY", 0.05)
    engine = Failing()
    engine.pause = 0.2
    app = OpenAIAdapter(engine, model_names=["m"])
    await ready(app)
    await asyncio.sleep(0.3)
    for _ in range(2):
        _, code, message = await ready(app)
        assert (code, message.rpartition(": ")[2]) == ("engine_unavailable", "It has not started.")
    await app.aclose()


class Failing(Echo):
    """An engine that fails after a pause in seconds."""

    pause = 0.0

    async def health(self) -> None:
        """Wait, and fail."""
        await asyncio.sleep(self.pause)
        raise EngineUnavailable("It has not started.")


@pytest.mark.parametrize("path", ["/ready", "/health", "/metrics"])
async def test_an_engine_that_hangs_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """An engine that was ready and hangs is ready for some seconds, and then lost once."""
    monkeypatch.setattr("latimer.adapter.service.SILENCE", 0.3)
    monkeypatch.setattr("latimer.adapter.service.HEALTH", 0.05)
    monkeypatch.setattr("latimer.adapter.endpoints.operations._READY", 0.05)
    monkeypatch.setattr("latimer.adapter.endpoints.operations.SCRAPE", 0.05)
    caplog.set_level("INFO", "latimer")
    engine = Slow()
    engine.gate.set()
    app = OpenAIAdapter(engine, model_names=["m"])
    async with client_of(app) as client:
        await client.get("/ready")
        engine.gate.clear()
        await client.get(path)
        found = await scrape(client)
        assert found.sum("latimer_engine_state", state="ready") == 1
        await asyncio.sleep(0.4)
        found = await scrape(client)
        assert found.sum("latimer_engine_state", state="unavailable") == 1
        engine.gate.set()
        await asyncio.sleep(0)
        assert (await client.get("/ready")).status_code == 200
    await app.aclose()
    records: list[Any] = caplog.records
    assert [one.event for one in records] == ["engine_lost", "engine_returned"]
    assert records[0].fields["reason"] == "The engine has not answered for 0.3 s."


async def test_a_request_finds_an_engine_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that says nothing to a request is lost, without a probe."""
    engine = Engine("one")
    app = OpenAIAdapter(engine, model_names=["m"])
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        engine.error = EngineSilent("It says nothing.")
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 504
    await app.aclose()
    records: list[Any] = caplog.records
    assert [one.event for one in records] == ["engine_lost"]


async def test_a_client_that_leaves_an_engine_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that says nothing until the client leaves is lost, after some seconds only."""
    monkeypatch.setattr("latimer.adapter.service.SILENCE", 0.2)
    engine = Engine("one")
    app = OpenAIAdapter(engine, model_names=["m"])
    events = []
    async with client_of(app) as client:
        await client.post("/v1/chat/completions", json=CHAT)
        engine.model = asyncio.Event().wait  # type: ignore[assignment, method-assign]
        for patience in (0.05, 0.4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(patience):
                    await client.post("/v1/chat/completions", json=CHAT)
            records: list[Any] = caplog.records
            events.append([one.event for one in records])
    await app.aclose()
    assert events == [[], ["engine_lost"]]


@pytest.mark.parametrize("many", [False, True])
async def test_an_engine_that_says_that_it_loads(
    caplog: pytest.LogCaptureFixture, many: bool
) -> None:
    """It is loading for all probes; the log says so only if it was ready before."""
    caplog.set_level("INFO", "latimer")
    engine = Engine("one")
    engine.error = ModelLoading("It loads.")
    pool = await pool_of(engine)
    app = OpenAIAdapter([ModelEntry(pool if many else engine, ("m",))])
    states = []
    async with client_of(app) as client:
        for error in (ModelLoading("It loads."), None, ModelLoading("It loads again.")):
            engine.error = error
            if many:
                await pool.ask(pool.replicas[0])
            codes = [
                (await client.get(path)).json().get("error", {}).get("code", "ok")
                for path in ("/ready", "/health")
            ]
            found = await scrape(client)
            kind = "ready" if error is None else "loading"
            states.append((*codes, found.sum("latimer_engine_state", state=kind)))
    await app.aclose()
    loading = ("engine_loading", "engine_loading", 1)
    assert states == [loading, ("ok", "ok", 1), loading]
    records: list[Any] = caplog.records
    assert [(one.event, one.fields["reason"]) for one in records] == [
        ("engine_lost", "It loads again.")
    ]


async def test_one_engine_of_a_model_is_enough() -> None:
    """A fleet is ready while one engine is, and else the error names the reason of each."""
    one, two = Engine("one"), Engine("two")
    pool = await pool_of(one, two)
    app = OpenAIAdapter([ModelEntry(pool, ("m",))])
    pool.replicas[0].set("unavailable", "it does not answer")
    assert (await ready(app))[0] == 200
    pool.replicas[1].set("draining", "it is drained by the operator")
    status, code, message = await ready(app)
    assert (status, code) == (503, "engine_unavailable")
    assert "one is unavailable: it does not answer" in message
    assert "two is draining: it is drained by the operator" in message
    pool.replicas[0].set("unloaded")
    assert (await ready(app))[0] == 200
    await app.aclose()


async def test_a_server_that_drains_is_not_ready() -> None:
    """During a drain requests are served, and `/ready` says that the server ends."""
    app = OpenAIAdapter(Echo())
    app.drain()
    assert (await ready(app))[:2] == (503, "server_shutting_down")
    async with client_of(app) as client:
        assert (await client.get("/health")).status_code == 200
    await app.aclose()


@pytest.mark.usefixtures("hasty")
async def test_a_failed_question_is_no_warning() -> None:
    """An engine that fails after a scrape has given up leaves no error that nobody reads."""
    engine = Slow()
    app = OpenAIAdapter(engine, model_names=["m"])
    await ready(app)
    engine.health = _fail  # type: ignore[method-assign]
    engine.gate.set()
    await asyncio.sleep(0)
    assert (await ready(app))[1] == "engine_unavailable"
    await app.aclose()


async def _fail() -> None:
    raise EngineUnavailable("It failed.")
