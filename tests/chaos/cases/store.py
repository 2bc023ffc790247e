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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from latimer.adapter.store.silence import SILENCE
from support import postgresql, s3

from chaos.case import INSIDE, Act, Case
from chaos.cases.start import FAILED, fails
from chaos.stage import Stage
from chaos.stored import Storing, Watch, is_root

KILLED, STORE = "11 killed while it stores", "12 the store fails"
REQUESTS = 200
# Requests that fill the queue, and the bytes of each.
MANY, LARGE = 80, 1 << 20
# MiB by which a process with a full queue can grow.
MOST_MIB = 150


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


Fault = Callable[[Watch], Awaitable[str | None]]


def watched(
    make: Callable[[], AbstractAsyncContextManager[tuple[Storing, Fault]]],
    chat: frozenset[int] = frozenset({200}),
) -> Act:
    """Return an act that lets a store fail, and notes what client, log and `/health` show.

    Args:
        make: yields a Latimer, and a function that makes the fault, looks, and ends the fault.
        chat: the statuses of chat that are allowed.
    """

    async def act(stage: Stage, case: Case) -> list[str]:
        try:
            async with make() as (storing, fault):
                await storing.start()
                try:
                    await storing.post()
                    await storing.post(image=True)
                    old = (await storing.listed())[0]
                    watch = Watch(storing, old, chat)
                    words = await fault(watch)
                    if words is None:
                        words = await watch.recovered()
                    stage.seen.append(watch.seen(case.name, words))
                finally:
                    code = await storing.stop()
                if code != 0:
                    watch.violations.append(f"exit code {code}")
                return watch.violations
        except Missing as missing:
            stage.notes.append(f"skipped: {missing}")
            return []

    return act


class Missing(Exception):
    """A reason why a case cannot run on this machine."""


def full_disk(
    *words: str,
) -> Callable[[], AbstractAsyncContextManager[tuple[Storing, Fault]]]:
    """Return what fills the disk of a file and of its media.

    Args:
        words: more arguments; with a folder for media, only the disk of the file is full.
    """
    return partial(_full_disk, words)


@asynccontextmanager
async def _full_disk(words: Sequence[str]) -> AsyncIterator[tuple[Storing, Fault]]:
    if not is_root():
        raise Missing("needs root, to mount a small disk")
    with tempfile.TemporaryDirectory(prefix="latimer-disk-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder]
        if subprocess.run(mount, check=False, capture_output=True).returncode:  # noqa: ASYNC221
            raise Missing("needs the right to mount a small disk")
        ballast = Path(folder) / "ballast"

        async def fault(watch: Watch) -> None:
            with ballast.open("wb", buffering=0) as out, contextlib.suppress(OSError):
                while True:
                    out.write(bytes(4096))
            await watch.look(4)
            ballast.unlink()

        try:
            with tempfile.TemporaryDirectory() as media:
                given = [word.replace("DIR", media) for word in words]
                yield Storing(str(Path(folder) / "s.db"), *given), fault
        finally:
            subprocess.run(["umount", "-l", folder], check=False)  # noqa: ASYNC221


@contextlib.contextmanager
def _server() -> Iterator[postgresql.PostgreSQL]:
    if reason := postgresql.missing():
        raise Missing(reason)
    with postgresql.postgresql() as server:
        yield server


@asynccontextmanager
async def stopped_server() -> AsyncIterator[tuple[Storing, Fault]]:
    """Stop PostgreSQL, and start it again."""
    with _server() as server:

        async def fault(watch: Watch) -> None:
            server.stop()
            await watch.look(6)
            await asyncio.to_thread(server.start)

        yield Storing(server.url()), fault


@asynccontextmanager
async def paused_server() -> AsyncIterator[tuple[Storing, Fault]]:
    """Pause PostgreSQL, which keeps its connections and answers nothing."""
    with _server() as server:

        async def fault(watch: Watch) -> None:
            with server.paused():
                await watch.look(SILENCE + 8)

        yield Storing(server.url()), fault


@asynccontextmanager
async def paused_at_the_end() -> AsyncIterator[tuple[Storing, Fault]]:
    """Pause PostgreSQL, and end the process."""
    with _server() as server:

        async def fault(watch: Watch) -> str:
            with server.paused():
                await watch.look(1)
                start = time.monotonic()
                code = await watch.storing.latimer.stop(30)
                seconds = time.monotonic() - start
            if code != 0 or seconds > 12:
                watch.violations.append(f"it ended with {code} after {seconds:.1f} s")
            return f"SIGTERM: ended with {code} after {seconds:.1f} s"

        yield Storing(server.url()), fault


@asynccontextmanager
async def full_queue() -> AsyncIterator[tuple[Storing, Fault]]:
    """Stop PostgreSQL, and send more than the queue takes."""
    with _server() as server:

        async def fault(watch: Watch) -> str:
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
            return await watch.recovered() + f"; the process had grown by {grown:.0f} MiB"

        yield Storing(server.url()), fault


def locked(statement: str) -> Callable[[], AbstractAsyncContextManager[tuple[Storing, Fault]]]:
    """Return what locks a file from another process for some seconds."""

    @asynccontextmanager
    async def lock() -> AsyncIterator[tuple[Storing, Fault]]:
        async with file() as path:

            async def fault(watch: Watch) -> None:
                other = sqlite3.connect(path, isolation_level=None)
                other.execute(statement)
                await watch.look(6)
                other.execute("COMMIT")
                other.close()

            yield Storing(path), fault

    return lock


@asynccontextmanager
async def damaged_file() -> AsyncIterator[tuple[Storing, Fault]]:
    """Overwrite pages of an open file."""
    async with file() as path:

        async def fault(watch: Watch) -> str:
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
            return "the file stays damaged; chat is answered, and the process ends with 0"

        yield Storing(path), fault


@asynccontextmanager
async def no_folder() -> AsyncIterator[tuple[Storing, Fault]]:
    """Put a file in the place of the folder for media."""
    async with file() as path:
        folder = Path(path).with_suffix(".media")

        async def fault(watch: Watch) -> None:
            shutil.move(folder, folder.with_suffix(".away"))
            folder.write_text("")
            await watch.look(4)
            folder.unlink()
            shutil.move(folder.with_suffix(".away"), folder)

        yield Storing(path), fault


@asynccontextmanager
async def no_s3() -> AsyncIterator[tuple[Storing, Fault]]:
    """End the S3 server, and start an empty one at its address."""
    async with file() as path:
        with contextlib.ExitStack() as servers:
            address, _ = servers.enter_context(s3.s3_process())

            async def fault(watch: Watch) -> None:
                for name, sent in [*watch.storing.answered.items()]:
                    if sent.image:
                        await watch.storing.get(f"/{name}", "DELETE")
                        del watch.storing.answered[name]
                servers.close()
                await watch.look(8)
                servers.enter_context(s3.s3_process(int(address.rpartition(":")[2])))

            media = ("--store-media", f"s3://{s3.BUCKET}/images")
            yield Storing(path, *media, **s3.variables(address)), fault


@asynccontextmanager
async def paused_s3() -> AsyncIterator[tuple[Storing, Fault]]:
    """Pause the S3 server, which keeps its connections and answers nothing."""
    async with file() as path:
        with s3.s3_process() as (address, process):

            async def fault(watch: Watch) -> None:
                os.kill(process, signal.SIGSTOP)
                try:
                    await watch.look(8)
                finally:
                    os.kill(process, signal.SIGCONT)

            media = ("--store-media", f"s3://{s3.BUCKET}/images")
            yield Storing(path, *media, **s3.variables(address)), fault


@asynccontextmanager
async def required_file() -> AsyncIterator[tuple[Storing, Fault]]:
    """Lock the file of a required store."""
    async with file() as path:

        async def fault(watch: Watch) -> None:
            other = sqlite3.connect(path, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            await watch.look(6)
            other.execute("COMMIT")
            other.close()
            await _only_answered(watch)

        yield Storing(path, "--store-required"), fault


@asynccontextmanager
async def required_server() -> AsyncIterator[tuple[Storing, Fault]]:
    """Pause the PostgreSQL of a required store."""
    with _server() as server:

        async def fault(watch: Watch) -> None:
            with server.paused():
                await watch.look(6)
            await _only_answered(watch)

        yield Storing(server.url(), "--store-required"), fault


async def _only_answered(watch: Watch) -> None:
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
    extra = set(names) - set(watch.storing.answered)
    if extra:
        watch.violations.append(f"{len(extra)} are listed whose client got an error")


_EITHER = frozenset({200, 503})
_BAD_FILES = {
    "of garbage": random.Random(1).randbytes(40_000),
    "damaged after its head": b"SQLite format 3\0" + random.Random(2).randbytes(40_000),
}

CASES = [
    Case(name="SQLite, 2 times", kind=KILLED, engines=(INSIDE,), act=killed(file, 2),
         seconds=60, short=True, alone=True),
    Case(name="SQLite, 20 times", kind=KILLED, engines=(INSIDE,), act=killed(file, 20),
         seconds=600, alone=True),
    Case(name="PostgreSQL, 20 times", kind=KILLED, engines=(INSIDE,), act=killed(database, 20),
         seconds=600, alone=True),
    *(
        Case(name=name, kind=STORE, engines=(INSIDE,), act=act, seconds=120, alone=True)
        for name, act in {
            **{
                f"a file {name} at the start": fails(
                    ["--store", "DIR/s.db"], FAILED, {"s.db": data}
                )
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
            "--store-required, a locked file": watched(required_file, _EITHER),
            "--store-required, PostgreSQL paused": watched(required_server, _EITHER),
        }.items()
    ),
]  # fmt: skip
