"""Tests of the migrations of a store."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from adapter.store.conftest import Opened
from latimer.adapter.store.config import place_of
from latimer.adapter.store.errors import StoreError, StoreUnavailable
from latimer.adapter.store.store import Store


async def test_the_migrated_schema_is_the_one_of_the_tables(opened: Opened) -> None:
    """The migrations make exactly the tables, columns, keys and indexes that `tables.py` has."""
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
        database = (await store.open()).database
        tables = await database.read(found)
    for name, table in schema.tables.items():
        columns, key, indexes = tables.pop(name)
        assert columns == {column.name for column in table.columns}
        assert key == {column.name for column in table.primary_key} or name == "latimer_schema"
        assert indexes == {
            (index.name, *(column.name for column in index.columns)) for index in table.indexes
        }
    assert tables == {}


async def test_a_database_is_migrated_once(opened: Opened) -> None:
    """A second start finds the newest schema and changes nothing."""
    from latimer.adapter.store.schema import NEWEST, migrate

    async with opened() as store:
        database = (await store.open()).database
        assert await database.write(migrate) == (NEWEST, NEWEST)


async def test_one_of_several_processes_migrates(target: str) -> None:
    """Of processes that open an empty database at once, one migrates and the others wait."""
    from latimer.adapter.store.database import Database
    from latimer.adapter.store.schema import NEWEST

    if target == "memory":
        pytest.skip("a store in memory belongs to one process")
    place = place_of(target)
    assert place is not None
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
        database = (await store.open()).database
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
    place = place_of(str(file))
    assert place is not None
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(StoreUnavailable, match=reason):
        await Store(place).open()
    assert content is None or file.read_bytes() == content


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A file in a folder that does not exist is refused, and the folder is not made."""
    place = place_of(str(tmp_path / "none" / "store.db"))
    assert place is not None
    with pytest.raises(StoreError, match="does not exist"):
        await Store(place).open()
    assert not (tmp_path / "none").exists()


async def test_a_migration_that_fails_changes_nothing(tmp_path: Path) -> None:
    """A migration is one transaction: a table in its way leaves the file as it was."""
    file = tmp_path / "store.db"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE latimer_media (other TEXT)")
    connection.close()
    place = place_of(str(file))
    assert place is not None
    with pytest.raises(StoreUnavailable):
        await Store(place).open()
    with sqlite3.connect(file) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
    connection.close()
    assert names == ["latimer_media"]
