"""Tests of a store whose files are moved away while it is open."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from latimer.adapter.store import moved
from latimer.adapter.store.errors import StoreUnavailable
from latimer.adapter.store.place import place_of
from latimer.adapter.store.record import Query
from latimer.adapter.store.store import Store
from support.stored import KIND, PIXEL, record, same


def made(file: Path) -> Store:
    """Return a store in an SQLite file."""
    place = place_of(str(file))
    assert place is not None
    return Store(place)


async def listed(store: Store) -> list[str]:
    """Return the ids of all objects."""
    return [one.id for one in (await store.page("", KIND, Query(), same)).data]


async def kept(store: Store) -> str:
    """Store an object, and return its id."""
    one = record()
    assert store.keep(one)
    assert one.id in await listed(store)
    return one.id


async def test_a_missing_image_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A request is not returned with an empty image; the log has its hash once, and it recovers."""
    store = made(tmp_path / "store.db")
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
    await store.aclose()


@pytest.mark.parametrize("ends", [("",), ("", "-wal", "-shm")])
async def test_a_deleted_file_is_made_again(
    ends: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Objects after a deletion are in a new file, not in one that disappears with the process."""
    monkeypatch.setattr(moved, "LOOK_SECONDS", 0.0)
    file = tmp_path / "store.db"
    store = made(file)
    await kept(store)
    for end in ends:
        os.unlink(f"{file}{end}")
    new = await kept(store)
    assert await listed(store) == [new]
    assert caplog.messages == ["the file of the store was deleted or replaced, and is opened again"]
    assert file.stat().st_mode & 0o777 == 0o600
    await store.aclose()
    other = sqlite3.connect(file)
    assert other.execute("SELECT id FROM latimer_objects").fetchall() == [(new,)]
    assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    other.close()


async def test_a_replaced_file_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that takes the place of the store's is used, and the one that was moved is whole."""
    monkeypatch.setattr(moved, "LOOK_SECONDS", 0.0)
    one, two = made(tmp_path / "one.db"), made(tmp_path / "two.db")
    first, second = await kept(one), await kept(two)
    await two.aclose()
    (tmp_path / "one.db").rename(tmp_path / "moved.db")
    (tmp_path / "two.db").rename(tmp_path / "one.db")
    assert await listed(one) == [second]
    third = await kept(one)
    await one.aclose()
    for name, ids in (("moved.db", [first]), ("one.db", [second, third])):
        other = sqlite3.connect(tmp_path / name)
        found = other.execute("SELECT id FROM latimer_objects ORDER BY id").fetchall()
        assert [row[0] for row in found] == sorted(ids)
        assert other.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        other.close()


async def test_objects_wait_for_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the folder of the file is away, objects wait; they are written when it is back."""
    monkeypatch.setattr(moved, "LOOK_SECONDS", 0.0)
    folder, away = tmp_path / "data", tmp_path / "away"
    folder.mkdir()
    store = made(folder / "store.db")
    old = await kept(store)
    folder.rename(away)
    new = record()
    assert store.keep(new)
    with pytest.raises(StoreUnavailable, match="it cannot be opened"):
        await listed(store)
    assert store.status()._asdict() == {"state": "unavailable", "waiting": 1, "lost": 0}
    away.rename(folder)
    assert await listed(store) == [old, new.id]
    await store.aclose()
