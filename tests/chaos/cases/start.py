"""Cases of start and end: exit codes, messages, a missing engine, and running requests."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from support.engines.wire import Engine

from chaos.case import (
    COMPLETIONS,
    FAKE_SERVER,
    FAKES,
    GONE,
    INSIDE,
    REAL,
    RIGHT,
    SILENT,
    Act,
    Case,
)
from chaos.client import Client, ask, get, post
from chaos.judge import error_of, judge
from chaos.process import BAD, Latimer
from chaos.stage import PROMPTS, Stage

START, SILENCE = "start and end", "10 silence"
SECRET = "s3cr3t-of-nobody"
USAGE, FAILED, EITHER = frozenset({2}), frozenset({3}), frozenset({2, 3})


def fails(
    words: Sequence[str],
    codes: frozenset[int],
    files: Mapping[str, bytes] | None = None,
    **environment: str,
) -> Act:
    """Return an act that expects invalid settings to end with one clear line and the right code.

    Args:
        words: the arguments; `DIR` is a folder with the files, `PORT` a port in use.
        codes: the allowed exit codes.
        files: the contents of files in `DIR`, by name.
        environment: additional environment variables.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            for name, data in (files or {}).items():
                (Path(folder) / name).write_bytes(data)
            port = str(taken.getsockname()[1])
            given = [word.replace("DIR", folder).replace("PORT", port) for word in words]
            return await _failed(given, codes, environment)

    return act


async def _failed(
    words: Sequence[str], codes: frozenset[int], environment: Mapping[str, str]
) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        "latimer", "serve", *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, "LATIMER_PORT": "0", **environment},
    )  # fmt: skip
    try:
        async with asyncio.timeout(20):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
        return [f"it does not end: {output[-500:]!r}"]
    found = []
    if process.returncode not in codes:
        found.append(f"exit code {process.returncode}, not {sorted(codes)}: {output[-500:]!r}")
    if BAD.search(output):
        found.append(f"a traceback: {output[-500:]!r}")
    if b"serves" in output:
        found.append(f"it says that it serves: {output[-500:]!r}")
    if SECRET.encode() in output:
        found.append(f"it prints a secret: {output[-500:]!r}")
    if len(output) > 3000 or not output.strip():
        found.append(f"a message of {len(output)} bytes: {output[:300]!r}")
    return found


def _starts() -> Iterator[Case]:
    nested = b"a = " + b"[" * 100_000
    tables = b"[" + b"a." * 20_000 + b"b]\nc = 1"
    secret = f'api_key = {{ a = "{SECRET}" }}'.encode()
    acts: dict[str, Act] = {
        "port in use": fails(["--port", "PORT"], FAILED),
        "port beyond 65535": fails(["--port", "70000"], USAGE),
        "port a word": fails(["--port", "x"], USAGE),
        "host of nobody": fails(["--host", "999.1.1.1"], FAILED),
        "host of another machine": fails(["--host", "192.0.2.1"], FAILED),
        "host of bytes": fails(["--host", "a\x07" + "b" * 300], EITHER),
        "host empty label": fails(["--host", "a..b"], EITHER),
        "address without a host": fails(["http://"], EITHER),
        "address with a large port": fails(["http://127.0.0.1:99999"], EITHER),
        "address with a bad bracket": fails(["http://[::1"], EITHER),
        "address with a line end": fails(["http://127.0.0.1\r\nX: y/"], EITHER),
        "address with spaces": fails(["http://a b/"], EITHER),
        "model missing": fails(["/nowhere/model.gguf"], FAILED),
        "model a folder": fails(["DIR"], FAILED),
        "model empty": fails(["DIR/m.gguf"], FAILED, {"m.gguf": b""}),
        "model garbage": fails(["DIR/m.gguf"], FAILED, {"m.gguf": os.urandom(4096)}),
        "model cut": fails(["DIR/m.gguf"], FAILED, {"m.gguf": b"GGUF\x03\0\0\0" + b"\xff" * 64}),
        "lora missing": fails(["--lora", "/nowhere/a.gguf"], FAILED),
        "lora scale": fails(["--lora", "a=b"], USAGE),
        "mmproj missing": fails(["--mmproj", "/nowhere/a.gguf"], FAILED),
        "config missing": fails(["--config", "/nowhere/a.toml"], USAGE),
        "config a folder": fails(["--config", "DIR"], USAGE),
        "config no TOML": fails(["--config", "DIR/a"], USAGE, {"a": b"= ="}),
        "config binary": fails(["--config", "DIR/a"], USAGE, {"a": bytes(range(256))}),
        "config nested": fails(["--config", "DIR/a"], USAGE, {"a": nested}),
        "config tables": fails(["--config", "DIR/a"], USAGE, {"a": tables}),
        "config unknown": fails(["--config", "DIR/a"], USAGE, {"a": b"nonsense = 1"}),
        "config number of digits": fails(
            ["--config", "DIR/a"], USAGE, {"a": b"port = " + b"9" * 5000}
        ),
        "config with a secret in a wrong place": fails(["--config", "DIR/a"], USAGE, {"a": secret}),
        "config with a secret of a wrong type": fails(
            ["--config", "DIR/a"], USAGE, {"a": f'engine_key = ["{SECRET}"]'.encode()}
        ),
        "key file missing": fails(["--api-key-file", "/nowhere/k"], USAGE),
        "key file a folder": fails(["--api-key-file", "DIR"], USAGE),
        "key file of bytes": fails(["--api-key-file", "DIR/k"], EITHER, {"k": b"\xff\xfe\x80"}),
        "key with a line end": fails(["--api-key", f"{SECRET}\r\nX: y"], EITHER),
        "engine key with a line end": fails(
            ["http://127.0.0.1:9", "--engine-key", f"{SECRET}\r\nX: y"], EITHER
        ),
        "engine key with a line end, environment": fails(
            ["http://127.0.0.1:9"], EITHER, LATIMER_ENGINE_KEY=f"{SECRET}\nX: y"
        ),
        "environment wrong": fails([], USAGE, LATIMER_PARALLEL="many"),
        "parallel 0": fails(["--parallel", "0"], USAGE),
        "context large": fails(["--context", str(10**12)], EITHER),
        "context of 500 digits": fails(["--context", "9" * 500], EITHER),
        "vocabulary unknown": fails(["--logit-bias-vocabulary", "nobody"], EITHER),
        "backend without a URL": fails(["--backend", "koboldcpp"], EITHER),
    }
    short = {"port in use", "config nested", "engine key with a line end"}
    for name, act in acts.items():
        yield Case(
            name=name, kind=START, engines=(INSIDE,), act=act, alone=True, short=name in short
        )


def _lives() -> Iterator[Case]:
    def case(name: str, act: Act, engines: tuple[str, ...] = FAKES, short: bool = False) -> Case:
        return Case(name=name, kind=START, engines=engines, act=act, alone=True, short=short)

    yield case("before the engine", _before(()), short=True)
    yield case("before the engine, told which", _before(("--backend",)))
    yield case("waiting for the engine", _waiting)
    for where in ("/dev/full", "closed"):
        yield case(f"stderr {where}", _without_stderr(where), (FAKE_SERVER,), where == "closed")
    drained = (*FAKES, INSIDE)
    yield case("SIGTERM while idle", _drained(None), drained)
    yield case("SIGTERM while a request runs", _drained({}), drained)
    yield case("SIGTERM while a stream runs", _drained({"stream": True}), drained, short=True)
    for way, streams in ("", False), (" while streaming", True):
        yield Case(
            name=f"SIGTERM to a real llama-server{way}", kind=SILENCE, engines=(REAL,),
            act=_engine_ends(streams), alone=True,
        )  # fmt: skip


@asynccontextmanager
async def _without_engine(stage: Stage, *words: str) -> AsyncIterator[tuple[Latimer, Engine]]:
    """Yield a Latimer that was not started, for an engine that does not listen yet."""
    assert stage.fake is not None
    fake = type(stage.fake)()
    await fake.start()
    await fake.stop()
    latimer = Latimer([fake.url, "--any-model", *words])
    try:
        yield latimer, fake
    finally:
        await latimer.stop()
        await fake.stop()


def _before(more: Sequence[str]) -> Act:
    """Return an act that starts without an engine, and expects 503 until the engine runs."""

    async def act(stage: Stage, case: Case) -> list[str]:
        backend = [*more, stage.engine.removeprefix("fake-")] if more else []
        async with _without_engine(stage, *backend) as (latimer, fake):
            try:
                await latimer.start(ready=False, seconds=15)
            except AssertionError as error:
                return [f"it does not start before its engine: {error}"]
            found = []
            body = {"model": "m", "prompt": "echo:there", "max_tokens": 16}
            for request in (post(COMPLETIONS, body), get("/health"), get("/v1/models")):
                found += judge(await ask(latimer.port, request, 5), frozenset({503}))
            await fake.start()
            end = time.monotonic() + 10
            while (reply := await ask(latimer.port, post(COMPLETIONS, body))).status != 200:
                if time.monotonic() > end:
                    return [*found, f"10 s after the engine came: {reply}"]
                await asyncio.sleep(0.1)
            reply.wanted = "there"
            return found + judge(reply, RIGHT) + latimer.fresh_problems()

    return act


async def _waiting(stage: Stage, case: Case) -> list[str]:
    """Check that `--wait` announces the server only when its engine is ready."""
    async with _without_engine(stage, "--wait") as (latimer, fake):
        starting = asyncio.create_task(latimer.start(seconds=20))
        try:
            await asyncio.sleep(2)
            if starting.done():
                return [f"it did not wait: {starting.exception() or latimer.output()!r}"]
            if b"Latimer serves" in latimer.output():
                return ["it says that it serves before its engine is there"]
            await fake.start()
            await starting
            return latimer.fresh_problems()
        except AssertionError as error:
            return [str(error)]
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)


def _without_stderr(where: str) -> Act:
    """Return an act that serves without a usable stderr."""

    async def act(stage: Stage, case: Case) -> list[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        target = "2>&-" if where == "closed" else f"2>{where}"
        command = f"exec latimer serve {stage.url} --any-model --port {port} {target}"
        process = await asyncio.create_subprocess_exec("sh", "-c", command)
        try:
            end = time.monotonic() + 15
            body = {"model": "m", "prompt": "echo:there", "max_tokens": 16}
            while (await ask(port, get("/health"), 2)).status != 200:
                if time.monotonic() > end or process.returncode is not None:
                    return [f"it does not serve; exit code {process.returncode}"]
                await asyncio.sleep(0.1)
            found = []
            # A request that causes a log line.
            await ask(port, b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", 2)
            for _ in range(3):
                reply = await ask(port, post(COMPLETIONS, body), 5)
                found += [] if reply.status == 200 else [f"a request fails: {reply}"]
            process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), 10)
            return found + ([] if code == 0 else [f"exit code {code}"])
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    return act


def _drained(fields: Mapping[str, object] | None) -> Act:
    """Return an act that sends SIGTERM with a drain of one second.

    Running requests get a 503, and the exit code is 0.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        latimer = Latimer([*stage.words(), "--drain", "1"])
        await latimer.start()
        found = []
        prompt = "endless slow:20" if stage.fake else PROMPTS[0]
        body = {"model": "m", "prompt": prompt, "max_tokens": 3000, "ignore_eos": True}
        request = post(COMPLETIONS, {**body, **(fields or {})})
        client = await Client.to(latimer.port, request)
        try:
            if fields is not None:
                client.send(request.data)
                await asyncio.sleep(0.3)
            latimer.process.send_signal(signal.SIGTERM)
            if fields is not None:
                async with asyncio.timeout(6):
                    reply = await client.reply()
                error = error_of(reply) if not reply.problem else None
                if error is None and (reply.problem or stage.fake is not None):
                    found.append(f"no 503 when the drain is over: {reply.status} {reply.problem} "
                                 f"…{reply.body[-200:]!r}")  # fmt: skip
                elif error is not None:
                    found += judge(reply, frozenset({503}))
        except TimeoutError:
            found.append("no answer within 6 s of SIGTERM")
        finally:
            client.leave()
            code = await latimer.stop(4.0)
        if code != 0:
            found.append(f"exit code {code}")
        return found + latimer.fresh_problems()

    return act


def _engine_ends(streams: bool) -> Act:
    """Return an act that ends a real llama-server during a request, and expects an error within 10
    s."""

    async def act(stage: Stage, case: Case) -> list[str]:
        own = Stage(REAL)
        await own.start()
        try:
            body = {
                "model": "m", "prompt": PROMPTS[0], "max_tokens": 2000, "ignore_eos": True, "n": 4,
                "stream": streams,
            }  # fmt: skip
            asking = asyncio.create_task(ask(own.latimer.port, post(COMPLETIONS, body), 15))
            await asyncio.sleep(0.3)
            assert own.server is not None
            assert own.server.process is not None
            own.server.process.terminate()
            reply = await asking
            found = judge(reply, GONE | SILENT)
            if reply.seconds > 10.5:
                found.append(f"it took {reply.seconds:.1f} s")
            return found
        finally:
            await own.stop()

    return act


CASES = [*_starts(), *_lives()]
