"""Figures of a store for its operator, and the deletion of objects and unused media."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypedDict

from sqlalchemy import Connection, func, or_, select, text

from . import retention
from .blobs import MANY
from .objects import Selection, total
from .open_store import OpenStore
from .retention import Freed
from .schema import media, objects, schema, uses, version_of


class Group(TypedDict):
    """The objects of a kind and a model."""

    kind: str
    model: str
    objects: int
    bytes: int


class Statistics(TypedDict):
    """The figures of a store; times are in ISO 8601.

    Args:
        object_bytes: the bytes of objects with their metadata, as `--store-size` counts them.
        database_bytes: the size of the file, or of the tables with their indexes.
        log_bytes: the size of SQLite's log of changes.
        free_bytes: the part of an SQLite file that is not used.
        bytes_per_object: the bytes of the database for each object; None for an empty store.
    """

    schema_version: int
    objects: int
    object_bytes: int
    media: int
    media_bytes: int
    owners: int
    oldest: str | None
    newest: str | None
    database_bytes: int
    log_bytes: int
    free_bytes: int
    groups: list[Group]
    bytes_per_object: int | None


def statistics(connection: Connection, file: Path | None) -> Statistics:
    """Return the figures of a store.

    Args:
        file: the file of SQLite; None for PostgreSQL.
    """
    columns = (objects.c.kind, objects.c.model)
    rows = connection.execute(
        select(*columns, func.count(), func.sum(objects.c.size)).group_by(*columns)
    )
    groups = [
        Group(kind=kind, model=model, objects=number, bytes=int(size))
        for kind, model, number, size in sorted(map(tuple, rows))
    ]
    owners, oldest, newest = connection.execute(
        select(
            func.count(objects.c.owner.distinct()),
            func.min(objects.c.created_at),
            func.max(objects.c.created_at),
        )
    ).one()
    of_media, media_size = connection.execute(select(func.count(), func.sum(media.c.size))).one()
    count = sum(group["objects"] for group in groups)
    size, free = _size_of_tables(connection) if file is None else _size_of_file(connection)
    log = None if file is None else file.with_name(f"{file.name}-wal")
    return {
        "schema_version": version_of(connection),
        "objects": count,
        "object_bytes": sum(group["bytes"] for group in groups),
        "media": of_media,
        "media_bytes": int(media_size or 0),
        "owners": owners,
        "oldest": _in_words(oldest),
        "newest": _in_words(newest),
        "database_bytes": size,
        "log_bytes": log.stat().st_size if log is not None and log.exists() else 0,
        "free_bytes": free,
        "groups": groups,
        "bytes_per_object": round(size / count) if count else None,
    }


def _in_words(microseconds: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC and to the second."""
    if microseconds is None:
        return None
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).isoformat()


def _size_of_tables(connection: Connection) -> tuple[int, int]:
    """Return the bytes of PostgreSQL's tables with their indexes, and those that are free."""
    size_of = text("SELECT pg_total_relation_size(CAST(:name AS regclass))")
    return sum(connection.scalar(size_of, {"name": name}) or 0 for name in schema.tables), 0


def _size_of_file(connection: Connection) -> tuple[int, int]:
    """Return the bytes of an SQLite file, and those of its free pages."""
    page, pages, free = (
        connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0
        for name in ("page_size", "page_count", "freelist_count")
    )
    return page * pages, page * free


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
