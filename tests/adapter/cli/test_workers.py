"""Tests of `latimer serve --workers`: several processes over one port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter.cli.relay import Relay, path_of
from latimer.adapter.cli.server import ENDS
from latimer.adapter.cli.sharing import check_shared, shared
from latimer.adapter.cli.terminal import NO_FILE
from latimer.adapter.cli.worker import REGISTER
from latimer.adapter.errors import LateRequest
from latimer.adapter.limits.config import digest_of
from latimer.adapter.responses.register import Register
from latimer.adapter.settings import Settings
from latimer.adapter.settings_file import WrongSettings
from support.copies import Latimer, run
from support.loops import lost
from support.prometheus import Scrape, scrape
from support.servers import canned, free_port
from support.sounds import HELLO
from support.workers import Running, chat, double, ended, has_ended, streams, workers

LIBRARIES = Path(__file__).parent.parent.parent / "support" / "libraries"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")

# Streams are on connections of their own, so half of them are with each of two workers. The double
# has four slots, so each worker runs four calls at a time.
STREAMS = 8
# What a server says at the end of a drain that waited for nothing.
IDLE = "Latimer ends; no request runs.\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    """Return the address of the double."""
    with double() as address:
        yield address


@pytest.fixture(scope="module")
def server(engine: str) -> Iterator[Running]:
    """Return a server of two workers that no test ends."""
    with workers(engine) as running:
        yield running


@contextlib.asynccontextmanager
async def connections(server: Running, count: int = 4) -> AsyncIterator[list[httpx2.AsyncClient]]:
    """Yield clients with a connection each, which are with both workers in turn."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            client = httpx2.AsyncClient(base_url=server.address, timeout=30)
            found.append(await stack.enter_async_context(client))
            assert (await client.get("/health")).status_code == 200
        yield found


async def test_a_killed_worker_loses_only_its_streams(engine: str) -> None:
    """The streams of a killed worker are cut, others are whole, and another worker starts."""
    with workers(engine) as server:
        found = await streams(server.address, STREAMS, 75)
        at = time.monotonic()
        os.kill(server.pids[0], signal.SIGKILL)
        # Until its last thread has ended, it could get a connection.
        assert server.line(
            rf"^Worker 1 \(process {server.pids[0]}\) was ended by SIGKILL\. "
            r"Another one starts now\.$"
        )
        async with httpx2.AsyncClient(base_url=server.address) as client:
            for _ in range(5):
                reply = await client.post("/v1/chat/completions", json=chat(4, "quick"))
                assert reply.status_code == 200
        # Each of two new connections goes to another worker, so both serve when both are there.
        assert server.line(r"^Worker 1 \(process \d+\) serves again\.$")
        assert time.monotonic() - at < 5
        # The line of the start is not printed again.
        assert sum(line.startswith("Latimer serves") for line in server.lines) == 1
        assert all(await ended(await streams(server.address, 4, 3)))
        whole = await ended(found)
        assert sum(whole) == STREAMS / 2
        assert server.end() == IDLE
        assert server.process.returncode == 0


@pytest.mark.slow
async def test_a_worker_that_hangs_is_replaced(engine: str) -> None:
    """A worker that gives no sign is killed with a line of the log, and another one starts."""
    with workers(engine, before="parent.SILENT = 2") as server:
        (held,) = await streams(server.address, 1, 3_000)
        os.kill(server.pids[0], signal.SIGSTOP)
        name = rf"Worker 1 \(process {server.pids[0]}\)"
        assert server.line(rf"^{name} has given no sign for 2 s\. Latimer ends it\.$")
        assert server.line(rf"^{name} was ended by SIGKILL\. Another one starts now\.$")
        assert server.line(r"^Worker 1 \(process \d+\) serves again\.$")
        assert await ended([held]) == [False]
        async with connections(server):
            pass
        assert server.end() == IDLE


@pytest.mark.slow
async def test_a_server_that_was_suspended_keeps_its_workers(engine: str) -> None:
    """Workers that stop together with their parent, as in a suspended machine, live on."""
    with workers(engine, before="parent.SILENT = 2") as server:
        every = [server.process.pid, *server.pids]
        for pid in every:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(4)
        for pid in every:
            os.kill(pid, signal.SIGCONT)
        async with connections(server):
            pass
        await asyncio.sleep(1.5)
        assert server.end() == IDLE


@pytest.mark.slow
async def test_new_connections_avoid_a_worker_that_hangs(engine: str) -> None:
    """After three seconds without a sign, a worker gets no connection while another one runs."""
    with workers(engine) as server:
        os.kill(server.pids[0], signal.SIGSTOP)
        await asyncio.sleep(5.5)
        async with connections(server, 6):
            pass
        os.kill(server.pids[0], signal.SIGCONT)
        assert server.end() == IDLE


@pytest.mark.slow
async def test_connections_are_shared_evenly(engine: str) -> None:
    """Each of three workers gets a third of the connections, also after some have closed."""
    with workers(engine, count=3) as server:
        first = await streams(server.address, 3, 1)
        assert all(await ended(first))
        found = await streams(server.address, 12, 60)
        os.kill(server.pids[1], signal.SIGKILL)
        assert sum(await ended(found)) == 8


async def test_a_drain_loses_nothing(engine: str) -> None:
    """After SIGTERM the streams of all workers are whole, and the line counts all of them."""
    with workers(engine) as server:
        found = await streams(server.address, STREAMS, 60)
        server.process.send_signal(signal.SIGTERM)
        assert server.line(
            rf"^Latimer waits for {STREAMS} requests, at most 30 s; a second signal stops it\.$"
        )
        host, port = server.address.removeprefix("http://").split(":")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        assert all(await ended(found))
        assert await asyncio.to_thread(server.process.wait, 10) == 0
        assert all(map(has_ended, server.pids))


def test_the_parent_closes_what_it_has_opened(engine: str) -> None:
    """At its end, the parent of workers has no open socket that Python would warn of."""
    with workers(engine, PYTHONWARNINGS="always::ResourceWarning") as server:
        assert server.end() == IDLE


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "new"])
def test_clients_in_a_loop_lose_nothing(engine: str, keeps: bool) -> None:
    """SIGTERM leaves no request without an answer, over kept connections and over new ones."""
    with workers(engine) as server:
        assert not [*lost(server.address, keeps, server.process.terminate)]
        assert server.process.wait(10) == 0


@pytest.mark.timed
@pytest.mark.parametrize("second", [False, True])
async def test_all_workers_say_that_the_server_ends(engine: str, second: bool) -> None:
    """During --shutdown-delay, `/ready` of each worker is a 503, and all serve; a second signal
    ends it."""
    delay = 20 if second else 1
    with workers(engine, "--shutdown-delay", str(delay)) as server:
        async with connections(server) as clients:
            at = time.monotonic()
            server.process.terminate()
            assert server.line(
                f"^Latimer begins to drain in {delay} s, and serves until then; /ready is a 503"
            )
            await asyncio.sleep(0.2)
            for client in clients:
                assert (await client.get("/ready")).status_code == 503
                assert (await client.get("/health")).status_code == 200
        rest = server.end() if second else server.process.communicate(timeout=10)[1]
        assert rest.startswith(ENDS) if second else rest == IDLE
        assert server.process.returncode == 0
        assert second or time.monotonic() - at > 0.9
        assert time.monotonic() - at < 10


def test_a_hangup_without_a_file_is_a_line(engine: str) -> None:
    """SIGHUP without a settings file is a line of the log, and the workers serve on."""
    with workers(engine) as server:
        server.process.send_signal(signal.SIGHUP)
        assert server.line(rf"^{NO_FILE}$")
        assert httpx2.get(f"{server.address}/health").status_code == 200
        assert server.end() == IDLE


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
async def test_a_second_signal_ends_at_once(engine: str, number: signal.Signals) -> None:
    """A second signal ends running streams with an error; the terminal sends Ctrl-C to all."""
    with workers(engine) as server:
        found = await streams(server.address, 4, 1_000)
        if number == signal.SIGINT:
            # As a terminal does; it does not count as a second signal.
            for pid in server.pids:
                os.kill(pid, number)
        server.process.send_signal(number)
        assert server.line(r"^Latimer waits for 4 requests, ")
        before = [one.tokens for one in found]
        await asyncio.sleep(0.2)
        assert all(one.tokens > count for one, count in zip(found, before, strict=True))
        at = time.monotonic()
        assert await asyncio.to_thread(server.end, number) == f"{ENDS}\n"
        assert time.monotonic() - at < 6
        assert server.process.returncode == 0
        assert not any(await ended(found))


async def test_no_worker_outlives_a_killed_parent(engine: str) -> None:
    """All workers end after `kill -9` of their parent, and nothing of them stays in a folder."""
    with workers(engine, "--store", "memory") as server:
        folder = re.search(r"SQLite file (\S+)/store\.db", "".join(server.lines))
        assert folder is not None
        found = await streams(server.address, 4, 1_000)
        server.process.kill()
        assert all(map(has_ended, server.pids))
        assert not any(await ended(found))
        assert not await asyncio.to_thread(os.path.exists, folder[1])


@pytest.mark.slow
async def test_a_worker_that_is_asked_to_end_is_drained(engine: str) -> None:
    """SIGTERM for one worker lets its streams end, and another worker takes its place."""
    with workers(engine) as server:
        found = await streams(server.address, STREAMS, 50)
        os.kill(server.pids[1], signal.SIGTERM)
        assert all(await ended(found))
        assert server.line(r"^Worker 2 \(process \d+\) ended after its drain\. Another one starts")
        assert server.end() == IDLE


def key(name: str) -> str:
    """Return the table of a key."""
    return f'[keys.{name}]\ndigest = "{digest_of(name)}"\n'


@pytest.mark.slow
async def test_all_workers_read_the_settings_again(engine: str, tmp_path: Path) -> None:
    """SIGHUP changes the keys in all workers, also in one that starts later, and loses nothing."""
    file = tmp_path / "latimer.toml"
    file.write_text(key("one"))
    with workers(engine, "--config", str(file)) as server:
        found = await streams(server.address, STREAMS, 75, authorization="Bearer one")
        file.write_text("queue = 3\n" + key("two"))
        server.process.send_signal(signal.SIGHUP)
        assert server.line(r"^Latimer has read .*: key two added, key one removed\.$")
        assert server.line(r"^Start the server again to change: queue\.$")

        async def statuses() -> set[tuple[int, int]]:
            seen = set()
            async with connections(server) as clients:
                for client in clients:
                    replies = [
                        await client.post(
                            "/v1/chat/completions",
                            json=chat(1, "quick"),
                            headers={"authorization": f"Bearer {name}"},
                        )
                        for name in ("one", "two")
                    ]
                    seen.add((replies[0].status_code, replies[1].status_code))
            return seen

        until = time.monotonic() + 5
        while await statuses() != {(401, 200)}:
            assert time.monotonic() < until
        assert all(await ended(found))
        # What a new worker gets is valid, and not what the file says meanwhile.
        file.write_text("queue = ")
        os.kill(server.pids[0], signal.SIGKILL)
        assert server.line("was ended by SIGKILL")
        await asyncio.sleep(1)
        assert await statuses() == {(401, 200)}


@pytest.mark.slow
async def test_the_operator_acts_on_all_workers(engine: str, tmp_path: Path) -> None:
    """The operator sees the requests of all workers, and a drain holds for a later worker, too."""
    file = tmp_path / "fleet.toml"
    file.write_text(f'admin_key = "operator"\n[engines.fake]\nurl = "{engine}"\n')

    async def ask(verb: str, *way: str) -> str:
        words = ["latimer", verb, "fake", *way]
        process = await asyncio.create_subprocess_exec(*words, stderr=subprocess.PIPE)
        return (await process.communicate())[1].decode()

    async def statuses(server: Running) -> set[int]:
        found, url = set(), f"{server.address}/v1/chat/completions"
        async with contextlib.AsyncExitStack() as stack:
            # Open connections are with both workers in turn.
            for _ in range(4):
                client = await stack.enter_async_context(httpx2.AsyncClient(timeout=30))
                found.add((await client.post(url, json=chat(1, "quick"))).status_code)
        return found

    path = str(tmp_path / "admin.sock")
    with workers("--config", str(file), "--admin-socket", path) as server:
        keyed = ("--admin-key", "operator", "--url", server.address)
        # They take a minute, so that they run for as long as a busy machine needs to look.
        found = await streams(server.address, 4, 3_000)
        # Whichever worker gets the request.
        async with connections(server, 2) as clients:
            for client in clients:
                client.headers["authorization"] = "Bearer operator"
                (row,) = (await client.get("/admin/engines")).json()["data"]
                assert (row["id"], row["state"], row["running"]) == ("fake", "ready", 4)
        for one in found:
            one.task.cancel()
        found = await streams(server.address, 4, 50)
        assert "fake runs no requests" in await ask("drain", *keyed)
        assert all(await ended(found))
        assert await statuses(server) == {503}
        # The first worker serves the socket.
        os.kill(server.pids[0], signal.SIGKILL)
        assert server.line("serves again")
        assert await statuses(server) == {503}
        assert "fake is ready" in await ask("load", "--socket", path)
        assert await statuses(server) == {200}
        assert "cannot be unloaded" in await ask("unload", *keyed)
        async with httpx2.AsyncClient(base_url=server.address) as client:
            # One worker refuses a request, and no other one counts it.
            for method, key, status in (
                ("POST", "wrong", 401), ("POST", "operator", 404), ("GET", "operator", 405),
            ):  # fmt: skip
                client.headers["authorization"] = f"Bearer {key}"
                reply = await client.request(method, "/admin/engines/none/drain")
                assert reply.status_code == status
                assert reply.headers["content-type"] == "application/json"
                assert reply.headers["x-request-id"].startswith("req_")
                counted = await scrape(client)
                assert counted.sum("latimer_requests_total", status=str(status)) == 1
        server.end()
    lines = "".join(server.lines)
    # The worker that the operator reached logs it.
    assert lines.count("the operator asked for engine fake: drain") == 1


@pytest.mark.slow
async def test_the_operator_does_not_wait_for_a_worker_that_hangs(
    engine: str, tmp_path: Path
) -> None:
    """A worker that does not answer within a second is named; a drain waits for the next one."""
    file, path = tmp_path / "fleet.toml", tmp_path / "admin.sock"
    file.write_text(f'[engines.fake]\nurl = "{engine}"\n')
    with workers("--config", str(file), "--admin-socket", str(path)) as server:
        os.kill(server.pids[1], signal.SIGSTOP)
        transport = httpx2.AsyncHTTPTransport(uds=str(path))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            begun = time.monotonic()
            found = (await client.get("/admin/engines")).json()
            assert 0.9 < time.monotonic() - begun < 2
            assert found["silent_workers"] == [2]
            assert [one["state"] for one in found["data"]] == ["ready"]
            listed = await asyncio.to_thread(run, "ps", "--socket", str(path))
            assert listed.stderr == "Worker 2 does not answer. Its requests are not counted.\n"
            draining = asyncio.create_task(
                asyncio.to_thread(run, "drain", "fake", "--socket", str(path))
            )
            await asyncio.sleep(3)
            assert not draining.done()
            os.kill(server.pids[1], signal.SIGKILL)
            assert server.line("serves again")
            said = (await draining).stderr
            assert said.startswith(
                "Worker 2 does not answer. Its requests are not counted.\nfake runs no"
            )
            assert "silent_workers" not in (await client.get("/admin/engines")).json()


LIMITED = key("one") + "requests_per_minute = 5\n"
RESPONSE: dict[str, Any] = {"model": "fake", "input": "paced", "background": True}


async def test_a_background_response_is_found_through_any_worker(server: Running) -> None:
    """A response in the background is retrieved, streamed and cancelled over every connection."""
    async with connections(server) as clients:
        body = {**RESPONSE, "max_output_tokens": 1_000}
        made = (await clients[0].post("/v1/responses", json=body)).json()
        path = f"/v1/responses/{made['id']}"
        for client in clients:
            reply = await client.get(path)
            assert reply.status_code == 200
            assert reply.json()["status"] in ("queued", "in_progress")
            continued = await client.post(
                "/v1/responses", json={**RESPONSE, "previous_response_id": made["id"]}
            )
            assert continued.status_code == 400
            assert "cannot be continued: its status is " in continued.text
        reading = [
            asyncio.create_task(client.get(path, params={"stream": "true"})) for client in clients
        ]
        await asyncio.sleep(0.2)
        async with connections(server, 2) as others:
            for client in others:
                reply = await client.post(f"{path}/cancel")
                assert reply.json()["status"] == "cancelled", reply.text
        texts = {(await one).text for one in reading}
        assert len(texts) == 1
        assert texts.pop().startswith("event: response.created\n")
        for client in clients:
            assert (await client.get(path)).json()["status"] == "cancelled"
        assert (await clients[1].delete(path)).json()["deleted"]
        for client in clients:
            assert (await client.get(path)).status_code == 404


async def test_a_request_that_is_passed_on_has_its_client(engine: str) -> None:
    """The worker that answers for another one logs the client's address, which nobody can forge."""
    with workers(engine, "--log-format", "json", "--log-requests") as server:
        async with connections(server) as clients:
            made = (await clients[0].post("/v1/responses", json=RESPONSE)).json()
            path = f"/v1/responses/{made['id']}"
            for client in clients:
                await client.get(path, headers={"x-forwarded-for": "10.1.2.3"})
        events = [json.loads(line) for line in server.end().splitlines()]
    found = [one["client"] for one in events if one.get("path") == path]
    assert found == ["127.0.0.1"] * 4


async def test_a_request_that_is_passed_on_has_to_arrive(tmp_path: Path) -> None:
    """A request for other workers whose body does not arrive gets a 408, as any other."""

    async def receive() -> Any:
        raise LateRequest

    async def send(message: Any) -> None:
        sent.append(message)

    sent: list[Any] = []
    (tmp_path / REGISTER).mkdir()
    relay = Relay(send, Register(tmp_path / REGISTER, 0), tmp_path, 0)  # type: ignore[arg-type]
    await relay({"type": "http", "path": "/admin/engines", "headers": []}, receive, send)
    start, body = sent
    assert start["status"] == 408
    assert json.loads(body["body"])["error"]["code"] == "request_timeout"


async def test_connections_wait_for_workers_with_too_many_open_files(engine: str) -> None:
    """Workers with too many files lose no connection: each is served when others have closed. The
    log says why it waits, the parent does not spin, and engines can be reached meanwhile."""
    before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))"
    with workers(engine, before=before) as server, contextlib.ExitStack() as stack:
        async with connections(server, 2) as kept:
            place = "127.0.0.1", int(server.address.rpartition(":")[2])
            clients = [stack.enter_context(socket.create_connection(place)) for _ in range(160)]
            for client in clients:
                client.settimeout(20)
                client.sendall(b"GET /nothing HTTP/1.1\r\nhost: localhost\r\n\r\n")
            line = r"^worker \d: Latimer has too many open files, and new connections go to other w"
            assert server.line(line)
            begun = cpu_of(server.process.pid)
            for one in kept:
                assert (await one.post("/v1/chat/completions", json=chat(4))).status_code == 200
            await asyncio.sleep(1)
            assert cpu_of(server.process.pid) - begun < 0.5
        for client in clients:
            assert client.recv(12) == b"HTTP/1.1 404"
            client.close()
        assert not re.search(r"worker (\d): Latimer has too many(?s:.*)worker \1: L", server.end())


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_any_number_of_requests_are_passed_on(tmp_path: Path) -> None:
    """A worker passes on more requests at a time than a client's usual 100 connections."""
    count, folder = 120, tmp_path / REGISTER
    folder.mkdir()
    (folder / "resp_1").write_bytes(b'{"worker": 1}')
    have_come = asyncio.Semaphore(0)

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        have_come.release()
        await reader.read()
        writer.close()

    async def receive() -> Any:
        return {"type": "http.request"}

    async def fail(*_: Any) -> None:
        raise AssertionError

    scope: Any = {
        "type": "http", "method": "POST", "path": "/v1/responses/resp_1/cancel", "headers": [],
        "raw_path": b"/v1/responses/resp_1/cancel", "query_string": b"", "client": None,
    }  # fmt: skip
    server = await asyncio.start_unix_server(hold, path_of(tmp_path, 1))
    relay = Relay(fail, Register(folder, 0), tmp_path, 0)
    held = [asyncio.ensure_future(relay(scope, receive, fail)) for _ in range(count)]
    async with asyncio.timeout(20):
        for _ in range(count):
            await have_come.acquire()
    for one in held:
        one.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await relay.aclose()
    server.close()
    # The other ends of the connections.
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("store", [True, False], ids=["stored", "not stored"])
async def test_a_background_response_of_a_killed_worker_fails(engine: str, store: bool) -> None:
    """A response whose worker is killed is `failed` with the reason, through every worker."""
    with workers(engine) as server:
        async with connections(server, 2) as clients:
            body = {**RESPONSE, "max_output_tokens": 1_000, "store": store}
            made = (await clients[0].post("/v1/responses", json=body)).json()
            path = f"/v1/responses/{made['id']}"
            # The first connection was given to the first worker.
            os.kill(server.pids[0], signal.SIGKILL)
            assert server.line("serves again")
            async with connections(server) as others:
                replies = [await client.get(path) for client in others]
            for reply in replies:
                assert reply.json()["status"] == "failed", reply.text
                assert reply.json()["error"] == {
                    "code": "server_error",
                    "message": "The process that generated the response was killed. Send the "
                    "request again.",
                }


async def test_what_is_stored_is_found_through_any_worker(server: Running) -> None:
    """A stored completion or response is found at once over every connection, and can go on."""
    async with connections(server) as clients:
        for _ in range(5):
            body = chat(4, "quick", store=True)
            made = (await clients[0].post("/v1/chat/completions", json=body)).json()
            response = {"model": "fake", "input": "quick", "max_output_tokens": 16}
            first = (await clients[1].post("/v1/responses", json=response)).json()
            for client in clients:
                reply = await client.get(f"/v1/chat/completions/{made['id']}")
                assert reply.status_code == 200
                listed = (await client.get("/v1/chat/completions")).json()["data"]
                assert made["id"] in [one["id"] for one in listed]
                reply = await client.post(
                    "/v1/responses", json={**response, "previous_response_id": first["id"]}
                )
                assert reply.status_code == 200, reply.text


@pytest.fixture
def voice(tmp_path: Path) -> Path:
    """Return the file of a voice, for the stand-in for Piper."""
    file = tmp_path / "anna.onnx"
    file.write_bytes(b"onnx")
    config = {"language": {"family": "hu"}, "inference": {"length_scale": 1}}
    Path(f"{file}.json").write_text(json.dumps(config))
    return file


@pytest.mark.slow
async def test_workers_speak_and_transcribe(engine: str, voice: Path) -> None:
    """Each has its own library, and the id of an answer's audio is known to all until it goes."""
    speech = "--speech", f"piper:{voice}", "--transcription", "faster-whisper:base"
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": "anna", "format": "wav"}}
    with workers(engine, *speech, PYTHONPATH=str(LIBRARIES)) as server:
        async with connections(server) as clients:
            form = {"model": "whisper-1", "prompt": "Hello."}
            path = "/v1/audio/transcriptions"
            heard = [
                client.post(path, data=form, files={"file": HELLO}, timeout=60)
                for client in clients
            ]
            assert [one.json()["text"] for one in await asyncio.gather(*heard)] == ["Hello."] * 4
            for store in (False, True):
                made = await clients[0].post(CHAT, json=chat(4, "quick", store=store, **spoken))
                audio = made.json()["choices"][0]["message"]["audio"]
                again = chat(1, "quick")
                again["messages"].insert(0, {"role": "assistant", "audio": {"id": audio["id"]}})
                for client in clients:
                    assert (await client.post(CHAT, json=again)).status_code == 200
            assert (await clients[1].delete(f"{CHAT}/{made.json()['id']}")).status_code == 200
            gone = [(await client.post(CHAT, json=again)).status_code for client in clients]
            assert gone == [400] * 4
        assert server.end() == IDLE


async def test_limits_hold_over_all_workers(engine: str, redis_url: str, tmp_path: Path) -> None:
    """A key with limits in Redis has as many requests over two workers as over one."""
    config = tmp_path / "latimer.toml"
    config.write_text(
        f'[engines.a]\nurl = "{engine}"\n[models.fake]\nengines = ["a"]\n'
        f'[admission]\nstore = "{redis_url}"\n{LIMITED}'
    )
    with workers("--config", str(config)) as server:
        async with connections(server) as clients:
            statuses = []
            for _ in range(3):
                for client in clients:
                    reply = await client.post(
                        "/v1/chat/completions",
                        json=chat(1, "quick"),
                        headers={"authorization": "Bearer one"},
                    )
                    statuses.append(reply.status_code)
        assert statuses == [200] * 5 + [429] * 7
        assert server.end() == IDLE


CHAT = "/v1/chat/completions"


async def send(clients: list[httpx2.AsyncClient], tokens: int) -> None:
    """Send a request of some tokens over each connection."""
    for client in clients:
        assert (await client.post(CHAT, json=chat(tokens, "quick"))).status_code == 200


def sums(found: Scrape) -> tuple[float, ...]:
    """Return the numbers of requests, of tokens, and of values in two histograms."""
    return (
        found.sum("latimer_requests_total", endpoint=CHAT, status="200"),
        found.sum("latimer_generation_tokens_total"),
        found.sum("latimer_e2e_request_latency_seconds_count"),
        found.sum("latimer_request_generation_tokens_bucket", le="5.0"),
    )


async def test_metrics_are_the_sums_of_all_workers(engine: str) -> None:
    """Every connection shows the same sums, which are exact also after a kill and a drain."""
    with workers(engine) as server:
        async with connections(server) as clients:
            for client in clients:
                found = await scrape(client)
                assert found.sum("latimer_requests_total", endpoint=CHAT, status="503") == 0
            await send(clients, 4)
            await send(clients[:1], 8)
            for client in clients:
                assert sums(await scrape(client)) == (5, 24, 5, 4)
            # The first connection was given to the first worker. What was shown is kept.
            os.kill(server.pids[0], signal.SIGKILL)
            assert sums(await scrape(clients[1])) == (5, 24, 5, 4)
            assert server.line(r"^Worker 1 \(process \d+\) serves again\.$")
            assert sums(await scrape(clients[3])) == (5, 24, 5, 4)
        async with connections(server) as clients:
            await send(clients, 5)
            # Nobody has seen these before the drain.
            os.kill(server.pids[1], signal.SIGTERM)
            assert server.line(r"^Worker 2 \(process \d+\) serves again\.$")
        async with connections(server) as clients:
            running = await streams(server.address, 4, 100)
            for client in clients:
                found = await scrape(client)
                assert sums(found)[0] == 9
                assert sums(found)[1] > 44
                assert found.sum("latimer_num_requests_running") == 4
                assert found.sum("latimer_engine_state") == 1
                assert found.sum("latimer_engine_state", state="ready") == 1
                assert found.sum("latimer_build_info") == 1
            for one in running:
                one.task.cancel()


@pytest.mark.slow
async def test_metrics_do_not_wait_for_a_worker_that_hangs(engine: str) -> None:
    """A scrape shows the last numbers of a worker that hangs, and of one that was killed."""
    with workers(engine) as server:
        async with connections(server) as clients:
            await send(clients, 4)
            await asyncio.sleep(1.5)
            os.kill(server.pids[0], signal.SIGSTOP)
            begun = time.monotonic()
            assert sums(await scrape(clients[1])) == (4, 16, 4, 4)
            assert 0.9 < time.monotonic() - begun < 2
            os.kill(server.pids[0], signal.SIGKILL)
            assert server.line("serves again")
            assert sums(await scrape(clients[1])) == (4, 16, 4, 4)


def failing(*arguments: str, **environment: str) -> tuple[int, str]:
    """Return the exit code and the output of `latimer serve` that does not start."""
    found = run("serve", *arguments, **environment)
    return found.returncode, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("foo://127.0.0.1",),
        ("http://127.0.0.1:1", "--host", "nowhere.invalid"),
        ("http://127.0.0.1:1", "--logit-bias-vocabulary", "none"),
        ("http://127.0.0.1:1", "--store", "/nowhere/latimer.db"),
        ("http://127.0.0.1:1", "--queue", "many"),
    ],
    ids=["address", "host", "vocabulary", "store", "value"],
)
def test_errors_at_the_start_appear_once(arguments: tuple[str, ...]) -> None:
    """An error at the start has the same lines and exit code with workers as without."""
    # Lines of JSON have a time.
    words = (*arguments, "--port", "0", "--log-format", "text")
    one = failing(*words)
    assert failing(*words, "--workers", "3") == one
    assert one[0] in (2, 3)


def test_a_port_in_use_is_said_once() -> None:
    """A port that another process listens on is one error, with exit code 3."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, text = failing("http://127.0.0.1:1", "--port", port, "--workers", "2")
    assert code == 3
    assert text.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use." in text


@pytest.mark.parametrize(
    ("flags", "file", "reason"),
    [
        ({}, "", "the model runs in Latimer's own process. Serve it with llama-server"),
        ({"model": "http://x", "backend": "koboldcpp"}, "", "koboldcpp runs one call at a time"),
        ({"model": "http://x"}, LIMITED, "Count them in Redis or PostgreSQL (store in the table"),
        ({}, '[engines.a]\nfile = "a.gguf"\n', "engines.a runs in Latimer's own process."),
        (
            {},
            '[engines.a]\ncommand = ["llama-server", "--port", "{port}"]\nmemory = "1GiB"\n',
            "engines.a is loaded and unloaded by Latimer",
        ),
    ],
    ids=["in process", "koboldcpp", "limits", "file", "command"],
)
def test_what_one_process_owns_is_refused(
    flags: dict[str, Any], file: str, reason: str, tmp_path: Path
) -> None:
    """Settings that only one process can serve are refused, with what to do instead."""
    config = tmp_path / "latimer.toml"
    config.write_text(file)
    settings = Settings.load(config, workers=2, **flags)
    with pytest.raises(WrongSettings) as error:
        check_shared(settings)
    assert str(error.value).startswith("--workers: ")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("file", "what"), [("", "the model"), ('[engines.a]\nfile = "a.gguf"\n', "engines.a")]
)
def test_a_llama_server_for_a_file_has_one_owner(
    file: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file for which Latimer starts a llama-server is refused, and not called in process."""
    config = tmp_path / "latimer.toml"
    config.write_text(file)
    monkeypatch.setattr("latimer.adapter.engines.find_spec", lambda _name: None)
    monkeypatch.setattr("latimer.adapter.engines.find_program", lambda: ["llama-server"])
    settings = Settings.load(config, workers=2)
    with pytest.raises(WrongSettings) as error:
        check_shared(settings)
    assert str(error.value) == (
        f"--workers: {what} is served by a llama-server that Latimer starts, which only one "
        "process can do. Start a llama-server yourself, and start the workers in front of its "
        "address, such as http://127.0.0.1:8080."
    )


SHARED = """
[engines.a]
url = "http://127.0.0.1:1"
[models.m]
engines = ["a"]
queue = 7
[admission]
store = "redis://127.0.0.1"
"""


def test_what_several_processes_share_is_accepted(tmp_path: Path) -> None:
    """Limits in Redis and engines at URLs are served, with one secret, store and queue of all."""
    config = tmp_path / "latimer.toml"
    config.write_text(SHARED + LIMITED)
    settings = Settings.load(config, workers=3)
    check_shared(settings)
    own = shared(settings, tmp_path)
    assert own.reasoning_key is not None
    place = own.store_place()
    assert place is not None
    assert (place.kind, place.target) == ("sqlite", str(tmp_path / "store.db"))
    assert (place.age, place.size) == (24 * 3600, 64 << 20)
    again = own.reloaded()
    assert (again.store, again.reasoning_key) == (own.store, own.reasoning_key)
    assert own.share_of(7) == 3
    assert own.arguments("llama-server")["max_waiting"] == 342


@pytest.mark.slow
def test_a_koboldcpp_that_runs_is_refused() -> None:
    """An engine that turns out to be koboldcpp is refused at the start, with exit code 3."""
    version = b'{"result": "KoboldCpp", "version": "1.115"}'
    with canned({"/api/extra/version": (200, version)}) as (address, _):
        code, text = failing(address, "--workers", "2", "--port", "0")
        assert code == 3
        assert f"Latimer cannot start: {address}: koboldcpp runs one call at a time" in text
        table = run("check", address, "--workers", "2")
        assert table.returncode == 1
        assert f"workers    no: {address}: koboldcpp runs one call" in table.stdout


@pytest.mark.slow
def test_check_says_how_many_workers_run(engine: str) -> None:
    """The table of `latimer check` has the number of workers."""
    table = run("check", engine, LATIMER_WORKERS="3")
    assert re.search(r"^workers +3$", table.stdout, re.MULTILINE), table.stdout


@pytest.mark.slow
def test_a_signal_before_the_first_worker_ends_the_server(tmp_path: Path) -> None:
    """A server that waits for its engine ends at once after SIGTERM, with exit code 143."""
    process: Latimer[str] = Latimer(
        ["latimer", "serve", f"http://127.0.0.1:{free_port()}", "--wait", "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LATIMER_PORT": "0", "LATIMER_STORE": str(tmp_path / "a.db")},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "Latimer waits for the engine before it accepts requests." in line:
            break
    process.terminate()
    assert process.wait(10) == 143
    process.communicate()


@pytest.mark.slow
async def test_a_worker_that_cannot_run_gets_pauses(engine: str) -> None:
    """A worker that ends again and again starts after longer pauses, and others serve."""
    with workers(engine) as server:
        pauses = []
        pid = server.pids[1]
        for _ in range(3):
            os.kill(pid, signal.SIGKILL)
            pauses.append(server.line(r"^Worker 2 .* Another one starts (now|in \S+ s)\.$")[1])
            reply = httpx2.post(f"{server.address}/v1/chat/completions", json=chat(2, "quick"))
            assert reply.status_code == 200
            pid = int(server.line(r"^Worker 2 \(process (\d+)\) serves again\.$")[1])
        assert pauses == ["now", "in 0.5 s", "in 1 s"]
