"""Tests of a store whose database, disk or media fail, with real failures."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from latimer.adapter import OpenAIAdapter
from latimer.adapter import probe as probes
from latimer.adapter.store import database as databases
from latimer.adapter.store import queue
from latimer.adapter.store import store as stores
from latimer.adapter.store.errors import StoreUnavailable
from latimer.adapter.store.records import Key, Query
from latimer.adapter.store.store import Store
from support import postgresql
from support.clients import client_of
from support.engines.echo import Echo
from support.prometheus import scrape
from support.stored import KIND, PIXEL, opened, record, same, store_at

SECRET = "Rumpelstiltskin"
TESTS = Path(__file__).parents[2]


async def listed(store: Store) -> list[str]:
    """Return the ids of all objects."""
    page = await store.page("", KIND, Query(limit=100), same)
    return [one.id for one in page.data]


async def kept(store: Store, text: str = SECRET, image: str | None = None) -> str:
    """Store an object, and return its id when it is written."""
    one = record(text, image=image, metadata={"name": text})
    assert store.keep(one)
    assert one.id in await listed(store)
    return one.id


async def refused(call: Awaitable[object], words: str) -> float:
    """Check that a call fails because the store is not available; return its seconds."""
    start = time.monotonic()
    with pytest.raises(StoreUnavailable, match=words) as caught:
        await call
    assert SECRET not in caught.value.reason + caught.value.detail
    return time.monotonic() - start


async def recovered(store: Store) -> None:
    """Wait until everything is written."""
    async with asyncio.timeout(10):
        while store.status() != ("ok", 0, 0):
            await asyncio.sleep(0.05)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(probes, "LOST_SECONDS", 0.1)
    monkeypatch.setattr(probes, "PROBE_SECONDS", 0.3)
    monkeypatch.setattr(queue, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(queue, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(queue, "PATIENCE", 0.3)
    monkeypatch.setattr(queue, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(stores, "ANSWER_SECONDS", 0.8)
    monkeypatch.setattr(stores, "OPEN_SECONDS", 1.0)
    monkeypatch.setattr(stores, "FAILING_SECONDS", 0.2)
    monkeypatch.setattr(databases, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(databases, "CLOSE_SECONDS", 0.3)


@pytest.fixture(autouse=True)
def _logs_no_text(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert SECRET not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.fixture(scope="module")
def server() -> Iterator[postgresql.PostgreSQL]:
    """Run a PostgreSQL that tests may stop."""
    if reason := postgresql.missing():
        pytest.skip(reason)
    with postgresql.postgresql() as running:
        yield running


@pytest.fixture
async def remote(server: postgresql.PostgreSQL) -> AsyncIterator[Store]:
    """Yield a store on a PostgreSQL that tests may stop."""
    with server.database() as url:
        async with opened(url) as store:
            yield store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """Yield a store in a file."""
    async with opened(tmp_path / "store.db") as store:
        yield store


async def test_a_postgresql_that_is_stopped_gets_everything_later(
    remote: Store, server: postgresql.PostgreSQL
) -> None:
    """Without its server the store refuses to read at once, and writes when it is back."""
    old = await kept(remote)
    server.stop()
    new = record(SECRET)
    assert remote.keep(new)
    assert await refused(remote.page("", KIND, Query(), same), "does not answer") < 1
    assert await refused(remote.get("", KIND, old), "does not answer") < 1
    assert remote.status()._asdict() == {"state": "unavailable", "waiting": 1, "lost": 0}
    server.start()
    assert await listed(remote) == [old, new.id]
    assert remote.status()._asdict() == {"state": "ok", "waiting": 0, "lost": 0}


async def state_of(store: Store, wanted: str) -> None:
    """Wait some seconds until the store says that it has a state, without using the store."""
    async with asyncio.timeout(10):
        while store.status().state != wanted:
            await asyncio.sleep(0.02)


async def test_an_idle_postgresql_that_is_stopped_is_noticed(
    remote: Store, server: postgresql.PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    """Without any request, the store says that its server is gone and that it is back, once."""
    old = await kept(remote)
    await asyncio.sleep(0.5)
    assert remote.status().state == "ok"
    server.stop()
    await state_of(remote, "unavailable")
    with pytest.raises(StoreUnavailable):
        await remote.check()
    await asyncio.sleep(0.5)
    server.start()
    await state_of(remote, "ok")
    await remote.check()
    lines = [one.getMessage() for one in caplog.records if "available" in one.getMessage()]
    assert [line.partition(":")[0] for line in lines] == [
        "the store is not available",
        "the store is available again; 0 objects were lost",
    ]
    assert await listed(remote) == [old]


async def test_an_idle_postgresql_that_is_silent_is_noticed(
    remote: Store, server: postgresql.PostgreSQL
) -> None:
    """A server that keeps its connections and answers nothing is lost until it continues."""
    await kept(remote)
    with server.paused():
        await state_of(remote, "unavailable")
    await state_of(remote, "ok")


# Ends while a probe and a member wait for the database, which its parent has stopped.
ENDS = """
import asyncio, sys
from contextlib import suppress
from latimer.adapter import probe
from latimer.adapter.store import members
from latimer.adapter.store.errors import StoreUnavailable
from support.stored import store_at

probe.IDLE_SECONDS = 0.05


async def main():
    store = store_at(sys.argv[1])
    member = members.Members(store)
    await member.join()
    # Only now: the first question also opens the database.
    members.PATIENCE = 0.3
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    with suppress(StoreUnavailable):
        await member.join()
        raise AssertionError("PostgreSQL is not silent")
    await member.leave()
    await store.aclose()


asyncio.run(main())
"""


@pytest.mark.slow
def test_the_end_waits_for_no_question(server: postgresql.PostgreSQL) -> None:
    """A process whose PostgreSQL is silent ends, although two questions have no answer yet."""
    with server.database() as url, subprocess.Popen(
        [sys.executable, "-c", ENDS, url], cwd=TESTS,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        with server.paused():
            process.stdin.write("\n")
            process.stdin.flush()
            try:
                assert process.wait(10) == 0
            finally:
                process.kill()


async def test_a_required_store_that_is_back_takes_the_next_request(
    remote: Store, server: postgresql.PostgreSQL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request asks a lost database again, and does not wait for the next probe."""
    await kept(remote)
    server.stop()
    await state_of(remote, "unavailable")
    monkeypatch.setattr(probes, "LOST_SECONDS", 60.0)
    await asyncio.sleep(0.5)
    server.start()
    await remote.check()
    assert remote.status().state == "ok"


async def test_the_paths_for_operators_notice_an_idle_postgresql_that_is_lost(
    server: postgresql.PostgreSQL,
) -> None:
    """`/ready`, `/health` and the metrics follow a required store that nobody uses."""
    with server.database() as url:
        app = OpenAIAdapter(Echo(), store=url, store_required=True)
        await app.open_store()
        store = app.service.store
        assert store is not None
        async with client_of(app) as client:
            assert await _seen(client) == (200, 200, 1)
            server.stop()
            await state_of(store, "unavailable")
            assert await _seen(client) == (503, 503, 0)
            server.start()
            await state_of(store, "ok")
            assert await _seen(client) == (200, 200, 1)
        await app.aclose()


async def _seen(client: httpx2.AsyncClient) -> tuple[int, int, float]:
    """Return the statuses of `/ready` and `/health`, and the metric of the store."""
    found = [(await client.get(path)).status_code for path in ("/ready", "/health")]
    return found[0], found[1], (await scrape(client)).sum("latimer_store_up")


async def test_a_postgresql_that_refuses_later_is_opened_by_its_probe(
    server: postgresql.PostgreSQL,
) -> None:
    """A store whose server was down at the first attempt is opened without a request."""
    with server.database() as url:
        store = store_at(url)
        server.stop()
        with pytest.raises(StoreUnavailable):
            await store.open()
        assert store.status().state == "unavailable"
        server.start()
        await state_of(store, "ok")
        await store.aclose()


async def test_a_postgresql_that_is_silent_holds_nobody(
    remote: Store, server: postgresql.PostgreSQL
) -> None:
    """While the server keeps connections and answers nothing, many reads end soon with an error."""
    old = await kept(remote)
    with server.paused():
        reads = (refused(remote.get("", KIND, old), "does not answer") for _ in range(20))
        times = await asyncio.gather(*reads)
        assert max(times) < 2
        new = record(SECRET)
        assert remote.keep(new)
        assert await refused(remote.page("", KIND, Query(), same), "does not answer") < 1
        assert remote.status().state == "unavailable"
        assert await refused(remote.page("", KIND, Query(), same), "does not answer") < 1
    await recovered(remote)
    assert await listed(remote) == [old, new.id]


@pytest.mark.slow
@pytest.mark.parametrize("required", [False, True])
async def test_a_silent_postgresql_holds_no_response_in_the_background(
    server: postgresql.PostgreSQL, required: bool
) -> None:
    """The client gets a 503 if the store is required, and else the response, within seconds."""
    body: dict[str, Any] = {"model": "demo", "input": SECRET, "background": True}
    stored = 503 if required else 200
    with server.database() as url:
        app = OpenAIAdapter(Echo(), any_model=True, store=url, store_required=required)
        await app.open_store()
        async with client_of(app) as client:
            made = (await client.post("/v1/responses", json=body)).json()
            assert (made["status"], made["store"]) == ("queued", True)
            with server.paused():
                for more, status in (
                    ({}, stored), ({"stream": True}, stored), ({"store": False}, 200),
                ):  # fmt: skip
                    start = time.monotonic()
                    reply = await client.post("/v1/responses", json={**body, **more})
                    assert (reply.status_code, time.monotonic() - start < 5) == (status, True)
                start = time.monotonic()
                await app.aclose()
                assert time.monotonic() - start < 5


async def test_closing_does_not_wait_for_a_silent_database(
    server: postgresql.PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    """A store is closed within seconds, and the log has the number of objects that are lost."""
    with server.database() as url:
        store = store_at(url)
        await kept(store)
        with server.paused():
            store.keep(record(SECRET))
            start = time.monotonic()
            await store.aclose()
            assert time.monotonic() - start < 2
    assert "1 object is lost" in caplog.text


async def test_a_commit_whose_answer_is_lost_loses_nothing(remote: Store) -> None:
    """Objects that are already in the database, because of an earlier attempt, are not lost."""
    twice = record(SECRET)
    assert await remote.write([twice]) == []
    remote.keep(record(SECRET))
    remote.keep(twice)
    assert len(await listed(remote)) == 2
    assert remote.status()._asdict() == {"state": "ok", "waiting": 0, "lost": 0}


async def test_what_postgresql_cannot_take_holds_nothing(remote: Store) -> None:
    """A model's name that is too long for an index loses its own object only."""
    wrong, right = record(SECRET), record(SECRET)
    wrong.model = os.urandom(8_000).hex()
    remote.keep(wrong)
    remote.keep(right)
    assert await listed(remote) == [right.id]
    assert remote.status()._asdict() == {"state": "ok", "waiting": 0, "lost": 1}


async def test_metadata_can_have_null_characters(remote: Store) -> None:
    """Metadata with a null character, which PostgreSQL does not take, is stored and found."""
    metadata = {"a\0": "b\0", "a\N{REPLACEMENT CHARACTER}": "b\N{REPLACEMENT CHARACTER}"}
    one = record(metadata=metadata)
    remote.keep(one)
    page = await remote.page("", KIND, Query(metadata={"a\0": "b\0"}), same)
    assert [found.metadata for found in page.data] == [metadata]
    assert await remote.update("", KIND, one.id, {"c": "\0"}) is not None
    assert await listed(remote) == [one.id]


@contextmanager
def full(file: Path) -> Iterator[None]:
    """Let no file grow beyond the size of the database's log of changes."""
    log = Path(f"{file}-wal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_file_that_cannot_grow(tmp_path: Path, store: Store) -> None:
    """Objects wait while the disk takes nothing; older ones are found, and all are written later.

    Also the deletion of an object, and the log of changes after it, are refused or done.
    """
    file = tmp_path / "store.db"
    old = await kept(store)
    with full(file):
        new = record(SECRET * 10_000)
        assert store.keep(new)
        await refused(store.page("", KIND, Query(), same), "the disk")
        assert await store.get("", KIND, old) is not None
        assert store.status().state == "unavailable"
        await refused(store.delete("", KIND, old), "the disk")
    assert await listed(store) == [old, new.id]
    assert await store.delete("", KIND, old)


async def test_a_full_disk_is_known_until_something_is_written(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Neither a read nor an object that was withdrawn makes the store available for a while."""
    file = tmp_path / "store.db"
    monkeypatch.setattr(queue, "PATIENCE", 10.0)
    monkeypatch.setattr(queue, "LONGEST_PAUSE", 60.0)
    monkeypatch.setattr(stores, "COMMIT_SECONDS", 10.0)
    await store.open()
    old = await kept(store)
    with full(file):
        for _ in range(3):
            assert not await store.commit(record(SECRET * 10_000))
            assert await store.get("", KIND, old) is not None
            assert store.status().state == "unavailable"
        assert len(caplog.messages) == 1
    assert await store.commit(record())
    assert store.status().state == "ok"
    monkeypatch.setattr(queue, "LONGEST_PAUSE", 0.3)
    with full(file):
        assert not await store.commit(record(SECRET * 10_000))
        assert await store.get("", KIND, old) is not None
    assert store.status().state == "unavailable"
    await asyncio.sleep(0.4)
    assert store.status().state == "ok"


async def test_a_damaged_file(tmp_path: Path, store: Store) -> None:
    """Damage of the file while it is open is an error that names it, and shows no text."""
    file = tmp_path / "store.db"
    ids = [await kept(store, SECRET * 2_000) for _ in range(20)]
    await store.delete("", KIND, ids.pop())
    size = file.stat().st_size
    with file.open("r+b") as damaged:
        # The first two pages stay, so that open connections still work.
        for start in range(8192, size, 4096):
            damaged.seek(start + 7)
            damaged.write(b"\xffRumpelstiltskin\xfe" * 200)
    wrong, shown = 0, []
    for one in ids:
        try:
            await store.get("", KIND, one)
        except StoreUnavailable as error:
            wrong += 1
            shown.append(error.detail)
    assert wrong
    assert SECRET not in str(shown)
    assert store.status().state == "unavailable"
    for call in (
        store.page("", KIND, Query(), same),
        store.update("", KIND, ids[0], {"a": "b"}),
        store.delete("", KIND, ids[1]),
    ):
        await refused(call, "damaged|does not")


@pytest.mark.parametrize("column", ["request", "reply", "metadata"])
async def test_a_damaged_text(tmp_path: Path, store: Store, column: str) -> None:
    """A stored text with invalid JSON or UTF-8 is an error that shows no part of it."""
    file = tmp_path / "store.db"
    name = await kept(store)
    other = sqlite3.connect(file)
    for value in (f'{{"a": "{SECRET}', f"\udcff{SECRET}".encode(errors="surrogateescape"), b"[1]"):
        other.execute(f"UPDATE latimer_objects SET {column} = CAST(? AS TEXT)", (value,))  # noqa: S608
        other.commit()
        for whole in (False, True):
            await refused(store.get("", KIND, name, whole), "damaged")
        await refused(store.page("", KIND, Query(), same), "damaged")
    other.close()


async def test_a_missing_image_is_an_error(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A request is not returned with an empty image; the log has its hash once, and it recovers."""
    one = record(image=PIXEL)
    store.keep(one)
    assert await store.get("", KIND, one.id) is not None
    folder, away = tmp_path / "store.media", tmp_path / "away"
    (medium,) = [file.name for file in folder.rglob("*") if file.is_file()]
    shutil.move(folder, away)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="is missing or damaged"):
            await store.get("", KIND, one.id, whole=True)
    assert caplog.messages == [
        f"the store did not answer a request: the medium {medium} is missing or damaged"
    ]
    assert store.status().state == "unavailable"
    with pytest.raises(StoreUnavailable, match="is missing or damaged"):
        await store.chain("", KIND, one.id)
    assert await store.get("", KIND, one.id) is not None
    assert store.status().state == "ok"
    with pytest.raises(StoreUnavailable):
        await store.get("", KIND, one.id, whole=True)
    assert await store.commit(record())
    assert store.status().state == "ok"
    shutil.move(away, folder)
    found = await store.get("", KIND, one.id, whole=True)
    assert found is not None
    assert found.request == one.request


async def test_a_folder_of_media_that_cannot_be_written(tmp_path: Path, store: Store) -> None:
    """Objects wait for the storage of their images, and are written when it works again."""
    folder = tmp_path / "store.media"
    old = await kept(store)
    folder.write_text("a file in its place")
    new = record(SECRET, image=PIXEL)
    store.keep(new)
    await refused(store.page("", KIND, Query(), same), "the folder of media")
    assert await store.get("", KIND, old) is not None
    folder.unlink()
    assert await listed(store) == [old, new.id]
    found = await store.get("", KIND, new.id, whole=True)
    assert found is not None
    assert found.request == new.request


async def test_an_image_outlives_a_deletion_that_is_not_committed(store: Store) -> None:
    """The file of an image is deleted after its rows, so a process can be killed in between."""
    name = await kept(store, image=PIXEL)
    database = await store.open()
    key = Key("", KIND, name)

    class Killed(Exception):
        pass

    def killed(connection: Any) -> None:
        from latimer.adapter.store import objects

        assert objects.remove(connection, database.files, key)
        raise Killed

    with pytest.raises(Killed):
        await database.write(killed)
    await database.clean()
    found = await store.get("", KIND, name, whole=True)
    assert found is not None
    assert "iVBOR" in str(found.request)


async def test_unused_media_are_deleted_when_their_storage_works_again(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """An object is deleted although the file of its image cannot be, which is deleted later."""
    folder = tmp_path / "store.media"
    first = await kept(store, image=PIXEL)
    second = await kept(store)
    shutil.move(folder, tmp_path / "away")
    folder.write_text("a file in its place")
    assert await store.delete("", KIND, first)
    assert "unused media were not deleted" in caplog.text
    folder.unlink()
    shutil.move(tmp_path / "away", folder)
    assert [one for one in folder.rglob("*") if one.is_file()]
    assert await store.delete("", KIND, second)
    assert not [one for one in folder.rglob("*") if one.is_file()]


async def test_a_late_commit_is_never_listed(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object whose response says that it is not stored is not, although it is written late."""
    monkeypatch.setattr(stores, "COMMIT_SECONDS", 0.1)
    file = tmp_path / "store.db"
    await store.check()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    made_late, kept_late = record(SECRET), record(SECRET)
    store.keep(kept_late)
    start = time.monotonic()
    assert not await store.commit(made_late)
    assert time.monotonic() - start < 0.3
    other.execute("COMMIT")
    other.close()
    assert await listed(store) == [kept_late.id]


async def test_a_written_object_is_removed_if_it_is_withdrawn(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that is withdrawn during its commit is removed, also if that fails at first."""
    database = await store.open()
    one, two = record(SECRET), record(SECRET)
    usual, failures = database.write, 0

    async def write(work: Any, *values: Any) -> object:
        nonlocal failures
        if one.is_withdrawn and not failures:
            failures = 1
            raise StoreUnavailable("gone")
        result: object = await usual(work, *values)
        # The transaction is over, and the client has waited too long.
        one.is_withdrawn = True
        return result

    monkeypatch.setattr(database, "write", write)
    store.keep(one)
    store.keep(two)
    await refused(store.page("", KIND, Query(), same), "gone")
    assert await listed(store) == [two.id]
    assert failures
    assert store.status()._asdict() == {"state": "ok", "waiting": 0, "lost": 0}


async def test_a_rejected_object_is_not_committed(store: Store) -> None:
    """A response that must be stored fails if the database can never take it."""
    await store.check()
    wrong = record()
    wrong.request_id = None  # type: ignore[assignment]
    assert not await store.commit(wrong)
    assert await store.commit(record())


async def test_a_closed_store_can_be_used_again(store: Store) -> None:
    """A store that was closed opens its database again, also in another event loop."""
    first = await kept(store)
    await store.aclose()

    def elsewhere() -> str:
        async def use() -> str:
            both = await asyncio.gather(*(store.get("", KIND, first) for _ in range(3)))
            assert all(both)
            name = await kept(store)
            await store.aclose()
            return name

        return asyncio.run(use())

    second = await asyncio.to_thread(elsewhere)
    assert await listed(store) == [first, second]


async def test_an_event_loop_that_ended_leaves_nothing_behind(store: Store) -> None:
    """An object that a finished event loop queued is written in the next one."""
    queued = record(SECRET)

    async def leave() -> None:
        await store.open()
        store.keep(queued)
        reading = asyncio.create_task(store.page("", KIND, Query(), same))
        await asyncio.sleep(0)
        reading.cancel()

    await asyncio.to_thread(lambda: asyncio.run(leave()))
    async with asyncio.timeout(5):
        assert await listed(store) == [queued.id]


async def test_a_cancelled_read_leaves_the_store_usable(store: Store) -> None:
    """Clients that disconnect while they read disturb nobody."""
    name = await kept(store)
    for pause in (0, 0.0005, 0.001, 0.002):
        tasks = [asyncio.create_task(store.get("", KIND, name)) for _ in range(30)]
        await asyncio.sleep(pause)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await listed(store) == [name]
    assert store.status().state == "ok"


async def test_a_store_that_is_closed_while_it_reads(store: Store) -> None:
    """Reads at the time of closing are answered, or refused as not available."""
    name = await kept(store)
    tasks = [asyncio.create_task(store.get("", KIND, name)) for _ in range(50)]
    await asyncio.sleep(0.002)
    await store.aclose()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert not isinstance(result, BaseException) or isinstance(result, StoreUnavailable)


async def test_two_stores_write_to_one_file(tmp_path: Path) -> None:
    """Two stores that open and write one new file at the same time keep everything."""
    two = [store_at(tmp_path / "store.db") for _ in range(2)]
    for _ in range(10):
        for store in two:
            for _ in range(5):
                store.keep(record())
        await asyncio.gather(*map(listed, two))
    assert len(await listed(two[0])) == 100
    for store in two:
        await store.aclose()


async def test_objects_that_wait_take_little_memory(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects in the queue are packed as JSON, and are written whole when the database is back."""
    monkeypatch.setattr(queue, "LOOSE", 2_000)
    file = tmp_path / "store.db"
    old = await kept(store)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    waiting = [record("x" * 900, image=PIXEL) for _ in range(300)]
    requests = [one.request for one in waiting]
    for one in waiting:
        assert store.keep(one)
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.1)
    assert sum(1 for one in waiting if one.request) < 140
    other.execute("COMMIT")
    other.close()
    await recovered(store)
    for one, request in zip(waiting, requests, strict=True):
        found = await store.get("", KIND, one.id, whole=True)
        assert found is not None
        assert found.request == request
    assert await store.get("", KIND, old) is not None
