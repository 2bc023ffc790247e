"""Delete objects by age and by size, those first that were not used for the longest time.

An object is used when it is created, and when another one continues it. A chain is deleted whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, select

from .blobs import MANY, Files
from .objects import ALL, Selection, remove_rows, total
from .records import ROW
from .schema import objects

# The bytes of objects and media that are deleted in one transaction, about.
BYTES = 32 << 20

_NAMES = ("id", "owner", "kind", "created_at", "chain", "metadata", "size")
_COLUMNS = [*(objects.c[name] for name in _NAMES), objects.c.media.is_not(None).label("has_media")]


class Freed(NamedTuple):
    """Deleted objects, and their bytes with those of their media."""

    objects: int
    bytes: int


def expire(
    connection: Connection, files: Files, before: int, selection: Selection = ALL
) -> Freed | None:
    """Delete some objects of a selection that were last used before a time.

    A call deletes few enough for a short transaction.

    Args:
        before: microseconds since 1970.

    Returns:
        None if the selection has no more of them.
    """
    return _remove_oldest(connection, files, [*selection.where(), objects.c.used_at < before], None)


def evict(
    connection: Connection, files: Files, most: int, selection: Selection = ALL
) -> Freed | None:
    """Delete some objects of a selection until the store has at most this many bytes.

    Returns:
        None if the store has no more bytes than that, or the selection no more objects.
    """
    excess = total(connection, "bytes") - most
    return _remove_oldest(connection, files, selection.where(), excess) if excess > 0 else None


def _remove_oldest(
    connection: Connection,
    files: Files,
    conditions: Sequence[ColumnElement[bool]],
    excess: int | None,
) -> Freed | None:
    """Delete the oldest objects, until this many bytes are free.

    Objects that another process is deleting are left to it.
    """
    most = MANY if excess is None else min(MANY, excess // ROW + 1)
    order = (objects.c.used_at, objects.c.id)
    oldest = select(*_COLUMNS).where(*conditions).order_by(*order).limit(most)
    rows = connection.execute(oldest.with_for_update(skip_locked=True)).all()
    if not rows:
        return None
    limit = BYTES if excess is None else min(excess, BYTES)
    sizes = files.own(connection, [row.id for row in rows if row.has_media])
    some = _first(rows, sizes, limit)
    some += _rest(connection, some)
    return Freed(len(some), remove_rows(connection, files, some))


def _rest(connection: Connection, some: Sequence[Row[Any]]) -> Sequence[Row[Any]]:
    """Return the other objects of the chains of these objects."""
    chains = {row.chain for row in some if row.chain is not None}
    if not chains:
        return ()
    known = {row.id for row in some}
    found = connection.execute(select(*_COLUMNS).where(objects.c.chain.in_(chains)))
    return [row for row in found if row.id not in known]


def _first(rows: Sequence[Row[Any]], media: dict[str, int], limit: int) -> list[Row[Any]]:
    """Return the first rows that have this many bytes together, with the media of each."""
    some: list[Row[Any]] = []
    for row in rows:
        if limit <= 0:
            break
        some.append(row)
        limit -= row.size + media.get(row.id, 0)
    return some
