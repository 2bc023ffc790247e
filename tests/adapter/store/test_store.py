"""Tests of the store over SQLite in memory, an SQLite file, and PostgreSQL."""

from __future__ import annotations

import asyncio
import random
import sqlite3
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from adapter.store.conftest import Opened, miscounted
from latimer.adapter.store import database as databases
from latimer.adapter.store.errors import StoreUnavailable
from latimer.adapter.store.records import Query, Record, new_id
from latimer.adapter.store.store import COMMIT_SECONDS, Store
from support.stored import KIND, PIXEL, record, same, store_at
from support.turns import FEW, turns_after_the_first


def keep(store: Store, *records: Record) -> list[str]:
    """Queue records and return their ids."""
    assert all(store.keep(one) for one in records)
    return [one.id for one in records]


async def listed(store: Store, owner: str = "", kind: str = KIND, **query: object) -> list[str]:
    """Return the ids of a page."""
    page = await store.page(owner, kind, Query(**query), same)  # type: ignore[arg-type]
    return [one.id for one in page.data]


async def test_a_kept_object_is_returned_as_it_was(store: Store) -> None:
    """An object is found at once after it was queued, with its request, reply and metadata."""
    made = record("Héllo \0 \N{GRINNING FACE}", metadata={"a": "b"})
    keep(store, made)
    found = await store.get("", KIND, made.id, whole=True)
    assert found is not None
    assert (found.id, found.kind, found.owner, found.created_at, found.model) == (
        made.id, made.kind, made.owner, made.created_at, made.model,
    )  # fmt: skip
    assert (found.request, found.reply, found.metadata) == (
        made.request, made.reply, made.metadata,
    )  # fmt: skip
    listed = (await store.page("", KIND, Query(), same)).data
    assert [one.request for one in listed] == [{"store": True}]


async def test_who_waits_until_a_store_is_open_goes_on_at_once(target: str) -> None:
    """The first requests of a store, which wait until it is open, go on together."""
    store = store_at(target)
    assert await turns_after_the_first(store.open() for _ in range(64)) < FEW
    await store.aclose()


async def test_a_busy_event_loop_loses_no_object(target: str) -> None:
    """An object that the database has taken in time is stored, also if its answer is late."""
    store = store_at(target)
    await store.open()
    # Longer than a response waits for a database.
    asyncio.get_running_loop().call_later(0.001, time.sleep, 2 * COMMIT_SECONDS)
    assert await store.commit(record("a"))
    await store.aclose()


async def test_pages_have_every_object_once_in_order(store: Store) -> None:
    """Pages in either direction have every object once, and `has_more` is false on the last."""
    ids = keep(store, *(record(metadata={"n": str(i % 3)}) for i in range(50)))
    for descending in (False, True):
        found: list[str] = []
        after, more = None, True
        while more:
            page = await store.page("", KIND, Query(after, 7, descending), same)
            found += [one.id for one in page.data]
            after, more = found[-1], page.has_more
        assert found == (ids[::-1] if descending else ids)


async def test_a_page_continues_after_a_deleted_object(store: Store) -> None:
    """A client that deletes the objects of each page still sees every object."""
    ids = keep(store, *(record() for _ in range(9)))
    seen: list[str] = []
    after = None
    while page := (await store.page("", KIND, Query(after, 2), same)).data:
        for one in page:
            seen.append(one.id)
            assert await store.delete("", KIND, one.id)
        after = page[-1].id
    assert seen == ids


async def test_filters_are_all_applied(store: Store) -> None:
    """A list can be filtered by several pairs of metadata and the model together."""
    made = [
        record(model=f"m{i % 2}", metadata={"a": str(i % 3), "b": str(i % 5), "mark": "x"})
        for i in range(60)
    ]
    ids = keep(store, *made)
    for model in (None, "m1"):
        for metadata in ({}, {"a": "1"}, {"a": "1", "b": "2"}, {"mark": "x", "b": "4"}):
            expected = [
                ids[i]
                for i, one in enumerate(made)
                if model in (None, one.model) and metadata.items() <= one.metadata.items()
            ]
            found = await listed(store, limit=100, model=model, metadata=metadata)
            assert found == expected, (model, metadata)
    assert await listed(store, metadata={"a": "9"}) == []
    assert await listed(store, model="m2") == []


async def test_a_model_can_have_any_name(store: Store) -> None:
    """A name with a null character, which PostgreSQL does not take, is stored and found."""
    made = record(model="a\0b")
    keep(store, made)
    assert await listed(store, model="a\0b") == [made.id]
    assert store.status().lost == 0


async def test_owners_and_kinds_are_separate(store: Store) -> None:
    """An object is found, listed, changed and deleted only by its owner, and as its kind."""
    mine, other = record(owner="a"), record(owner="b", kind="response")
    keep(store, mine, other)
    for owner, kind in (("b", KIND), ("", KIND), ("a", "response")):
        assert await store.get(owner, kind, mine.id) is None
        assert await store.update(owner, kind, mine.id, {}) is None
        assert not await store.delete(owner, kind, mine.id)
        assert mine.id not in await listed(store, owner, kind)
    assert await listed(store, "a") == [mine.id]
    assert await listed(store, "b", "response") == [other.id]


async def test_an_update_replaces_metadata_everywhere(store: Store) -> None:
    """An update changes the metadata of the object, of its reply, and of filters."""
    made = record(metadata={"old": "1", "same": "2"})
    keep(store, made)
    changed = await store.update("", KIND, made.id, {"new": "1", "same": "3"})
    assert changed is not None
    assert changed.metadata == changed.reply["metadata"] == {"new": "1", "same": "3"}
    assert await listed(store, metadata={"new": "1"}) == [made.id]
    assert await listed(store, metadata={"same": "3"}) == [made.id]
    assert await listed(store, metadata={"old": "1"}) == []
    assert await listed(store, metadata={"same": "2"}) == []


async def test_media_are_stored_once_and_deleted_with_the_last_object(store: Store) -> None:
    """Two requests with one image share its bytes, which the second deletion deletes."""
    one, two = record(image=PIXEL), record(image=PIXEL)
    keep(store, one, two)
    for made in (one, two):
        found = await store.get("", KIND, made.id, whole=True)
        assert found is not None
        assert found.request == made.request
    database = await store.open()
    blobs = database.files.blobs

    async def count() -> tuple[int, int]:
        rows = await database.read(
            lambda connection: connection.exec_driver_sql("SELECT hash FROM latimer_media").all()
        )
        return len(rows), 0 if blobs is None else len([*blobs.hashes()])

    outside = 0 if blobs is None else 1
    assert await count() == (1, outside)
    assert await store.delete("", KIND, one.id)
    assert await count() == (1, outside)
    assert await store.delete("", KIND, two.id)
    assert await count() == (0, 0)


async def test_totals_are_zero_after_everything_is_deleted(store: Store) -> None:
    """The totals count objects and their media exactly, also after updates and deletions."""
    ids = keep(store, *(record("x" * i, image=PIXEL, metadata={"a": "b"}) for i in range(5)))
    for name in ids:
        await store.update("", KIND, name, {"longer": "y" * 100})
        await store.delete("", KIND, name)
    database = await store.open()
    rows = await database.read(
        lambda connection: connection.exec_driver_sql("SELECT value FROM latimer_totals").all()
    )
    assert [tuple(row) for row in rows] == [(0,), (0,)]


async def test_a_store_keeps_at_most_its_size(opened: Opened) -> None:
    """The oldest objects make room for new ones, with their media, and the newest stay."""
    async with opened(size=1) as store:
        ids = keep(store, *(record("x" * 100_000) for _ in range(20)))
        found = await listed(store, limit=100)
        assert found == ids[-len(found) :]
        assert 3 <= len(found) <= 6


async def test_the_owner_with_the_most_makes_room(opened: Opened) -> None:
    """An owner that fills the store deletes its own oldest objects, and none of an owner with
    less; owners with much lose some in turn."""
    async with opened(size=1) as store:
        few = keep(store, *(record("x" * 50_000, "alice") for _ in range(3)))
        many: list[str] = []
        for _ in range(4):
            many += keep(store, *(record("x" * 40_000, "bob") for _ in range(10)))
            found = await listed(store, "bob", limit=100)
            assert found == many[-len(found) :]
            assert await listed(store, "alice", limit=100) == few
        keep(store, *(record("x" * 40_000, "carol") for _ in range(30)))
        assert await listed(store, "alice", limit=100) == few
        counts = [len(await listed(store, name, limit=100)) for name in ("bob", "carol")]
        assert 2 <= min(counts) <= max(counts) <= min(counts) + 4
        image = f"{PIXEL.partition(',')[0]},{b64encode(bytes(900_000)).decode()}"
        keep(store, record(owner="dave", image=image))
        assert await listed(store, "alice", limit=100) == few
        assert await miscounted(await store.open()) == (0, 0)


async def test_media_make_room_with_their_objects(opened: Opened) -> None:
    """Only as many objects are deleted as the size of their images requires."""
    head = PIXEL.partition(",")[0]
    images = [b64encode(bytes([i]) * 100_000).decode() for i in range(20)]
    async with opened(size=1) as store:
        ids = keep(store, *(record(image=f"{head},{image}") for image in images))
        found = await listed(store, limit=100)
        assert found == ids[-len(found) :]
        assert 8 <= len(found) <= 10


async def test_a_shared_image_stays_with_its_last_object(opened: Opened) -> None:
    """Objects that share an image are deleted until the store fits, and the newest has it."""
    image = f"{PIXEL.partition(',')[0]},{b64encode(bytes(100_000)).decode()}"
    async with opened(size=1) as store:
        ids = keep(store, *(record("x" * 100_000, image=image) for _ in range(20)))
        keep(store, record("x" * 100_000))
        assert 3 <= len(await listed(store, limit=100)) <= 9
        found = await store.get("", KIND, ids[-1], whole=True)
        assert found is not None
        assert found.request["messages"][0]["content"][0]["image_url"]["url"] == image


async def test_an_object_is_gone_after_its_age(
    opened: Opened, later: Callable[[float], None]
) -> None:
    """An object that is too old is neither found, listed, changed nor kept in the database."""
    async with opened(age=0.5) as store:
        name, *_ = keep(store, record())
        assert await listed(store) == [name]
        later(0.6)
        assert await listed(store) == []
        assert await store.get("", KIND, name) is None
        assert await store.update("", KIND, name, {}) is None
        database = await store.open()
        count = "SELECT count(*) FROM latimer_objects"
        async with asyncio.timeout(5):
            while await database.read(lambda one: one.exec_driver_sql(count).scalar()):
                await asyncio.sleep(0.01)


async def test_a_committed_object_is_found(store: Store) -> None:
    """An object that must be stored before its response ends is stored then."""
    made = record()
    await store.open()
    assert await store.commit(made)
    assert store.status().waiting == 0
    assert await listed(store) == [made.id]


async def test_a_withdrawn_object_leaves_its_id_to_another(store: Store) -> None:
    """The failure of a response stays, also if the response itself was written and withdrawn."""
    made, failed = record(), record("failed")
    failed.id, failed.created_at = made.id, made.created_at
    await store.write([made])
    made.is_withdrawn = True
    await store.write([made, failed])
    found = await store.get("", made.kind, made.id)
    assert found is not None
    assert found.reply["choices"][0]["message"]["content"] == "failed"


async def test_a_response_does_not_wait_for_the_first_opening(opened: Opened, target: str) -> None:
    """A store in memory takes an object before it is open, and a reader waits for it."""
    async with opened() as store:
        made = record()
        await store.begin()
        assert await store.commit(made)
        assert store.status().waiting == (1 if target == "memory" else 0)
        found = await store.get("", KIND, made.id)
        assert found is not None
        assert store.status().waiting == 0


async def test_a_required_store_is_waited_for(opened: Opened) -> None:
    """A response that has to be stored waits, also for the first opening of the store."""
    async with opened(required=True) as store:
        await store.begin()
        assert await store.commit(record())
        assert store.status().waiting == 0


async def test_objects_outlive_the_process(opened: Opened, target: str) -> None:
    """A durable store has its objects after it was closed; one in memory has not."""
    async with opened() as store:
        name, *_ = keep(store, record())
        await listed(store)
    async with opened() as store:
        assert await listed(store) == ([] if target == "memory" else [name])


async def test_what_waits_is_written_at_the_end(opened: Opened, target: str) -> None:
    """Closing a store writes its queue first."""
    if target == "memory":
        pytest.skip("a store in memory ends with the process")
    async with opened() as store:
        name, *_ = keep(store, record())
    async with opened() as store:
        assert await listed(store) == [name]


async def test_concurrent_transactions_lose_nothing(store: Store) -> None:
    """A hundred transactions at once, of which every fifth is rolled back, keep the others."""
    from latimer.adapter.store import conversations

    database = await store.open()
    await store.page("", KIND, Query(), same)
    made = [[record() for _ in range(5)] for _ in range(90)]

    class Rollback(Exception):
        pass

    async def insert(index: int) -> None:
        def work(connection: Any) -> None:
            conversations.write(connection, database.files, made[index], None)
            if index % 5 == 0:
                raise Rollback

        # The store itself writes in one thread; here many threads write at once.
        with suppress(Rollback):
            await asyncio.to_thread(database._run, work, True)

    await asyncio.gather(*map(insert, range(90)))
    expected = [one.id for index, some in enumerate(made) if index % 5 for one in some]
    found = await listed(store, limit=1000)
    assert sorted(found) == sorted(expected)


async def test_one_wrong_row_loses_only_itself(store: Store) -> None:
    """A record that the database can never take does not take others of its batch with it."""
    first, wrong, last = record(), record(), record()
    wrong.request_id = None  # type: ignore[assignment]
    keep(store, first, wrong, last)
    assert await listed(store) == [first.id, last.id]
    assert store.status()._asdict() == {"state": "ok", "waiting": 0, "lost": 1}


def test_the_ids_of_objects_cannot_be_computed() -> None:
    """The random part of an id does not follow from the ids that a client has seen."""
    found = set[str]()
    for _ in range(2):
        random.seed(0)
        found |= {new_id("resp_", digits)[0][-digits:] for digits in (10, 13, 32)}
    assert sorted(map(len, found)) == [10, 10, 13, 13, 32, 32]


async def test_an_unknown_object_is_not_found(store: Store) -> None:
    """Nothing is opened in memory to find that nothing was ever stored."""
    assert await store.get("", KIND, new_id("chatcmpl-")[0]) is None
    assert await listed(store) == []
    assert not await store.delete("", KIND, "none")


def test_a_store_imports_its_database_when_it_is_needed() -> None:
    """Neither the adapter nor an unused store imports SQLAlchemy."""
    code = (
        "import sys; import latimer.adapter.app; from latimer.adapter.store.store import Store;"
        "from latimer.adapter.store.config import store_config_of;"
        "Store(store_config_of('memory'));"
        "sys.exit('sqlalchemy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_deleted_text_is_in_no_file(tmp_path: Path) -> None:
    """The text of a deleted object is neither in the file nor in SQLite's log of changes."""
    store = store_at(tmp_path / "store.db")
    secret = "Rumpelstiltskin"
    name, *_ = keep(store, record(secret * 100, metadata={"name": secret}, image=PIXEL), record())
    assert await store.delete("", KIND, name)
    for file in [*tmp_path.rglob("*")]:  # noqa: ASYNC240
        assert file.is_dir() or secret.encode() not in file.read_bytes(), file
    assert not [*(tmp_path / "store.media").rglob("*.*")]
    await store.aclose()


async def test_others_cannot_read_a_new_file(tmp_path: Path) -> None:
    """The file of a store and its log of changes are for the owner of the process only."""
    file = tmp_path / "store.db"
    store = store_at(file)
    keep(store, record())
    await listed(store)
    for name in ("store.db", "store.db-wal"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    await store.aclose()


@pytest.mark.slow
async def test_a_locked_file_keeps_objects_in_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process locks the file, objects wait; afterwards they are stored."""
    monkeypatch.setattr(databases, "_EVERY", ("PRAGMA busy_timeout=200",))
    file = tmp_path / "store.db"
    store = store_at(file)
    await store.open()
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    name, *_ = keep(store, record())
    with pytest.raises(StoreUnavailable, match="locked by another process"):
        await store.page("", KIND, Query(), same)
    assert store.status()._asdict() == {"state": "unavailable", "waiting": 1, "lost": 0}
    other.execute("COMMIT")
    other.close()
    assert await listed(store) == [name]
    assert store.status()._asdict() == {"state": "ok", "waiting": 0, "lost": 0}
    await store.aclose()


async def test_sizes_are_bytes(opened: Opened) -> None:
    """A limit in bytes holds for text of characters that take several bytes, too."""
    async with opened(size=1) as store:
        keep(store, *(record("\N{GRINNING FACE}" * 25_000) for _ in range(20)))
        assert 3 <= len(await listed(store, limit=100)) <= 6


async def test_an_object_larger_than_the_store_evicts_nothing(opened: Opened) -> None:
    """An object that can never fit is lost alone, and counted."""
    async with opened(size=1) as store:
        ids = keep(store, *(record() for _ in range(3)))
        keep(store, record("x" * 600_000))
        keep(store, record(image="data:image/png;base64," + "A" * 2_000_000))
        assert await listed(store) == ids
        assert store.status().lost == 2


async def test_updated_metadata_are_nowhere_else(store: Store) -> None:
    """The request is stored without its metadata, which an update replaces."""
    made = record(metadata={"old": "1"})
    made.request = {**made.request, "metadata": {"old": "1"}}
    keep(store, made)
    await store.update("", KIND, made.id, {})
    found = await store.get("", KIND, made.id, whole=True)
    assert found is not None
    assert "old" not in str(found)
