"""Read many objects of a store, some at a time, in the order of creation.

Each part is read in a transaction of its own. So memory is bounded, and a server that uses the
same database is not delayed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select

from .files import Files
from .objects import stored_of
from .open_store import OpenStore
from .record import Stored
from .selection import Mark, Selection, some_after
from .tables import objects

# Objects whose sizes are read at once, and the bytes of their JSON that are read at once.
SIZES, BYTES = 1_000, 4 << 20


class Read(NamedTuple):
    """An object with its media, and the number of media that are missing or damaged."""

    stored: Stored
    missing: int


async def read(store: OpenStore, selection: Selection) -> AsyncIterator[Sequence[Read]]:
    """Yield the objects of a selection, some at a time, the oldest first.

    Raises:
        StoreUnavailable: the database cannot answer.
    """
    mark: Mark | None = None
    while rows := await store.read(partial(some_after, mark=mark, most=SIZES, selection=selection)):
        for some in _parts(rows):
            yield await store.read(partial(_whole, files=store.files, ids=[row.id for row in some]))
        mark = Mark(rows[-1].created_at, rows[-1].id)


def _parts(rows: Sequence[Row[Any]]) -> list[list[Row[Any]]]:
    """Return rows in parts of few bytes; an object with media is a part of its own."""
    parts: list[list[Row[Any]]] = []
    free = 0
    for row in rows:
        if row.media is not None or row.size > free:
            parts.append([])
            free = 0 if row.media is not None else BYTES
        parts[-1].append(row)
        free -= row.size
    return parts


def _whole(connection: Connection, files: Files, ids: Sequence[str]) -> list[Read]:
    columns = objects.c.created_at, objects.c.id
    rows = connection.execute(select(objects).where(objects.c.id.in_(ids)).order_by(*columns))
    return [_read(connection, files, row) for row in rows.all()]


def _read(connection: Connection, files: Files, row: Row[Any]) -> Read:
    request, missing = files.restored(connection, row)
    return Read(stored_of(row, request), len(missing))
