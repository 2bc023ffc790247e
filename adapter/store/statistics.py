"""Figures of a store for its operator.

The objects are counted in parts, each in a short transaction that only reads, so a server that
uses the same database is not delayed. What it stores meanwhile can be counted or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, select, text, tuple_

from .migrations import version_of
from .objects import total
from .open_store import OpenStore
from .selection import ALL, Mark, after
from .tables import media, objects, schema

# Objects that are counted in one transaction.
PART = 20_000


class Group(NamedTuple):
    """The kind and the model of objects."""

    kind: str
    model: str


@dataclass(slots=True)
class Statistics:
    """The figures of a store.

    Args:
        object_bytes: the bytes of objects with their metadata, as `--store-size` counts them.
        database_bytes: the size of the file, or of the tables with their indexes.
        log_bytes: the size of SQLite's log of changes.
        free_bytes: the part of an SQLite file that is not used.
        oldest: the time of the oldest object, in microseconds since 1970.
        groups: the number of objects and their bytes, by kind and model.
    """

    schema_version: int = 0
    objects: int = 0
    object_bytes: int = 0
    media: int = 0
    media_bytes: int = 0
    owners: int = 0
    oldest: int | None = None
    newest: int | None = None
    database_bytes: int = 0
    log_bytes: int = 0
    free_bytes: int = 0
    groups: dict[Group, tuple[int, int]] = field(default_factory=dict)

    @property
    def bytes_per_object(self) -> int | None:
        """The bytes of the database for each object; None for an empty store."""
        return round(self.database_bytes / self.objects) if self.objects else None

    def as_json(self) -> dict[str, Any]:
        """Return the figures for JSON, with times in ISO 8601."""
        found = asdict(self)
        for name in ("oldest", "newest"):
            found[name] = time_in_words(found[name])
        groups = [
            {**group._asdict(), "objects": number, "bytes": size}
            for group, (number, size) in sorted(self.groups.items())
        ]
        return {**found, "bytes_per_object": self.bytes_per_object, "groups": groups}


def time_in_words(microseconds: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC and to the second."""
    if microseconds is None:
        return None
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).isoformat()


async def statistics(store: OpenStore, progress: Callable[[int, int], object]) -> Statistics:
    """Return the figures of a store.

    Args:
        progress: gets the number of objects that are counted, and about how many there are.

    Raises:
        StoreUnavailable: the database cannot answer.
    """
    place = store.place
    file = Path(place.target) if place.kind == "sqlite" else None
    found = await store.read(partial(_first, file=file))
    about = await store.read(partial(total, name="objects"))
    owners: set[str] = set()
    numbers: Counter[Group] = Counter()
    sizes: Counter[Group] = Counter()
    mark: Mark | None = None
    is_last = False
    while not is_last:
        rows, mark, is_last = await store.read(partial(_part, mark=mark))
        for row in rows:
            group = Group(row.kind, row.model)
            owners.add(row.owner)
            numbers[group] += row.number
            sizes[group] += int(row.size)
        progress(numbers.total(), about)
    found.objects, found.object_bytes = numbers.total(), sizes.total()
    found.owners = len(owners)
    found.groups = {group: (number, sizes[group]) for group, number in numbers.items()}
    return found


class _Part(NamedTuple):
    """Figures of some objects by owner, kind and model, the last object, and if it is the last."""

    rows: Sequence[Row[Any]]
    mark: Mark | None
    is_last: bool


def _part(connection: Connection, mark: Mark | None) -> _Part:
    columns = objects.c.created_at, objects.c.id
    end = connection.execute(after(select(*columns), mark, 1, ALL).offset(PART - 1)).one_or_none()
    groups = (objects.c.owner, objects.c.kind, objects.c.model)
    counted = select(*groups, func.count().label("number"), func.sum(objects.c.size).label("size"))
    if mark is not None:
        counted = counted.where(tuple_(*columns) > tuple_(*mark))
    if end is not None:
        counted = counted.where(tuple_(*columns) <= tuple_(*end))
    rows = connection.execute(counted.group_by(*groups)).all()
    return _Part(rows, None if end is None else Mark(*end), end is None)


def _first(connection: Connection, file: Path | None) -> Statistics:
    """Return the figures that need no look at every object."""
    found = Statistics(version_of(connection))
    number, size = connection.execute(select(func.count(), func.sum(media.c.size))).one()
    found.media, found.media_bytes = number, int(size or 0)
    ends = select(func.min(objects.c.created_at), func.max(objects.c.created_at))
    found.oldest, found.newest = connection.execute(ends).one()
    if file is None:
        size_of = text("SELECT pg_total_relation_size(CAST(:name AS regclass))")
        found.database_bytes = sum(
            connection.scalar(size_of, {"name": name}) or 0 for name in schema.tables
        )
        return found
    page, pages, free = (
        connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0
        for name in ("page_size", "page_count", "freelist_count")
    )
    found.database_bytes, found.free_bytes = page * pages, page * free
    log = file.with_name(f"{file.name}-wal")
    found.log_bytes = log.stat().st_size if log.exists() else 0
    return found
