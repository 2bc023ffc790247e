"""Delete objects by age and by size, those first that were not used for the longest time.

A store that is full makes room with the objects of the owner that has most of it.

An object is used when it is created, and when another one continues it. A chain is deleted whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, or_, select, union_all

from .blobs import MANY, Files
from .database import Database
from .objects import ALL, Selection, remove_rows, total
from .records import ROW
from .schema import media, objects, uses

# The bytes of objects and media that are deleted in one transaction, about.
BYTES = 32 << 20
# Seconds after which bytes without a row are not those of a request that is being stored.
AGE = 3600.0

# The shares of owners are added up for one part of the time in this many.
_SELDOM = 50

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

    The owner with the most bytes loses its oldest objects first, so that nobody makes others lose
    theirs while it has more.

    Args:
        most: None for no limit.
    """
    if most is None or total(connection, "bytes") <= most:
        return False
    evicted, shares = False, _shares(connection, files)
    while (excess := (size := total(connection, "bytes")) - most) > 0:
        ranked = sorted(shares, key=shares.__getitem__, reverse=True)
        owner, step = ranked[0] if ranked else None, excess
        if len(ranked) > 1:
            # With equal shares, the owners lose some in turn.
            step = min(excess, max(shares[ranked[0]] - shares[ranked[1]], excess // 4 + 1))
        limits = Limits(Selection(owner=owner), most=size - step)
        freed = _remove_oldest(connection, files, limits)
        if freed is None:
            if owner is None:
                break
            # Others have deleted its objects, or are deleting them.
            files.grow(owner, -shares.pop(owner))
            continue
        if owner is not None:
            shares[owner] -= freed.bytes
            files.grow(owner, -freed.bytes)
        files.has_evicted = evicted = True
    return evicted


def _shares(connection: Connection, files: Files) -> Counter[str]:
    """Return the bytes of each owner; an image counts once for each owner that has it.

    In a large store the sum takes long, and is made for a small part of the time only.
    """
    if time.monotonic() >= files.shares_until:
        _add_up(connection, files)
    shares = files.shares.copy()
    shares.update(files.changes)
    return shares


def _add_up(connection: Connection, files: Files) -> None:
    began = time.monotonic()
    images = (
        select(objects.c.owner, uses.c.hash)
        .join(objects, objects.c.id == uses.c.id)
        .distinct()
        .subquery()
    )
    sizes = union_all(
        select(objects.c.owner, func.sum(objects.c.size).label("size")).group_by(objects.c.owner),
        select(images.c.owner, func.sum(media.c.size))
        .join(media, media.c.hash == images.c.hash)
        .group_by(images.c.owner),
    ).subquery()
    rows = connection.execute(select(sizes.c.owner, func.sum(sizes.c.size)).group_by(sizes.c.owner))
    files.shares = Counter({owner: int(size) for owner, size in rows})
    # The rows have the changes of this transaction, which may be rolled back.
    files.shares.subtract(files.changes)
    ended = time.monotonic()
    files.shares_until = ended + _SELDOM * (ended - began)


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
