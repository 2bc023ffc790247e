"""Delete objects for the operator of a store, and correct its totals.

Each step is a short transaction, and there is a pause after it. So a server that uses the same
database can write meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, ScalarSelect, func, select

from . import retention
from .objects import count, total
from .open_store import OpenStore
from .retention import Freed
from .selection import Mark, Selection, some_after
from .tables import media, objects, totals

# Objects that are looked at in one transaction.
PART = 1_000

Show = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Limits:
    """The objects to delete.

    Args:
        selection: only these objects are deleted, the oldest first.
        before: microseconds since 1970; older objects are deleted.
        most: the bytes that the store may have afterwards.
    """

    selection: Selection
    before: int | None = None
    most: int | None = None


async def prune(store: OpenStore, limits: Limits, show: Show) -> Freed:
    """Delete the objects beyond the limits; return their number and bytes.

    Args:
        show: gets the number of deleted objects from time to time.

    Raises:
        StoreUnavailable: the database cannot answer; what was deleted before stays deleted.
    """
    works = []
    if limits.before is not None:
        works.append(
            partial(
                retention.expire,
                files=store.files,
                before=limits.before,
                selection=limits.selection,
            )
        )
    if limits.most is not None:
        works.append(
            partial(
                retention.evict, files=store.files, most=limits.most, selection=limits.selection
            )
        )
    number = size = 0
    for work in works:
        async for freed in store.steps(work):
            number, size = number + freed.objects, size + freed.bytes
            show(number)
    return Freed(number, size)


async def plan(store: OpenStore, limits: Limits, show: Show) -> Freed:
    """Return what `prune` would delete; media that several objects share are not counted."""
    before = limits.before or 0
    excess = 0
    if limits.most is not None:
        excess = await store.read(partial(total, name="bytes")) - limits.most
    number = size = 0
    mark: Mark | None = None
    while rows := await store.read(
        partial(some_after, mark=mark, most=PART, selection=limits.selection)
    ):
        ids = [row.id for row in rows if row.media is not None]
        own = await store.read(partial(store.files.own, ids=ids))
        for row in rows:
            if row.used_at >= before and size >= excess:
                return Freed(number, size)
            number, size = number + 1, size + row.size + own.get(row.id, 0)
        show(number)
        mark = Mark(rows[-1].created_at, rows[-1].id)
    return Freed(number, size)


async def miscounted(store: OpenStore) -> Freed:
    """Return by how many objects and bytes the totals of a store are too small."""
    return await store.read(_miscounted)


async def recount(store: OpenStore) -> Freed:
    """Correct the totals of a store, and return the corrections.

    Every transaction adds what it changes to the totals. So a difference, which is found without a
    lock, stays right while other processes write.
    """
    wrong = await miscounted(store)
    if any(wrong):
        await store.database.write(partial(count, number=wrong.objects, size=wrong.bytes))
    return wrong


def _miscounted(connection: Connection) -> Freed:
    def counted(name: str) -> ScalarSelect[int]:
        return select(totals.c.value).where(totals.c.name == name).scalar_subquery()

    # One statement sees one state of the database.
    number, size, of_media, known, known_size = connection.execute(
        select(
            select(func.count()).select_from(objects).scalar_subquery(),
            select(func.coalesce(func.sum(objects.c.size), 0)).scalar_subquery(),
            select(func.coalesce(func.sum(media.c.size), 0)).scalar_subquery(),
            counted("objects"),
            counted("bytes"),
        )
    ).one()
    return Freed(number - known, int(size) + int(of_media) - known_size)
