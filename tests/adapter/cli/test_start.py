"""Tests of `latimer serve` at its start: before its engine, with it, and with closed streams."""

from __future__ import annotations

import asyncio
import gc
import signal
import subprocess
import time
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from latimer.adapter.cli import serve
from latimer.adapter.settings import Settings
from latimer.backends.errors import EngineUnavailable
from latimer.backends.llama_cpp import DEMO_MODEL
from latimer.backends.single_flight import MOMENT
from support.engines.fleet import Engine
from support.servers import begun, canned, free_port, llama_server

pytestmark = pytest.mark.slow

BODY = {"model": "demo.gguf", "prompt": "a", "max_tokens": 2}


def ask(address: str) -> httpx2.Response:
    """Send a completion request."""
    return httpx2.post(f"{address}/v1/completions", json=BODY, timeout=30)


def becomes(address: str, status: int) -> None:
    """Wait until `/health` answers with a status."""
    end = time.monotonic() + 30
    while httpx2.get(f"{address}/health", timeout=10).status_code != status:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("options", [(), ("--backend", "llama-server")], ids=["auto", "named"])
def test_it_starts_before_its_engine(options: tuple[str, ...]) -> None:
    """`latimer serve` answers 503 until its engine is ready, and then serves it."""
    port = free_port()
    with begun(f"http://127.0.0.1:{port}", *options) as (process, address, line):
        assert "responds with 503 until the engine is ready. The engine at" in line
        step = f"correct the URL; latimer check http://127.0.0.1:{port} tests it."
        assert line.rstrip().endswith(f"Is it running? Start an engine there, or {step}")
        reply = ask(address)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(reply.headers["retry-after-ms"]) > 0
        for path in ("/health", "/v1/models"):
            assert httpx2.get(address + path).status_code == 503
        with llama_server(DEMO_MODEL, port=port):
            becomes(address, 200)
            assert ask(address).status_code == 200
            assert httpx2.get(f"{address}/v1/models").json()["data"][0]["id"] == "demo.gguf"
            wanted = f"Latimer serves demo.gguf (llama-server, 2048 tokens) at {address}/v1\n"
            assert process.stderr is not None
            while (line := process.stderr.readline()) != wanted:
                assert "oading" in line
            # No banner shows it, since no terminal shows the lines.
            assert process.stderr.readline() == f"The playground is at {address}/\n"


def test_the_playground_can_be_off(llama_server_url: str) -> None:
    """Without a playground, no line names its address."""
    with begun(llama_server_url, "--no-playground") as (process, address, _):
        becomes(address, 200)
        process.terminate()
        assert process.stderr is not None
        assert "playground" not in process.stderr.read()


def test_a_missing_key_is_all_that_it_says() -> None:
    """A start at an engine that requires a key names the option, and no other step."""
    with canned({"*": (401, b"")}) as (engine, _), begun(engine) as (_, _, line):
        assert "requires an API key. Set it with --engine-key, or as engine_key" in line
        assert "Start an engine" not in line


async def test_it_asks_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between questions to something other than an engine grow to ten seconds."""
    now, pauses = 0.0, list[float]()
    sleep = asyncio.sleep

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)
        await sleep(0)
        if now > 600:
            raise TimeoutError

    monkeypatch.setattr(serve, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now))
    engine = Engine("a")
    engine.error = EngineUnavailable("It is no engine.")
    door: Any = SimpleNamespace(address="http://latimer")
    with pytest.raises(TimeoutError):
        await serve._listen_when_ready(Settings(model="http://a"), engine, door, asyncio.Event())
    assert pauses[:20] == [0.5] * 20
    assert pauses == sorted(pauses)
    assert pauses[-1] == 10.0


async def test_an_engine_that_fails_at_the_end_is_not_logged() -> None:
    """An engine whose failure arrives while the server ends leaves no error in the log."""
    missed: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, found: missed.append(found))
    asked, fails = asyncio.Event(), asyncio.Event()

    class Silent(Engine):
        async def model(self) -> Any:
            asked.set()
            await fails.wait()
            raise EngineUnavailable("It does not answer.")

    door: Any = SimpleNamespace(address="http://latimer")
    settings = Settings(model="http://a")
    starting = asyncio.create_task(
        serve._listen_when_ready(settings, Silent("a"), door, asyncio.Event())
    )
    await asked.wait()
    starting.cancel()
    await asyncio.wait([starting])
    fails.set()
    await asyncio.sleep(0.01)
    del starting
    gc.collect()
    assert missed == []


def test_it_waits_for_its_engine(koboldcpp_replay: tuple[str, Any]) -> None:
    """With `--wait` no client can connect until the engine is ready."""
    with begun(koboldcpp_replay[0], "--wait") as (_, address, line):
        assert line.startswith("Latimer serves koboldcpp/demo (koboldcpp, ")
        becomes(address, 200)
    with canned({"*": (503, b"")}) as (engine, _):
        port = str(free_port())
        with begun(engine, "--wait", LATIMER_PORT=port) as (process, _, line):
            assert line.startswith(
                "Latimer waits for the engine before it accepts requests. The engine at"
            )
            assert line.endswith("is loading its model.\n")
            with pytest.raises(httpx2.ConnectError):
                httpx2.get(f"http://127.0.0.1:{port}/health")
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            assert (process.wait(10), process.stderr.read()) == (130, "")


def test_settings_that_count_for_nothing_are_told(llama_server_url: str) -> None:
    """A setting that has no effect on the engine at a URL is reported at the start."""
    with begun(llama_server_url, "--context", "512") as (_, _, line):
        assert line.startswith("Ignored: --context (only for a GGUF file")


def test_an_unknown_engine_is_told() -> None:
    """An unknown engine gives a message at the start and a 503 for each request."""
    with canned({}) as (engine, asked), begun(engine) as (process, address, line):
        assert "neither llama-server nor koboldcpp." in line
        reply = ask(address)
        assert reply.status_code == 503
        assert "neither llama-server" in reply.json()["error"]["message"]
        before, start = len(asked), time.monotonic()
        for _ in range(20):
            assert ask(address).status_code == 503
        # Each detection asks for two paths; the line at the start repeats it, too.
        moments = (time.monotonic() - start) / MOMENT
        assert len(asked) - before <= 4 * (moments + 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


@pytest.mark.parametrize(
    "redirection",
    ["<&- >&- 2>&-", ">/dev/full 2>/dev/full", "2> >(exit 0)"],
)
def test_streams_that_take_nothing(redirection: str) -> None:
    """The server starts, serves and exits with 0 when its standard streams are closed or full."""
    port = free_port()
    process = subprocess.Popen(
        ["bash", "-c", f"exec latimer serve http://127.0.0.1:1 --port {port} {redirection}"]
    )
    try:
        end = time.monotonic() + 30
        while True:
            try:
                status = httpx2.get(f"http://127.0.0.1:{port}/health").status_code
                break
            except httpx2.ConnectError:
                assert time.monotonic() < end
                time.sleep(0.05)
        assert status == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [("serve /nowhere.gguf", 3), ("serve --context 0", 2), ("check http://127.0.0.1:1", 1)],
)
def test_exit_codes_need_no_stream(arguments: str, code: int) -> None:
    """An exit code does not depend on standard streams."""
    for redirection in (">/dev/full 2>/dev/full", ">&- 2>&-"):
        command = f"latimer {arguments} {redirection}"
        assert subprocess.run(["bash", "-c", command], timeout=60).returncode == code
