"""Stores on each kind of database."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
from latimer.adapter.store.database import Database
from latimer.adapter.store.store import Store
from support import stored

KINDS = ("memory", "sqlite", "postgresql")
Opened = Callable[..., AbstractAsyncContextManager[Store]]


_COUNTS = """
SELECT (SELECT value FROM latimer_totals WHERE name = 'objects')
       - (SELECT count(*) FROM latimer_objects),
       (SELECT value FROM latimer_totals WHERE name = 'bytes')
       - (SELECT coalesce(sum(size), 0) FROM latimer_objects)
       - (SELECT coalesce(sum(size), 0) FROM latimer_media)
"""


async def miscounted(database: Database) -> tuple[int, int]:
    """Return by how many objects and bytes the totals of a store are too large."""
    return await database.read(lambda connection: tuple(connection.exec_driver_sql(_COUNTS).one()))


@pytest.fixture(params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the setting `store` for an empty database of each kind."""
    if request.param == "memory":
        return "memory"
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture
def opened(target: str) -> Opened:
    """Return a function that opens a store on the database; a second one opens it again."""
    return partial(stored.opened, target)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the clock of the machine ahead, as this process sees it."""
    ahead, seconds, nanoseconds = 0.0, time.time, time.time_ns

    def set_ahead(by: float) -> None:
        nonlocal ahead
        ahead += by

    monkeypatch.setattr(time, "time", lambda: seconds() + ahead)
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(ahead * 1e9))
    return set_ahead


@pytest.fixture
async def store(opened: Opened) -> AsyncIterator[Store]:
    """Yield a store on each kind of database."""
    async with opened() as made:
        yield made
