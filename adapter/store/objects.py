"""Insert, find, change and delete objects, each in the transaction of the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import orjson
from sqlalchemy import Connection, Row, Select, bindparam, case, select

from .files import MANY, Files
from .lists import ids_of
from .media import Medium
from .record import CONVERSATION, Page, Query, Record, Stored
from .rows import pairs_of, rows_of, size_of
from .tables import items, objects, pairs, totals

_SAME = [column == bindparam(f"its_{column.name}") for column in pairs.c]
# The columns of an object without its request's messages.
_LISTED = [column for column in objects.c if column.name != "input"]
_COUNT = totals.update().values(
    value=totals.c.value
    + case((totals.c.name == "objects", bindparam("number")), else_=bindparam("size"))
)


T = TypeVar("T")


class Key(NamedTuple):
    """The owner, kind and id of an object.

    Args:
        since: microseconds since 1970; an object that was last used earlier counts as deleted.
    """

    owner: str
    kind: str
    id: str
    since: int = 0


def insert(connection: Connection, files: Files, records: Iterable[Record]) -> int:
    """Insert objects with their metadata and media; return their bytes, which are not counted."""
    rows: list[dict[str, Any]] = []
    metadata: list[dict[str, Any]] = []
    media: list[tuple[str, Medium]] = []
    for record in records:
        row, of_row, found = rows_of(record)
        rows.append(row)
        metadata += of_row
        media += [(record.id, medium) for medium in found]
    if not rows:
        return 0
    connection.execute(objects.insert(), rows)
    if metadata:
        connection.execute(pairs.insert(), metadata)
    added = files.add(connection, media) if media else 0
    size: int = sum(row["size"] for row in rows)
    return size + added


def find(connection: Connection, key: Key) -> Stored | None:
    """Return an object, or None; its request is without its messages."""
    row = connection.execute(_of(key)).one_or_none()
    return None if row is None else stored_of(row, orjson.loads(row.request))


def find_whole(connection: Connection, files: Files, key: Key) -> Stored | None:
    """Return an object with its whole request, or None."""
    row = connection.execute(_of(key, objects)).one_or_none()
    return None if row is None else stored_of(row, files.whole(connection, row))


def lock(connection: Connection, key: Key) -> Row[Any] | None:
    """Return the row of an object without its messages, or None; no one else can change it."""
    return connection.execute(_of(key).with_for_update()).one_or_none()


def page(
    connection: Connection,
    owner: str,
    kind: str,
    query: Query,
    since: int | None,
    show: Callable[[Stored], T],
) -> Page[T]:
    """Return a page of a list, with requests without their messages; see `ids_of`.

    Args:
        show: returns what the page has of each object. It runs here, in the thread of the caller,
            so that the event loop never waits until large objects are freed.
    """
    ids = ids_of(connection, owner, kind, query, since)
    wanted = ids[: query.limit]
    rows = connection.execute(select(*_LISTED).where(objects.c.id.in_(wanted))) if wanted else ()
    by_id = {row.id: row for row in rows}
    found: list[T] = []
    for name in wanted:
        # Another process can have deleted an object since its id was read.
        row = by_id.pop(name, None)
        if row is not None:
            found.append(show(stored_of(row, orjson.loads(row.request))))
            # One object after another: reading JSON holds the interpreter lock.
            time.sleep(0)
    return Page(found, len(ids) > query.limit)


def change(connection: Connection, key: Key, metadata: Mapping[str, str]) -> Stored | None:
    """Replace the metadata of an object, also in its reply; return the object, or None."""
    row = lock(connection, key)
    if row is None:
        return None
    reply = {**orjson.loads(row.reply), "metadata": dict(metadata)}
    changed = {
        "metadata": orjson.dumps(metadata).decode(),
        "reply": orjson.dumps(reply).decode(),
    }
    grown = sum(size_of(text) - size_of(row._mapping[name]) for name, text in changed.items())
    _drop_pairs(connection, [row])
    if metadata:
        connection.execute(pairs.insert(), pairs_of(row, metadata))
    connection.execute(
        objects.update().where(objects.c.id == key.id).values(**changed, size=row.size + grown)
    )
    count(connection, 0, grown)
    return find(connection, key)


def remove(connection: Connection, files: Files, key: Key) -> bool:
    """Delete an object with its metadata and media; return False if there is none."""
    row = lock(connection, key)
    if row is not None:
        remove_rows(connection, files, [row])
    return row is not None


def remove_rows(connection: Connection, files: Files, rows: Sequence[Row[Any]]) -> int:
    """Delete objects with their metadata and items, and the media that no other object has.

    Returns:
        The number of bytes that they had.

    Args:
        rows: rows of `objects` with the columns that `pairs` has, their metadata and size.
    """
    _drop_pairs(connection, rows)
    have_items = any(row.kind == CONVERSATION for row in rows)
    freed = 0
    for start in range(0, len(rows), MANY):
        ids = [row.id for row in rows[start : start + MANY]]
        freed += files.remove(connection, ids)
        if have_items:
            connection.execute(items.delete().where(items.c.conversation.in_(ids)))
        connection.execute(objects.delete().where(objects.c.id.in_(ids)))
    size: int = freed + sum(row.size for row in rows)
    count(connection, -len(rows), -size)
    return size


def count(connection: Connection, number: int, size: int) -> None:
    """Add to the totals of the store: objects and bytes."""
    connection.execute(_COUNT, {"number": number, "size": size})


def total(connection: Connection, name: str) -> int:
    """Return the number of `objects`, or the `bytes` of objects and media."""
    return connection.scalar(select(totals.c.value).where(totals.c.name == name)) or 0


def _of(key: Key, *columns: Any) -> Select[Any]:
    return select(*(columns or _LISTED)).where(
        objects.c.id == key.id,
        objects.c.owner == key.owner,
        objects.c.kind == key.kind,
        objects.c.used_at >= key.since,
    )


def _drop_pairs(connection: Connection, rows: Iterable[Row[Any]]) -> None:
    gone = [one for row in rows for one in pairs_of(row, orjson.loads(row.metadata))]
    if gone:
        # A column and its parameter must not have the same name.
        values = [{f"its_{name}": value for name, value in one.items()} for one in gone]
        connection.execute(pairs.delete().where(*_SAME), values)


def stored_of(row: Row[Any], request: dict[str, Any]) -> Stored:
    """Return the object of a row of `objects`, with a request that is whole or not."""
    return Stored(
        row.id,
        row.kind,
        row.owner,
        row.created_at,
        row.model,
        row.request_id,
        orjson.loads(row.metadata),
        request,
        orjson.loads(row.reply),
        row.parent,
        row.chain,
    )
