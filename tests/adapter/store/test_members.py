"""Tests of the processes that share a store: each is known to run until it ends."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from latimer.adapter.store.database import Database
from latimer.adapter.store.errors import StoreUnavailable
from latimer.adapter.store.members import Members
from latimer.adapter.store.store import Store
from support.stored import opened as opened_at

from .conftest import Opened

# Joins the members of a store, says so, and waits.
JOINS = """
import asyncio, sys
from latimer.adapter.store.config import store_config_of
from latimer.adapter.store.members import Members
from latimer.adapter.store.store import Store

async def main():
    members = Members(Store(store_config_of(sys.argv[1])))
    await members.join()
    print(members.mark, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""

ENDS = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s"


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the setting `store` for an empty database that processes can share."""
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgresql_url")
    return url


async def test_a_member_runs_until_it_leaves(opened: Opened) -> None:
    """A member is seen by all once it has joined, and by none when it has left."""
    async with opened() as one, opened() as other:
        first, second = Members(one), Members(other)
        assert await second.running() == set()
        await first.join()
        await second.join()
        await first.join()
        assert await first.running() == await second.running() == {first.mark, second.mark}
        await first.leave()
        await until(second, {second.mark})
        await first.leave()
        await second.leave()
        await until(first, set())


async def until(members: Members, marks: set[str]) -> None:
    """Wait until these run: PostgreSQL notices the end of a connection a moment later."""
    async with asyncio.timeout(5):
        while await members.running() != marks:
            await asyncio.sleep(0.01)


async def test_who_joins_at_once_shares_an_attempt(store: Store) -> None:
    """Of 64 responses that begin at once, the first joins the members, and the others after it."""
    members = Members(store)
    tried = 0
    join = members._join

    def counted(database: Database) -> None:
        nonlocal tried
        tried += 1
        join(database)

    members._join = counted  # type: ignore[method-assign]
    await asyncio.gather(*(members.join() for _ in range(64)))
    assert tried == 2
    await members.leave()


async def test_a_process_that_is_killed_does_not_run(store: Store, target: str) -> None:
    """The lock of a process ends with it, and leaves nothing behind."""
    begin = sys.executable, "-c", JOINS, target
    process = await asyncio.create_subprocess_exec(*begin, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    mark = (await process.stdout.readline()).decode().strip()
    assert await Members(store).running() == {mark}
    process.kill()
    await process.communicate()
    async with asyncio.timeout(5):
        while await Members(store).running():
            # PostgreSQL notices a lost connection a moment later.
            await asyncio.sleep(0.01)
    if not target.startswith("postgresql"):
        assert not [*Path(target).parent.glob("*-run-*")]


async def test_a_lost_connection_is_replaced(store: Store, target: str) -> None:
    """A member whose connection the database has closed joins again."""
    if not target.startswith("postgresql"):
        pytest.skip("SQLite has no connections")
    members = Members(store)
    await members.join()
    database = await store.open()
    mark = (int(members.mark, 16),)
    await database.read(lambda connection: connection.exec_driver_sql(ENDS, mark).all())
    await members.join()
    assert await members.running() == {members.mark}
    await members.leave()


@pytest.mark.parametrize("name", ["a[1].db", "a*.db"])
async def test_a_file_with_a_name_like_a_pattern(tmp_path: Path, name: str) -> None:
    """A file with such a name has its own processes only."""
    async with opened_at(str(tmp_path / name)) as one, opened_at(str(tmp_path / "ab1.db")) as other:
        first, second = Members(one), Members(other)
        await first.join()
        await second.join()
        assert (await first.running(), await second.running()) == ({first.mark}, {second.mark})
        await first.leave()
        await second.leave()


async def test_a_lock_that_the_disk_refuses(tmp_path: Path) -> None:
    """A file that cannot be made is an error of the store, and the next attempt makes it."""
    target = tmp_path / "store.db"
    async with opened_at(str(target)) as store:
        members = Members(store)
        obstacle = target.with_name(f"store.db-run-{members.mark}.draft")
        obstacle.mkdir()
        with pytest.raises(StoreUnavailable):
            await members.join()
        obstacle.rmdir()
        await members.join()
        assert await members.running() == {members.mark}
        await members.leave()
