"""Tests of `latimer serve` with engines that it starts: real llama-servers in a fleet."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest
from latimer.backends.fleet import groups
from latimer.backends.llama_cpp import DEMO_MODEL
from support.copies import run
from support.prometheus import Scrape
from support.servers import command, llama_server_command
from websockets.sync.client import connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

KEY = "operator"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def engine(name: str, model: Path, size: str, delay: float = 0.0) -> str:
    """Return the table of an engine on the machine `here`, which starts after a delay."""
    words = [str(word) for word in llama_server_command(model, 0, slots=2, context=512)]
    words[words.index("--port") + 1] = "{port}"
    program = words
    if delay:
        program = ["sh", "-c", f"sleep {delay}; exec {shlex.join(words)}"]
    return (
        f'[engines.{name}]\nbackend = "llama-server"\nmachine = "here"\nmemory = "{size}"\n'
        f"command = {orjson.dumps(program).decode()}\n"
    )


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that llama-server cannot load."""
    path = tmp_path_factory.mktemp("broken") / "broken.gguf"
    path.write_bytes(DEMO_MODEL.read_bytes()[:1000])
    return path


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, broken: Path) -> Path:
    """Return a file with two models that do not fit together, a slow one and a broken one."""
    folder = tmp_path_factory.mktemp("fleet")
    copy = folder / "other.gguf"
    shutil.copy(DEMO_MODEL, copy)
    file = folder / "fleet.toml"
    file.write_text(
        "\n".join(
            [
                f'keepalive = 0.2\nadmin_key = "{KEY}"\n',
                engine("one", DEMO_MODEL, "8GiB"),
                engine("two", copy, "8GiB"),
                engine("slow", copy, "1GiB", delay=1.0),
                engine("bad", broken, "1GiB"),
                engine("late", broken, "1GiB", delay=0.5),
                '[machines.here]\nmemory = "10GiB"\nmost_wait = "5s"\n',
                '[models.slow]\nengines = ["slow"]\nload_wait = "500ms"\n',
                *(
                    f'[models.{name}]\nengines = ["{name}"]\n'
                    for name in ("one", "two", "bad", "late")
                ),
            ]
        )
    )
    return file


@contextmanager
def running(settings: Path, state: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `latimer serve`, and check that no engine is left at its end."""
    pids: set[int] = set()
    with command("--config", str(settings), XDG_STATE_HOME=str(state)) as found:
        yield found
        pids = children(state)
    for pid in pids:
        assert not groups.Group(pid, "", None).members()
    assert not children(state)


@pytest.fixture(scope="module")
def shared(settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server for tests that do not kill it."""
    with running(settings, tmp_path_factory.mktemp("state")) as (_, url):
        yield url


@pytest.fixture
def url(shared: str) -> str:
    """Return the address of a server without a loaded model."""
    for name in states(shared):
        httpx2.post(f"{shared}/admin/engines/{name}/unload", headers=HEADERS, timeout=60)
    return shared


def children(folder: Path) -> set[int]:
    """Return the processes of the engines that run."""
    records = folder.rglob("latimer/engines/*.json")
    return {orjson.loads(record.read_bytes())["pid"] for record in records}


def asked(model: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0, **fields}


def chat(url: str, model: str, **fields: Any) -> httpx2.Response:
    """Send a chat request."""
    return httpx2.post(f"{url}/v1/chat/completions", json=asked(model, **fields), timeout=60)


def states(url: str) -> dict[str, dict[str, Any]]:
    """Return the engines of a server by their names."""
    reply = httpx2.get(f"{url}/admin/engines", headers=HEADERS)
    assert reply.status_code == 200, reply.text
    return {one["id"]: one for one in reply.json()["data"]}


def waits(url: str, name: str) -> float:
    """Return the seconds that requests waited for an engine; Latimer's own time excludes them."""
    found = Scrape(httpx2.get(f"{url}/metrics").text)
    own = found.sum("latimer_adapter_overhead_seconds_sum", engine=name)
    waited = found.sum("latimer_request_queue_time_seconds_sum", engine=name)
    assert own < waited
    return waited


def test_the_first_request_loads_a_model(url: str) -> None:
    """Lists and health load nothing; a request loads its model, and unloads one that is unused."""
    assert httpx2.get(f"{url}/v1/models").status_code == 200
    assert httpx2.get(f"{url}/health").status_code == 200
    before = states(url)
    assert {one["state"] for one in before.values()} == {"unloaded"}
    for name, other in (("one", "two"), ("two", "one")):
        reply = chat(url, name)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"].startswith("Hello!")
        assert reply.headers["x-latimer-engine"] == name
        found = states(url)
        assert (found[name]["state"], found[other]["state"]) == ("ready", "unloaded")
        assert waits(url, name) > 0
        # The list describes the unloaded one, too.
        listed = httpx2.get(f"{url}/v1/models")
        assert listed.status_code == 200, listed.text
        assert found[name]["loads"] == before[name]["loads"] + 1


def test_a_stream_gets_comments_while_its_model_loads(url: str) -> None:
    """A stream whose model loads gets comments with its place, and then its events."""
    text = chat(url, "slow", stream=True).text
    head, _, events = text.partition("data: ")
    # The comments of any silent stream come between them.
    comments = [line for line in head.splitlines() if line not in {"", ": keep-alive"}]
    assert len(comments) >= 3
    assert all(line.startswith(": loading slow for ") for line in comments)
    assert comments[0].endswith("place 1")
    assert events.rstrip().endswith("[DONE]")
    assert '"finish_reason":"length"' in events or '"finish_reason":"stop"' in events


def test_a_plain_request_waits_for_a_limited_time(url: str) -> None:
    """A plain request whose model loads for too long is a 503 that can be sent again."""
    begun = time.monotonic()
    reply = chat(url, "slow")
    assert 0.5 <= time.monotonic() - begun < 5
    assert reply.status_code == 503
    assert 1 <= float(reply.headers["retry-after"]) <= 60
    assert "loading slow" in reply.json()["error"]["message"]
    end = time.monotonic() + 10
    while states(url)["slow"]["state"] != "ready" and time.monotonic() < end:
        time.sleep(0.02)
    assert chat(url, "slow").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_cannot_be_loaded_is_an_error(url: str, stream: bool) -> None:
    """A model that cannot be loaded is a 503 with the reason; the operator sees the log's end."""
    for _ in range(2):
        reply = chat(url, "bad", stream=stream)
        # A stream that has waited for so long that it got a comment ends with the error.
        assert reply.status_code == (200 if reply.text.startswith(": loading bad") else 503)
        assert "exit code 1" in reply.text
        assert '"code":"engine_unavailable"' in reply.text
    bad = states(url)["bad"]
    assert bad["state"] == "failed"
    assert "broken.gguf" in bad["log"]
    # Other models are not affected.
    assert chat(url, "one").status_code == 200


def test_the_command_that_loads_shows_the_engines_last_lines(url: str) -> None:
    """`latimer load` of a model that cannot be loaded prints what its engine wrote last."""
    done = run("load", "bad", url, "--admin-key", KEY)
    assert done.returncode == 1
    reason, title, *lines = done.stderr.splitlines()
    assert reason == "The engine 'bad' could not be loaded: it ended with exit code 1."
    assert title == "The last lines of the engine:"
    assert any("broken.gguf" in line for line in lines)


def test_a_response_whose_model_cannot_be_loaded_ends_with_an_error(url: str) -> None:
    """A streamed response that has waited ends with the event `error`, without a head before it."""
    body = {"model": "late", "input": "Hello", "stream": True}
    reply = httpx2.post(f"{url}/v1/responses", json=body, timeout=60)
    assert reply.status_code == 200
    comment, *_, name, data = reply.text.rstrip().splitlines()
    assert comment.startswith(": loading late")
    assert name == "event: error"
    event = orjson.loads(data.removeprefix("data: "))
    assert (event["type"], event["code"]) == ("error", "engine_unavailable")
    assert "exit code 1" in event["message"]


def test_a_frame_waits_for_its_model(url: str) -> None:
    """Over a WebSocket, which has no comments, a load that fails is one frame with its status."""
    with connect(url.replace("http", "ws", 1) + "/v1/responses", proxy=None) as socket:
        create = {"type": "response.create", "model": "late", "input": "Hello"}
        socket.send(json.dumps(create))
        frame = json.loads(socket.recv(30))
        assert (frame["type"], frame["status"]) == ("error", 503)
        assert "exit code 1" in frame["error"]["message"]
        socket.send(json.dumps({**create, "model": "one", "max_output_tokens": 4}))
        assert json.loads(socket.recv(30))["type"] == "response.created"


def test_engines_end_with_a_killed_server(settings: Path, tmp_path: Path) -> None:
    """The engines of a server that is killed end, and its records are cleared at the next start."""
    with command("--config", str(settings), XDG_STATE_HOME=str(tmp_path)) as (process, url):
        assert chat(url, "one").status_code == 200
        pids = children(tmp_path)
        assert len(pids) == 1
        process.kill()
        process.wait(10)
    end = time.monotonic() + 5
    while any(groups.Group(pid, "", None).members() for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(groups.Group(pid, "", None).members() for pid in pids)
    with running(settings, tmp_path) as (_, url):
        assert not children(tmp_path)
        assert chat(url, "one").status_code == 200
        [pid] = children(tmp_path)
        os.kill(pid, signal.SIGKILL)
        assert chat(url, "one").status_code == 200
        assert children(tmp_path) != {pid}


def test_requests_wait_for_an_engine_that_has_ended(settings: Path, tmp_path: Path) -> None:
    """If an engine on demand is killed, requests that got nothing from it run when it is loaded."""
    long = {"max_tokens": 400, "ignore_eos": True, "stream": True}
    with running(settings, tmp_path) as (_, url), ThreadPoolExecutor(12) as pool:
        assert chat(url, "one").status_code == 200
        [pid] = children(tmp_path)
        # More than it has slots.
        begun = [pool.submit(chat, url, "one", **long) for _ in range(8)]
        waiting = [pool.submit(chat, url, "one", max_tokens=4) for _ in range(4)]
        end = time.monotonic() + 10
        while not states(url)["one"]["running"] and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert [one.result().text for one in waiting if one.result().status_code != 200] == []
        for one in begun:
            text = one.result().text
            assert one.result().status_code == 200, text
            assert "[DONE]" in text or '"error"' in text
        assert children(tmp_path) != {pid}


@pytest.mark.slow
async def test_requests_for_models_that_take_turns_all_end(url: str) -> None:
    """Requests for two models that do not fit together end, also where clients leave early."""
    chance, ended = random.Random(1), 0
    before = await asyncio.to_thread(states, url)

    async def one(http: httpx2.AsyncClient, number: int) -> None:
        nonlocal ended
        await asyncio.sleep(chance.uniform(0, 4))
        body = asked(("one", "two")[number % 2], stream=True)
        timeout = chance.uniform(0, 1) if number % 5 == 0 else 100.0
        try:
            async with asyncio.timeout(timeout):
                reply = await http.post(f"{url}/v1/chat/completions", json=body)
        except TimeoutError:
            assert number % 5 == 0, "a request has waited for too long"
            return
        assert reply.status_code == 200, reply.text
        assert reply.text.rstrip().endswith("[DONE]")
        assert "Hello!" in "".join(
            event["choices"][0]["delta"].get("content", "")
            for event in map(orjson.loads, (x[6:] for x in reply.text.split("\n\n") if '"id"' in x))
            if event["choices"]
        )
        ended += 1

    limits = httpx2.Limits(max_connections=200)
    async with httpx2.AsyncClient(timeout=100, limits=limits) as http:
        await asyncio.gather(*(one(http, number) for number in range(100)))
    assert ended >= 80
    await asyncio.sleep(0.3)
    found = await asyncio.to_thread(states, url)
    assert all(not one["running"] and not one["waiting"] for one in found.values())
    assert 2 <= sum(found[name]["loads"] - before[name]["loads"] for name in ("one", "two")) <= 12


def test_admin_paths_need_the_key(url: str) -> None:
    """No admin path answers without the operator's key."""
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        for method, path in (("GET", ""), ("POST", "/one/load"), ("POST", "/one/drain")):
            reply = httpx2.request(method, f"{url}/admin/engines{path}", headers=headers)
            assert reply.status_code == 401, reply.text
            assert reply.json()["error"]["code"] == "invalid_api_key"


def test_admin_paths_with_another_method(url: str) -> None:
    """An admin path answers another method with OpenAI's error and the method that it has."""
    for method, path, allowed in (("DELETE", "", "GET"), ("GET", "/one/load", "POST")):
        reply = httpx2.request(method, f"{url}/admin/engines{path}", headers=HEADERS)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)
        words = f"Not allowed to {method} on /admin/engines{path}."
        assert reply.json()["error"]["message"].startswith(words)


def latimer(url: str, *arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    """Run a command for the server."""
    return run(*arguments, "--url", url, "--admin-key", key)


def test_the_commands_of_the_operator(url: str) -> None:
    """`latimer ps`, `load`, `unload` and `drain` show and change the engines of a server."""
    assert latimer(url, "load", "one").stderr == "one is ready.\n"
    lines = latimer(url, "ps").stdout.splitlines()
    assert lines[0].split() == [
        "engine",
        "state",
        "models",
        "running",
        "waiting",
        "memory",
        "reason",
    ]
    assert lines[1].split()[:5] == ["one", "ready", "one", "0/2", "0"]
    assert "memory 8.00 GiB" in lines[1]
    assert "not used" not in lines[1]
    assert latimer(url, "unload", "one").stderr == "one is unloaded.\n"
    assert "memory 8.00 GiB (not used)" in latimer(url, "ps").stdout.splitlines()[1]
    assert "runs no requests" in latimer(url, "drain", "two").stderr
    assert states(url)["two"]["state"] == "draining"
    assert chat(url, "two").status_code == 503
    assert latimer(url, "load", "two").stderr == "two is ready.\n"
    assert chat(url, "two").status_code == 200
    # The same for an engine that is loaded.
    assert "runs no requests" in latimer(url, "drain", "two").stderr
    assert latimer(url, "load", "two").stderr == "two is ready.\n"
    failed = latimer(url, "load", "bad")
    assert failed.returncode == 1
    assert "exit code 1" in failed.stderr
    unknown = latimer(url, "drain", "none")
    assert (unknown.returncode, "There is no engine 'none'" in unknown.stderr) == (1, True)
    address = run("ps", f"{url}/v1", LATIMER_ADMIN_KEY=KEY)
    assert (address.returncode, address.stdout[:6]) == (0, "engine")
    wrong = latimer(url, "ps", key="wrong")
    assert (wrong.returncode, "--admin-key" in wrong.stderr) == (1, True)
