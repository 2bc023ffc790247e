"""Delete objects for the operator of a store, and media that a killed process left behind.

Each step is a short transaction, and there is a pause after it. So a server that uses the same
database can write meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice

from sqlalchemy import Connection, func, or_, select

from . import retention
from .files import MANY
from .objects import total
from .open_store import OpenStore
from .retention import Freed
from .selection import Selection
from .tables import media, objects, uses

# Seconds after which bytes without a row are not those of a request that is being stored.
AGE = 3600.0

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
    given = {"files": store.files, "selection": limits.selection}
    works = []
    if limits.before is not None:
        works.append(partial(retention.expire, before=limits.before, **given))
    if limits.most is not None:
        works.append(partial(retention.evict, most=limits.most, **given))
    number = size = 0
    for work in works:
        async for freed in store.steps(work):
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


async def remove_unused(store: OpenStore, delete: bool = True) -> Freed:
    """Delete the media outside the database that no object has; return their number and bytes.

    Args:
        delete: False to count them only.

    Raises:
        StoreUnavailable: the database or the storage of media cannot answer.
    """
    number = size = 0
    blobs = iter(()) if store.blobs is None else store.blobs.hashes()
    while some := await asyncio.to_thread(list, islice(blobs, MANY)):
        sizes = {blob.hash: blob.size for blob in some if blob.age > AGE}
        unused = {*sizes} - await store.read(partial(store.files.known, hashes=[*sizes]))
        if unused and delete:
            store.files.unused.update(unused)
            unused &= await store.database.write(store.files.clean)
        number, size = number + len(unused), size + sum(sizes[name] for name in unused)
    return Freed(number, size)
