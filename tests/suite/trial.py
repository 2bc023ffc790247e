"""Trials of the checks on the toy server, which has OpenAI's limits, with and without a fault."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import shlex
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, cast

import httpx2
import uvicorn
from latimer.conformance.check import Check, Verdict, all_checks
from latimer.conformance.runner import run
from latimer.conformance.target import Api
from suite.faults import EXPECTED, EXPECTED_FILE, FAULTS
from suite.server import Fault, Server
from suite.witness import Uses, Witness

# Checks that take seconds, or measure them, run only with the faults that they are made for.
SLOW = {
    "streaming.disconnect": ("stays-after-disconnect",),
    "responses.disconnect": ("stays-after-disconnect", "response-aborted-stored"),
    "websocket.disconnect": ("stays-after-disconnect",),
    "agents.cancelled": ("429-after-cancelled",),
    "concurrency.cancelled": ("429-after-cancelled",),
    "concurrency.cancelled-waiting": ("429-after-cancelled",),
    "audio.speech-disconnect": ("stays-after-disconnect",),
    "audio.chat-disconnect": ("stays-after-disconnect",),
    "audio.first-byte": ("waits-till-the-end",),
    "streaming.first-chunk": ("waits-till-the-end",),
    "keepalive.bytes": ("keepalive-none",),
    "keepalive.comments": ("keepalive-none", "keepalive-joined", "keepalive-events"),
}
# Faults that only timing reveals.
TIMED = sorted({fault for faults in SLOW.values() for fault in faults} | {"lingers"})
# The beginnings of the ids of checks that end the engine.
ENGINE = ("engine.", "responses.engine-")
# The seconds for which a stream may send nothing.
SILENCE = 2.0
# The number of checks that run concurrently.
AT_ONCE = 8
# A busy machine can suspend a process for longer than a check's limit.
PATIENCE = 5.0
HEADERS = {"authorization": "Bearer sk-right"}
# Ends a server's engine over a bare socket. A process with more imports starts too slowly.
BREAK = """
import socket
connection = socket.create_connection(({host!r}, {port}))
connection.sendall(b"POST {path}break HTTP/1.0\\r\\n\\r\\n")
connection.recv(1)
"""


class Noted(dict[str, str]):
    """The type errors in the replies of a run, by endpoint, and whether a check reads them."""

    was_read = False

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, and record that it was read."""
        self.was_read = True
        return super().get(key, default)


@dataclass(frozen=True, slots=True)
class Record:
    """A check's run on the correct server.

    Args:
        joint: True if the verdict also depends on the bodies that other checks receive.
    """

    verdict: Verdict
    joint: bool


class Trial:
    """The checks and the toy server.

    Args:
        full: run every check with every fault, over sockets.

    `records` has each check's run on the correct server, by the check's id, and `uses` the hooks
    that the server used in it.
    """

    def __init__(self, stage: Stage, address: str, sockets: httpx2.AsyncHTTPTransport,
                 full: bool) -> None:  # fmt: skip
        self._stage = stage
        self._address = address
        self._sockets = sockets
        self._full = full
        self._numbers = itertools.count()
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.uses = Uses()
        self.records: dict[str, Record] = {}

    async def record(self, checks: Sequence[Check]) -> None:
        """Run checks on the correct server, unless they are recorded."""
        found: dict[str, str] = {}
        checks = [check for check in checks if check.id not in self.records]

        async def one(check: Check, wrong: Noted) -> None:
            witness = Witness()
            verdict = await self._run(check, cast(Fault, witness), wrong, self._full, tries=3)
            self.records[check.id] = Record(verdict, wrong.was_read)
            self.uses.add(check.id, witness.uses)
            found.update(wrong)

        # Checks that wait or measure time start first.
        ordered = sorted(checks, key=lambda check: not check.alone)
        await asyncio.gather(*(one(check, Noted()) for check in ordered))
        for check in checks:
            if self.records[check.id].joint:
                await one(check, Noted(found))

    def complaints(self) -> list[str]:
        """List the checks that do not pass on the correct server."""
        verdicts = [self.records[check.id].verdict for check in all_checks()]
        return [f"{v.check.id} {v.outcome}: {v.detail}" for v in verdicts if v.outcome != "pass"]

    async def judged(self, name: str) -> list[Verdict]:
        """Run the checks that a fault reaches, and return their verdicts."""
        wrong: dict[str, str] = {}
        checks = [check for check in all_checks() if judges(check, name)]
        ids = self.uses.noticing(FAULTS[name])
        reached = [check for check in checks if self._full or check.id in ids]
        joint = [check for check in checks if self.records[check.id].joint]

        async def one(check: Check) -> Verdict:
            return await self._run(check, FAULTS[name], wrong, self._full)

        single = [check for check in reached if check not in joint]
        verdicts = await asyncio.gather(*(one(check) for check in single if not check.alone))
        verdicts += [await one(check) for check in single if check.alone]
        for check in joint:
            if wrong or check in reached:
                verdicts.append(await one(check))
        return verdicts

    async def failed(self, name: str) -> list[str]:
        """List the ids of the checks that fail with a fault, sorted."""
        verdicts = await self.judged(name)
        return sorted(verdict.check.id for verdict in verdicts if verdict.outcome != "pass")

    async def caught(
        self, fault: Fault, ids: Collection[str], likely: Sequence[str] = ()
    ) -> str | None:
        """Return a check that fails with a fault; None if no check does.

        Args:
            ids: the checks that the fault can reach.
            likely: the ids of checks that run first, each alone.
        """
        wrong: dict[str, str] = {}
        reached = [check for check in all_checks() if check.id in ids and check.id not in SLOW]
        joint = [check for check in all_checks() if self._is_joint(check)]
        single = [check for check in reached if check not in joint]
        first = [check for name in likely for check in single if check.id == name]
        rest = [check for check in single if check not in first]
        parts = [[check] for check in first]
        parts += [rest[at : at + AT_ONCE] for at in range(0, len(rest), AT_ONCE)]
        for part in parts:
            verdicts = await asyncio.gather(
                *(self._run(check, fault, wrong, sockets=False) for check in part)
            )
            for verdict in verdicts:
                if verdict.outcome != "pass":
                    return verdict.check.id
        for check in joint:
            if wrong or check in reached:
                verdict = await self._run(check, fault, wrong, sockets=False)
                if verdict.outcome != "pass":
                    return check.id
        return None

    def _is_joint(self, check: Check) -> bool:
        return check.id in self.records and self.records[check.id].joint

    async def over_sockets(self, name: str, check: Check) -> Verdict:
        """Run one check with a fault over sockets, whether the fault reaches it or not."""
        return await self._run(check, FAULTS[name], {}, sockets=True)

    async def _run(
        self, check: Check, fault: Fault, wrong: dict[str, str], sockets: bool, tries: int = 1
    ) -> Verdict:
        number = str(next(self._numbers))
        # Each completion is created two seconds after the previous one.
        clock = itertools.count(1_700_000_000, 2).__next__
        url = httpx2.URL(f"{self._address}/{number}/v1/")
        client = self._client(url, sockets)
        code = BREAK.format(host=url.host, port=url.port, path=url.path)
        command = f"{shlex.quote(sys.executable)} -IS -c {shlex.quote(code)}"
        async with self._turns:
            self._stage.servers[number] = Server(fault, clock)
            verdict = await run(
                check,
                lambda: Api(client, "org/toy", "demo", wrong, command, SILENCE, True),
                PATIENCE,
                tries,
            )
            del self._stage.servers[number]
        return verdict

    def _client(self, url: httpx2.URL, sockets: bool) -> httpx2.AsyncClient:
        if not sockets:
            return cast(httpx2.AsyncClient, Direct(self._stage, url, HEADERS))
        return httpx2.AsyncClient(
            base_url=url, headers=HEADERS, timeout=60, transport=self._sockets, trust_env=False
        )


@asynccontextmanager
async def opened(full: bool = False) -> AsyncIterator[Trial]:
    """Serve the toy server and record the checks that take no seconds, without a fault."""
    logging.disable(logging.CRITICAL)
    stage = Stage()
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=AT_ONCE)
    try:
        async with (
            listening(stage) as address,
            httpx2.AsyncHTTPTransport(verify=False, limits=limits) as sockets,
        ):
            trial = Trial(stage, address, sockets, full)
            await trial.record([check for check in all_checks() if check.id not in SLOW])
            yield trial
    finally:
        logging.disable(logging.NOTSET)


def judges(check: Check, name: str) -> bool:
    """Return True if a check judges a fault."""
    if check.id.startswith(ENGINE):
        return name.startswith("break-")
    return name in SLOW.get(check.id, (name,))


async def main(words: Sequence[str]) -> None:
    """Print the checks that faults fail, with the details; or write `expected.json` again."""
    options = argparse.ArgumentParser(prog="python -m suite.trial", description=main.__doc__)
    options.add_argument("faults", nargs="*", metavar="FAULT", help="the name of a fault")
    options.add_argument(
        "--expected",
        action="store_true",
        help="write the lists of these faults, or of all; review what has changed in them",
    )
    asked = options.parse_args(words)
    for name in asked.faults:
        if name not in FAULTS:
            near = ", ".join(get_close_matches(name, FAULTS))
            instead = f"did you mean: {near}?" if near else "tests/suite/faults has their names."
            options.error(f"there is no fault '{name}'; {instead}")
    if not asked.faults and not asked.expected:
        options.error("name a fault, or use --expected")
    async with opened() as trial:
        await trial.record(all_checks())
        if asked.expected:
            await write_expected(trial, asked.faults or [*FAULTS])
            return
        for name in asked.faults:
            sys.stdout.write(f"{name}\n")
            for verdict in await trial.judged(name):
                if verdict.outcome != "pass":
                    sys.stdout.write(f"  {verdict.check.id} {verdict.outcome}: {verdict.detail}\n")


async def write_expected(trial: Trial, names: Sequence[str]) -> None:
    """Write the checks that faults fail; an `AssertionError` if the right server fails one."""
    assert trial.complaints() == [], trial.complaints()
    found = {name: [*checks] for name, checks in EXPECTED.items() if name in FAULTS}
    found |= {name: await trial.failed(name) for name in names if name not in TIMED}
    timed = [name for name in names if name in TIMED]
    found |= dict(zip(timed, await asyncio.gather(*map(trial.failed, timed)), strict=True))
    rows = (f" {json.dumps(name)}: {json.dumps(sorted(found[name]))}" for name in sorted(found))
    EXPECTED_FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


class Stage:
    """An ASGI app with one server for each run of a check, selected by the first part of a path."""

    def __init__(self) -> None:
        self.servers: dict[str, Server] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        _, number, rest = scope["raw_path"].split(b"/", 2)
        await self.servers[number.decode()]({**scope, "raw_path": b"/" + rest}, receive, send)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to pytest."""
        yield


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """Serve an app in the running event loop, and yield its address."""
    config = uvicorn.Config(
        app, port=0, lifespan="off", ws="websockets-sansio", ws_max_size=64 << 20,
        log_level="critical", timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = _Uvicorn(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class Direct:
    """An in-process client for an app, with the part of `httpx2.AsyncClient` that checks use."""

    def __init__(self, app: Any, base_url: httpx2.URL, headers: Mapping[str, str]) -> None:
        self._app = app
        self.base_url = base_url
        self.headers = httpx2.Headers(headers)

    async def request(
        self, method: str, path: str, *, content: bytes | None, headers: Mapping[str, str]
    ) -> httpx2.Response:
        """Send a request and return the complete response."""
        raw, _, query = f"{self.base_url.path}{path}".encode().partition(b"?")
        sent = {**self.headers, **headers}
        scope = {
            "type": "http", "method": method, "raw_path": raw, "query_string": query,
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
        }  # fmt: skip
        requests = iter([{"type": "http.request", "body": content or b""}])
        replies: list[Any] = []

        async def receive() -> Any:
            message = next(requests, None)
            return message or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            replies.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:
            if replies:
                raise httpx2.RemoteProtocolError("the response is incomplete") from None
            return httpx2.Response(500)
        start, *parts = replies
        body = b"".join(part["body"] for part in parts)
        return httpx2.Response(start["status"], headers=_received(start["headers"]), content=body)


def _received(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers as a client parses them: a line break in a value starts another header."""
    lines = b"\r\n".join(b": ".join(pair) for pair in headers).split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return [(name, value.strip()) for name, _, value in pairs]


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
