"""Delete objects by age and by size, those first that were not used for the longest time.

An object is used when it is created, and when another one continues it. A chain is deleted whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, or_, select

from .blobs import MANY, Files
from .database import Database
from .objects import ALL, Selection, remove_rows, total
from .records import ROW
from .schema import media, objects, uses

# The bytes of objects and media that are deleted in one transaction, about.
BYTES = 32 << 20
# Seconds after which bytes without a row are not those of a request that is being stored.
AGE = 3600.0

_NAMES = ("id", "owner", "kind", "created_at", "chain", "metadata", "size")
_COLUMNS = [*(objects.c[name] for name in _NAMES), objects.c.media.is_not(None).label("has_media")]


class Freed(NamedTuple):
    """Deleted objects, and their bytes with those of their media."""

    objects: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The objects to delete.

    Args:
        selection: only these objects are deleted, the oldest first.
        before: microseconds since 1970; older objects are deleted.
        most: the bytes that the store may have afterwards.
    """

    selection: Selection = ALL
    before: int | None = None
    most: int | None = None


def make_room(connection: Connection, files: Files, most: int | None) -> bool:
    """Delete objects until the store has at most this many bytes; return True if any was deleted.

    Args:
        most: None for no limit.
    """
    evicted = False
    while most is not None and _remove_oldest(connection, files, Limits(most=most)):
        files.has_evicted = evicted = True
    return evicted


def _remove_oldest(connection: Connection, files: Files, limits: Limits) -> Freed | None:
    """Delete some objects beyond one limit, few enough for a short transaction; None without any.

    Objects that another process is deleting are left to it.
    """
    conditions, excess = limits.selection.where(), None
    if limits.before is not None:
        conditions.append(objects.c.used_at < limits.before)
    if limits.most is not None:
        excess = total(connection, "bytes") - limits.most
        if excess <= 0:
            return None
    most = MANY if excess is None else min(MANY, excess // ROW + 1)
    order = (objects.c.used_at, objects.c.id)
    oldest = select(*_COLUMNS).where(*conditions).order_by(*order).limit(most)
    rows = connection.execute(oldest.with_for_update(skip_locked=True)).all()
    if not rows:
        return None
    limit = BYTES if excess is None else min(excess, BYTES)
    sizes = files.own(connection, [row.id for row in rows if row.has_media])
    some: list[Row[Any]] = []
    for row in rows:
        if limit <= 0:
            break
        some.append(row)
        limit -= row.size + sizes.get(row.id, 0)
    if chains := {row.chain for row in some if row.chain is not None}:
        known = {row.id for row in some}
        found = connection.execute(select(*_COLUMNS).where(objects.c.chain.in_(chains)))
        some += [row for row in found if row.id not in known]
    return Freed(len(some), remove_rows(connection, files, some))


async def prune(
    database: Database, limits: Limits, show: Callable[[int], object] = lambda _number: None
) -> Freed:
    """Delete the objects beyond the limits; return their number and bytes.

    Each step is a short transaction, and there is a pause after it. So a server that uses the same
    database can write meanwhile.

    Args:
        show: gets the number of deleted objects from time to time.

    Raises:
        StoreUnavailable: the database cannot answer; what was deleted before stays deleted.
    """
    number = size = 0
    for one in (replace(limits, most=None), replace(limits, before=None)):
        if one.before is not None or one.most is not None:
            async for freed in database.steps(_remove_oldest, database.files, one):
                number, size = number + freed.objects, size + freed.bytes
                show(number)
    return Freed(number, size)


def plan(connection: Connection, limits: Limits) -> Freed:
    """Return what `prune` would delete; media that several objects share are not counted."""
    alone = (
        select(func.min(uses.c.id).label("id"), uses.c.hash)
        .group_by(uses.c.hash)
        .having(func.count() == 1)
        .subquery()
    )
    of_media = (
        select(alone.c.id, func.sum(media.c.size).label("size"))
        .join(media, media.c.hash == alone.c.hash)
        .group_by(alone.c.id)
        .subquery()
    )
    size = objects.c.size + func.coalesce(of_media.c.size, 0)
    until = func.sum(size).over(order_by=(objects.c.used_at, objects.c.id))
    ordered = (
        select(objects.c.used_at, size.label("size"), (until - size).label("earlier"))
        .outerjoin(of_media, of_media.c.id == objects.c.id)
        .where(*limits.selection.where())
        .subquery()
    )
    excess = 0 if limits.most is None else total(connection, "bytes") - limits.most
    beyond = or_(ordered.c.used_at < (limits.before or 0), ordered.c.earlier < excess)
    number, freed = connection.execute(
        select(func.count(), func.sum(ordered.c.size)).where(beyond)
    ).one()
    return Freed(number, int(freed or 0))


async def remove_unused(database: Database, delete: bool = True) -> Freed:
    """Delete the media outside the database that no object has; return their number and bytes.

    Args:
        delete: False to count them only.

    Raises:
        StoreUnavailable: the database or the storage of media cannot answer.
    """
    number = size = 0
    blobs = iter(()) if database.files.blobs is None else database.files.blobs.hashes()
    while some := await asyncio.to_thread(list, islice(blobs, MANY)):
        sizes = {blob.hash: blob.size for blob in some if blob.age > AGE}
        unused = {*sizes} - await database.read(database.files.known, [*sizes])
        if unused and delete:
            database.files.unused.update(unused)
            unused &= await database.write(database.files.clean)
        number, size = number + len(unused), size + sum(sizes[name] for name in unused)
    return Freed(number, size)
