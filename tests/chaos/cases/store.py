"""Cases of a store that fails, and of a process that is killed while it stores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from support import postgresql, s3

from chaos.case import INSIDE, RIGHT, Act, Case
from chaos.cases.start import FAILED, fails
from chaos.stage import Stage
from chaos.stored import Storing, Watch

KILLED, STORE = "11 killed while it stores", "12 the store fails"
REQUESTS = 200
# Requests that fill the queue, and the bytes of each.
MANY, LARGE = 80, 1 << 20
# MiB by which a process with a full queue can grow: the queue's 64, the objects of a request with
# 100,000 dictionaries, and what the allocator keeps of them. 127 to 151 were seen.
MOST_MIB = 200


@asynccontextmanager
async def file() -> AsyncIterator[str]:
    """Yield the setting of an SQLite file."""
    with tempfile.TemporaryDirectory(prefix="latimer-store-") as folder:
        yield str(Path(folder) / "s.db")


@asynccontextmanager
async def database() -> AsyncIterator[str]:
    """Yield the setting of a PostgreSQL database with media in a folder."""
    with postgresql.postgresql() as server:
        yield server.url()


Target = Callable[[], AbstractAsyncContextManager[str]]


def killed(target: Target, times: int) -> Act:
    """Return an act that kills a process again and again while it stores 200 completions.

    Each time it must open again, everything that is listed must be whole, and nothing that was
    listed before can be missing.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        if target is database and (reason := postgresql.missing()):
            stage.notes.append(f"skipped: {reason}")
            return []
        found: list[str] = []
        async with target() as store:
            with tempfile.TemporaryDirectory() as media:
                storing = Storing(store, "--store-media", media)
                await storing.start()
                shown: set[str] = set()
                whole: set[str] = set()
                answered: list[int] = []
                for _ in range(times):
                    listings, count = await _loaded(storing)
                    shown |= listings
                    answered.append(count)
                    await storing.start()
                    names = await storing.listed()
                    if missing := shown - set(names):
                        found.append(f"{len(missing)} that were listed before are gone")
                    found += await storing.partial([one for one in names if one not in whole])
                    whole |= set(names)
                    shown |= whole
                found += await storing.partial(random.sample(sorted(whole), min(100, len(whole))))
                found += storing.latimer.fresh_problems()
                await storing.stop()
        counts = " ".join(map(str, sorted(answered)))
        stage.notes.append(
            f"killed {times} times, when of {REQUESTS} requests these numbers were answered: "
            f"{counts}; {len(shown)} completions were listed and whole"
        )
        return found

    return act


async def _loaded(storing: Storing) -> tuple[set[str], int]:
    """Send requests at the same time, and kill the process at a random moment among them.

    Returns:
        The ids that were listed, and the number of requests that were answered.
    """
    listed: set[str] = set()
    before = len(storing.answered)
    most = before + random.randrange(REQUESTS - 5)

    async def lists() -> None:
        while storing.latimer.alive:
            with contextlib.suppress(ConnectionError, TypeError, OSError):
                listed.update(await storing.listed())
            await asyncio.sleep(0.02)

    posts = [
        asyncio.create_task(storing.post(image=number % 10 == 0, stream=number % 3 == 0))
        for number in range(REQUESTS)
    ]
    listing = asyncio.create_task(lists())
    while len(storing.answered) < most:
        await asyncio.sleep(0.002)
    await asyncio.sleep(random.random() * 0.05)
    await storing.kill()
    await asyncio.gather(*posts, return_exceptions=True)
    listing.cancel()
    await asyncio.gather(listing, return_exceptions=True)
    return listed, len(storing.answered) - before


class Missing(Exception):
    """A reason why a case cannot run on this machine."""


# Starts a Latimer with a store, whose fault happens inside this context.
Run = Callable[..., AbstractAsyncContextManager[Watch]]
Fault = Callable[[Run], Awaitable[None]]


def watched(fault: Fault, chat: frozenset[int] = RIGHT) -> Act:
    """Return an act that lets a store fail, and notes what client, log and `/health` show.

    Args:
        fault: starts a Latimer, makes the fault, looks, and ends the fault.
        chat: the statuses of chat that are allowed.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        violations: list[str] = []

        @asynccontextmanager
        async def run(store: str, *words: str, **environment: str) -> AsyncIterator[Watch]:
            storing = Storing(store, *words, **environment)
            await storing.start()
            try:
                await storing.post()
                await storing.post(image=True)
                old = (await storing.listed())[0]
                watch = Watch(storing, old, violations, chat)
                yield watch
                if not watch.afterwards:
                    await watch.recover()
                stage.seen.append(watch.seen(case.name))
            finally:
                code = await storing.stop()
            if code != 0:
                violations.append(f"exit code {code}")

        try:
            await fault(run)
        except Missing as missing:
            stage.notes.append(f"skipped: {missing}")
        return violations

    return act


def full_disk(*words: str) -> Fault:
    """Return a fault that fills the disk of a file and of its media.

    Args:
        words: more arguments; with a folder for media, only the disk of the file is full.
    """

    async def fault(run: Run) -> None:
        if os.geteuid() != 0:
            raise Missing("needs root, to mount a small disk")
        with (
            tempfile.TemporaryDirectory(prefix="latimer-disk-") as folder,
            tempfile.TemporaryDirectory() as media,
        ):
            mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
            if subprocess.run(mount, check=False, capture_output=True).returncode:  # noqa: ASYNC221
                raise Missing("needs the right to mount a small disk")
            ballast = Path(folder) / "ballast"
            given = [word.replace("DIR", media) for word in words]
            try:
                async with run(str(Path(folder) / "s.db"), *given) as watch:
                    with ballast.open("wb", buffering=0) as out, contextlib.suppress(OSError):
                        while True:
                            out.write(bytes(4096))
                    await watch.look(4)
                    ballast.unlink()
            finally:
                subprocess.run(["umount", "-l", folder], check=False)  # noqa: ASYNC221

    return fault


@contextlib.contextmanager
def _server() -> Iterator[postgresql.PostgreSQL]:
    if reason := postgresql.missing():
        raise Missing(reason)
    with postgresql.postgresql() as server:
        yield server


async def stopped_server(run: Run) -> None:
    """Stop PostgreSQL, and start it again."""
    with _server() as server:
        async with run(server.url()) as watch:
            server.stop()
            await watch.look(6)
            await asyncio.to_thread(server.start)


async def paused_server(run: Run) -> None:
    """Pause PostgreSQL, which keeps its connections and answers nothing."""
    with _server() as server:
        async with run(server.url()) as watch:
            with server.paused():
                await watch.look(18)


async def paused_at_the_end(run: Run) -> None:
    """Pause PostgreSQL, and end the process."""
    with _server() as server:
        async with run(server.url()) as watch:
            with server.paused():
                await watch.look(1)
                start = time.monotonic()
                code = await watch.storing.latimer.stop(30)
                seconds = time.monotonic() - start
            if code != 0 or seconds > 12:
                watch.violations.append(f"it ended with {code} after {seconds:.1f} s")
            watch.afterwards = f"SIGTERM: ended with {code} after {seconds:.1f} s"


async def full_queue(run: Run) -> None:
    """Stop PostgreSQL, and send more than the queue takes."""
    with _server() as server:
        async with run(server.url()) as watch:
            server.stop()
            memory = watch.storing.latimer.memory()
            fields = {"padding": [{"a": 1}] * (LARGE // 10)}
            for _ in range(MANY):
                await watch.chat(fields=fields)
            await watch.look(2)
            grown = watch.storing.latimer.memory() - memory
            if grown > MOST_MIB:
                watch.violations.append(f"the process grew by {grown:.0f} MiB")
            await asyncio.to_thread(server.start)
            await watch.recover()
            watch.afterwards += f"; the process had grown by {grown:.0f} MiB"


def locked(statement: str, *words: str) -> Fault:
    """Return a fault that locks a file from another process for some seconds.

    Args:
        words: more arguments; with a required store, only what was answered can be stored.
    """

    async def fault(run: Run) -> None:
        async with file() as path, run(path, *words) as watch:
            other = sqlite3.connect(path, isolation_level=None)
            other.execute(statement)
            await watch.look(6)
            other.execute("COMMIT")
            other.close()
            if words:
                await _check_only_answered(watch)

    return fault


async def required_server(run: Run) -> None:
    """Pause the PostgreSQL of a required store."""
    with _server() as server:
        async with run(server.url(), "--store-required") as watch:
            with server.paused():
                await watch.look(6)
            await _check_only_answered(watch)


async def _check_only_answered(watch: Watch) -> None:
    """Check that nothing is stored whose client got an error."""
    end = time.monotonic() + 20
    while True:
        try:
            names = await watch.storing.listed()
            break
        except ConnectionError as error:
            if time.monotonic() > end:
                watch.violations.append(f"it does not recover: {error}")
                return
            await asyncio.sleep(0.3)
    if extra := set(names) - set(watch.storing.answered):
        watch.violations.append(f"{len(extra)} are listed whose client got an error")


async def damaged_file(run: Run) -> None:
    """Overwrite pages of an open file."""
    async with file() as path, run(path) as watch:
        for _ in range(40):
            await watch.storing.post()
        names = await watch.storing.listed()
        checkpoint = sqlite3.connect(path)
        checkpoint.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        checkpoint.close()
        with open(path, "r+b") as damaged:  # noqa: ASYNC230
            for start in range(8192, damaged.seek(0, os.SEEK_END), 4096):
                damaged.seek(start)
                damaged.write(random.randbytes(4096))
        await watch.look(4)
        # Nothing can mend the file, but nothing may break either.
        for name in names[:20]:
            for method, way in (("GET", ""), ("GET", "/messages"), ("DELETE", "")):
                reply = await watch.storing.get(f"/{name}{way}", method)
                if reply.status not in (200, 404, 503) or reply.problem:
                    watch.violations.append(f"{method}: {reply}")
        watch.afterwards = "the file stays damaged; chat is answered, and the process ends with 0"


async def no_folder(run: Run) -> None:
    """Put a file in the place of the folder for media."""
    async with file() as path, run(path) as watch:
        folder = Path(path).with_suffix(".media")
        shutil.move(folder, folder.with_suffix(".away"))
        folder.write_text("")
        await watch.look(4)
        folder.unlink()
        shutil.move(folder.with_suffix(".away"), folder)


_MEDIA = ("--store-media", f"s3://{s3.BUCKET}/images")


async def no_s3(run: Run) -> None:
    """End the S3 server, and start an empty one at its address."""
    with contextlib.ExitStack() as servers:
        address, _ = servers.enter_context(s3.s3_process())
        async with file() as path, run(path, *_MEDIA, **s3.variables(address)) as watch:
            for name, sent in [*watch.storing.answered.items()]:
                if sent.image:
                    await watch.storing.get(f"/{name}", "DELETE")
                    del watch.storing.answered[name]
            servers.close()
            await watch.look(8)
            servers.enter_context(s3.s3_process(int(address.rpartition(":")[2])))


async def paused_s3(run: Run) -> None:
    """Pause the S3 server, which keeps its connections and answers nothing."""
    with s3.s3_process() as (address, process):
        async with file() as path, run(path, *_MEDIA, **s3.variables(address)) as watch:
            os.kill(process, signal.SIGSTOP)
            try:
                await watch.look(8)
            finally:
                os.kill(process, signal.SIGCONT)


_EITHER = frozenset({200, 503})
_BAD_FILES = {
    "of garbage": random.Random(1).randbytes(40_000),
    "damaged after its head": b"SQLite format 3\0" + random.Random(2).randbytes(40_000),
}
FAULTS: dict[str, Act] = {
    **{
        f"a file {name} at the start": fails(["--store", "DIR/s.db"], FAILED, {"s.db": data})
        for name, data in _BAD_FILES.items()
    },
    "a full disk of file and media": watched(full_disk()),
    "a full disk of the file": watched(full_disk("--store-media", "DIR")),
    "PostgreSQL stopped": watched(stopped_server),
    "PostgreSQL paused": watched(paused_server),
    "PostgreSQL paused, then SIGTERM": watched(paused_at_the_end),
    "PostgreSQL stopped, a full queue": watched(full_queue),
    "a file locked for writing": watched(locked("BEGIN IMMEDIATE")),
    "a file locked exclusively": watched(locked("BEGIN EXCLUSIVE")),
    "a file damaged while it is open": watched(damaged_file),
    "a folder of media that cannot be written": watched(no_folder),
    "S3 gone": watched(no_s3),
    "S3 paused": watched(paused_s3),
    "--store-required, a locked file": watched(
        locked("BEGIN IMMEDIATE", "--store-required"), _EITHER
    ),
    "--store-required, PostgreSQL paused": watched(required_server, _EITHER),
}


def _cases() -> Iterator[Case]:
    common: dict[str, Any] = {"engines": (INSIDE,), "alone": True}
    for name, target, times in (("SQLite", file, 2), ("SQLite", file, 20),
                                ("PostgreSQL", database, 20)):  # fmt: skip
        yield Case(
            name=f"{name}, {times} times", kind=KILLED, act=killed(target, times),
            seconds=60 if times == 2 else 600, short=times == 2, **common,
        )  # fmt: skip
    for name, act in FAULTS.items():
        yield Case(name=name, kind=STORE, act=act, seconds=120, **common)


CASES = list(_cases())
