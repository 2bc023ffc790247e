"""Tests that deleted text leaves SQLite's log of changes."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest
from latimer.adapter.store import database
from latimer.adapter.store.store import Store
from support.stored import KIND, opened, record

SECRET = "Rumpelstiltskin"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "PAUSE", 0.1)


async def kept(store: Store, text: str) -> str:
    """Store an object, and return its id when it is written."""
    one = record(text)
    assert store.keep(one)
    assert await store.get("", KIND, one.id) is not None
    return one.id


def is_in_a_file(folder: Path) -> bool:
    """Return True if a file of a folder has the secret."""
    return any(SECRET.encode() in file.read_bytes() for file in folder.glob("store.db*"))


async def vanished(folder: Path) -> None:
    """Wait until no file of a folder has the secret."""
    async with asyncio.timeout(5):
        while is_in_a_file(folder):
            await asyncio.sleep(0.05)


async def test_a_reader_holds_no_deletion(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While another process reads, a DELETE ends at once; its text leaves the log afterwards."""
    async with opened(str(tmp_path / "store.db")) as store:
        name = await kept(store, SECRET)
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM latimer_objects").fetchall()
        start = time.monotonic()
        assert await store.delete("", KIND, name)
        assert await store.commit(record())
        assert time.monotonic() - start < 1
        async with asyncio.timeout(5):
            while "deleted text" not in caplog.text:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        assert caplog.text.count("deleted text is still in the log of changes") == 1
        assert is_in_a_file(tmp_path)
        other.execute("COMMIT")
        await vanished(tmp_path)
        other.close()


async def test_a_writer_still_waits_for_another_one(tmp_path: Path) -> None:
    """After a checkpoint, a transaction waits for the lock of another process as before."""
    async with opened(str(tmp_path / "store.db")) as store:
        await store.delete("", KIND, await kept(store, SECRET))
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = asyncio.create_task(kept(store, "text"))
        await asyncio.sleep(0.5)
        other.execute("COMMIT")
        other.close()
        assert await waiting
        assert store.status().state == "ok"


async def test_evicted_text_is_in_no_file(tmp_path: Path) -> None:
    """The text of an object that made room for others leaves the log of changes."""
    async with opened(str(tmp_path / "store.db"), size=1) as store:
        await kept(store, SECRET)
        await kept(store, "a" * 300_000)
        assert is_in_a_file(tmp_path)
        await kept(store, "b" * 300_000)
        await vanished(tmp_path)


async def test_expired_text_is_in_no_file(tmp_path: Path) -> None:
    """The text of an object that is too old leaves the log of changes."""
    async with opened(str(tmp_path / "store.db"), age=0.5) as store:
        await kept(store, SECRET)
        assert is_in_a_file(tmp_path)
        await vanished(tmp_path)
