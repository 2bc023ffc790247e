"""Tests of the migrations of a store."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from adapter.store.conftest import Opened, miscounted
from latimer.adapter.store.errors import StoreError, StoreUnavailable
from latimer.adapter.store.records import Query
from support.stored import opened as opened_at
from support.stored import same, store_at

# A store of the first version, with two responses, a chat completion and a conversation.
FIRST = Path(__file__).with_name("version_1.sql")


def described(file: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the columns, keys and indexes of each table of an SQLite file."""
    connection = sqlite3.connect(file)
    try:
        tables = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        found: dict[str, list[tuple[Any, ...]]] = {}
        for name, statement in tables.fetchall():
            found[name] = [("WITHOUT ROWID" in statement,)]
            found[name] += connection.execute(f"PRAGMA table_info({name})").fetchall()
            indexes = connection.execute(f"PRAGMA index_list({name})").fetchall()
            for _, index, *kind in sorted(indexes, key=lambda one: str(one[1])):
                columns = connection.execute(f"PRAGMA index_xinfo({index})").fetchall()
                found[name].append((index, *kind, *columns))
    finally:
        connection.close()
    return found


async def test_a_store_of_the_first_version_is_read(tmp_path: Path) -> None:
    """A file that an earlier Latimer has written opens with all it has, and its schema is ours."""
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    connection = sqlite3.connect(old)
    connection.executescript(FIRST.read_text())
    ids: dict[str, list[str]] = {
        kind: [] for kind in ("chat.completion", "response", "conversation")
    }
    for kind, name in connection.execute("SELECT kind, id FROM latimer_objects ORDER BY id"):
        ids[kind].append(name)
    connection.close()
    async with opened_at(str(old)) as store:
        page = await store.page("", "chat.completion", Query(metadata={"a": "b"}), same)
        assert [one.id for one in page.data] == ids["chat.completion"]
        found = await store.get("", "chat.completion", page.data[0].id, whole=True)
        assert found is not None
        assert found.request["messages"] == [{"role": "user", "content": "Hello"}]
        chain = await store.chain("", "response", ids["response"][-1])
        assert [one.id for one in chain] == ids["response"]
        (conversation,) = ids["conversation"]
        assert await store.append("", conversation, [{"id": "msg_2", "content": "Hi"}])
        items = await store.all_items("", conversation)
        assert items is not None
        assert [one["content"] for one in items] == ["Hello", "Hi"]
        assert await miscounted(await store.open()) == (0, 0)
    async with opened_at(str(new)) as store:
        await store.open()
    assert described(new) == described(old)


async def test_the_schema_is_the_same_in_each_database(opened: Opened) -> None:
    """Each kind of database has the tables, columns, keys and indexes of `schema.py`."""
    from latimer.adapter.store.schema import schema
    from sqlalchemy import Connection, inspect

    def found(connection: Connection) -> dict[str, tuple[set[Any], set[str], set[Any]]]:
        seen = inspect(connection)
        return {
            name: (
                {one["name"] for one in seen.get_columns(name)},
                set(seen.get_pk_constraint(name)["constrained_columns"]),
                {(one["name"], *one["column_names"]) for one in seen.get_indexes(name)},
            )
            for name in seen.get_table_names()
        }

    async with opened() as store:
        tables = await (await store.open()).read(found)
    for name, table in schema.tables.items():
        columns, key, indexes = tables.pop(name)
        assert columns == {column.name for column in table.columns}
        assert key == {column.name for column in table.primary_key}
        assert indexes == {
            (index.name, *(column.name for column in index.columns)) for index in table.indexes
        }
    assert tables == {}


async def test_a_database_is_migrated_once(opened: Opened) -> None:
    """A second start finds the newest schema and changes nothing."""
    from latimer.adapter.store.schema import NEWEST, migrate

    async with opened() as store:
        database = await store.open()
        assert await database.write(migrate) == (NEWEST, NEWEST)


async def test_one_of_several_processes_migrates(target: str) -> None:
    """Of processes that open an empty database at once, one migrates and the others wait."""
    from latimer.adapter.store.database import Database
    from latimer.adapter.store.schema import NEWEST

    if target == "memory":
        pytest.skip("a store in memory belongs to one process")
    place = store_at(target).place
    databases = [Database(place) for _ in range(5)]
    found = await asyncio.gather(*(one.open() for one in databases))
    assert sorted(found) == [(0, NEWEST), *[(NEWEST, NEWEST)] * 4]
    for one in databases:
        await one.aclose()


async def test_a_newer_schema_is_refused(opened: Opened, target: str) -> None:
    """A database that a newer Latimer has migrated is not opened."""
    if target == "memory":
        pytest.skip("a store in memory has no other version")
    async with opened() as store:
        database = await store.open()
        change = "UPDATE latimer_schema SET version = 99"
        await database.write(lambda connection: connection.exec_driver_sql(change) and None)
    async with opened() as store:
        with pytest.raises(StoreError, match="version 99"):
            await store.open()


@pytest.mark.parametrize(
    ("content", "reason"), [(b"x" * 5_000, "not a database"), (None, "cannot be opened")]
)
async def test_a_file_that_is_no_database_is_refused(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    """Another file, and a folder that became one after the settings were read, are refused."""
    file = tmp_path / "store.db"
    store = store_at(file)
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(StoreUnavailable, match=reason):
        await store.open()
    assert content is None or file.read_bytes() == content


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A file in a folder that does not exist is refused, and the folder is not made."""
    with pytest.raises(StoreError, match="does not exist"):
        await store_at(tmp_path / "none" / "store.db").open()
    assert not (tmp_path / "none").exists()


async def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    """A migration is one transaction: a table in its way leaves the file as it was."""
    file = tmp_path / "store.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE latimer_media (other TEXT)")
    connection.close()
    with pytest.raises(StoreUnavailable):
        await store_at(file).open()
    with sqlite3.connect(file) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
    connection.close()
    assert names == ["latimer_media"]
