"""Figures of a store for its operator."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from sqlalchemy import Connection, func, select, text

from .schema import media, objects, schema, version_of


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
    if file is None:
        size_of = text("SELECT pg_total_relation_size(CAST(:name AS regclass))")
        size = sum(connection.scalar(size_of, {"name": name}) or 0 for name in schema.tables)
        free = log = 0
    else:
        page, pages, free_pages = (
            connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0
            for name in ("page_size", "page_count", "freelist_count")
        )
        size, free = page * pages, page * free_pages
        changes = file.with_name(f"{file.name}-wal")
        log = changes.stat().st_size if changes.exists() else 0
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
        "log_bytes": log,
        "free_bytes": free,
        "groups": groups,
        "bytes_per_object": round(size / count) if count else None,
    }


def _in_words(microseconds: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC and to the second."""
    if microseconds is None:
        return None
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).isoformat()
