"""Write records, and the items of conversations, each function in the transaction of the caller.

Everyone who changes the items of a conversation locks its row first. So items are appended in one
order, without gaps between those that are appended together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, case, func, select

from . import retention
from .blobs import MANY, Files
from .errors import ConversationTooLarge, DuplicateItem, Withdrawn
from .media import loads
from .objects import count, find, insert, lock, stored_of, use
from .records import (
    CONVERSATION,
    ITEM_ROW,
    ItemRow,
    Key,
    Page,
    Query,
    Record,
    Stored,
    bytes_of,
    column_of,
    item_of,
    item_rows,
    items_of,
    rows_of,
)
from .schema import items, objects

# The places of media of a conversation: its items have them.
_PLACES = "[]"


def write(
    connection: Connection, files: Files, records: Sequence[Record], most: int | None
) -> list[Record]:
    """Insert records, and append their items; return those that are larger than the whole store.

    Of a record that is not kept, only the items are stored.

    Args:
        most: the bytes that the store may have; the oldest objects are deleted for it.

    Raises:
        Withdrawn: a record was withdrawn meanwhile.
    """
    large: list[Record] = []
    if most is not None:
        for record in records:
            record.rows = rows_of(record)
        large = [record for record in records if bytes_of(record) > most]
        records = [record for record in records if record not in large]
    # Every process locks objects first, then media, and the totals last.
    keys = {Key(one.owner, CONVERSATION, one.conversation) for one in records if one.conversation}
    locked = {key.id: lock(connection, key) for key in sorted(keys)}
    for record in records:
        if record.parent is not None and record.chain is not None:
            use(connection, record.created_at, chain=record.chain)
    kept = [record for record in records if record.is_kept]
    size = insert(connection, files, kept)
    if most is not None:
        for record in kept:
            files.grow(record.owner, bytes_of(record))
    if locked:
        size += append_all(connection, files, records, locked)
    count(connection, len(kept), size)
    retention.make_room(connection, files, most)
    if any(record.is_withdrawn for record in records):
        raise Withdrawn
    return large


def append_all(
    connection: Connection,
    files: Files,
    records: Iterable[Record],
    locked: Mapping[str, Row[Any] | None],
) -> int:
    """Append the items of records to their conversations; return the bytes, see `append`.

    A response is stored without its conversation if that was deleted meanwhile, and an item that
    another response has appended meanwhile is not appended again.
    """
    grown = 0
    for record in records:
        row = None if record.conversation is None else locked[record.conversation]
        if row is not None:
            new = _new(connection, row.id, items_of(record))
            record.appended = [one.values["id"] for one in new]
            grown += append(connection, files, row, new, record.created_at)
    return grown


def append_new(
    connection: Connection,
    files: Files,
    key: Key,
    given: Sequence[Mapping[str, Any]],
    most: int | None,
    record: Record | None = None,
) -> Stored | None:
    """Append items whose ids must be new to a conversation; return the conversation, or None.

    Args:
        most: the bytes that the store may have.
        record: the conversation, if it is to be made.

    Raises:
        DuplicateItem: the conversation has an item with the same id, or two items have it.
        ConversationTooLarge: there is no room for the items.
    """
    if record is not None:
        write(connection, files, [record], most)
    row = lock(connection, key)
    if row is None:
        return None
    rows = _new(connection, row.id, item_rows(given), strict=True)
    size = append(connection, files, row, rows, time.time_ns() // 1_000)
    count(connection, 0, size)
    if retention.make_room(connection, files, most) and find(connection, key) is None:
        # Its owner has lost all else, and still had the most. The transaction now deletes nothing.
        raise ConversationTooLarge
    return stored_of(row, {})


def append(
    connection: Connection, files: Files, row: Row[Any], rows: Sequence[ItemRow], now: int
) -> int:
    """Append items to a conversation, which uses it.

    Returns:
        The bytes that they have with their media. They are not counted, because the totals must be
        locked last.

    Args:
        row: the row of the conversation, which the caller has locked.
        now: microseconds since 1970.
    """
    last = select(func.max(items.c.position)).where(items.c.conversation == row.id)
    first = 1 + (connection.scalar(last) or 0)
    media = [(row.id, medium) for one in rows for medium in one.media]
    if rows:
        places = [{"conversation": row.id, "position": first + i} for i in range(len(rows))]
        inserted = [place | one.values for place, one in zip(places, rows, strict=True)]
        connection.execute(items.insert(), inserted)
    added = files.add(connection, media) if media else 0
    size: int = sum(one.values["size"] for one in rows)
    change = objects.update().where(objects.c.id == row.id)
    later = case((objects.c.used_at < now, now), else_=objects.c.used_at)
    values = {"size": objects.c.size + size, "used_at": later}
    connection.execute(change.values(**values, **({"media": _PLACES} if media else {})))
    files.grow(row.owner, size + added)
    return size + added


def page(
    connection: Connection, files: Files, key: Key, query: Query
) -> Page[dict[str, Any]] | None:
    """Return a page of the items of a conversation, or None if there is no conversation."""
    if find(connection, key) is None:
        return None
    wanted = _live(key)
    position = items.c.position
    if query.after is not None:
        # An id can be that of a deleted item, and of one that was appended later.
        same = items.c.conversation == key.id, items.c.id == column_of(query.after)
        after = connection.scalar(select(func.max(position)).where(*same))
        if after is None:
            return Page([], False, is_known=False)
        wanted = wanted.where(position < after if query.descending else position > after)
    wanted = wanted.order_by(position.desc() if query.descending else position.asc())
    rows = connection.execute(wanted.limit(query.limit + 1)).all()
    found = [_restored(connection, files, row) for row in rows[: query.limit]]
    return Page(found, len(rows) > query.limit)


def everything(
    connection: Connection, files: Files, key: Key, name: str | None = None
) -> list[dict[str, Any]] | None:
    """Return all items of a conversation, the oldest first, or None if there is none.

    Args:
        name: the id of the only item to return.
    """
    if find(connection, key) is None:
        return None
    wanted = _live(key).order_by(items.c.position)
    if name is not None:
        wanted = wanted.where(items.c.id == column_of(name))
    return [_restored(connection, files, row) for row in connection.execute(wanted).all()]


def remove(connection: Connection, files: Files, key: Key, names: Sequence[str]) -> Stored | None:
    """Delete items of a conversation; return the conversation, or None if it has none of them."""
    row = lock(connection, key)
    if row is None:
        return None
    wanted = [column_of(name) for name in names]
    gone = [
        found
        for start in range(0, len(wanted), MANY)
        for found in connection.execute(
            _live(key).where(items.c.id.in_(wanted[start : start + MANY]))
        )
    ]
    if not gone:
        return None
    for found in gone:
        connection.execute(
            items.update()
            .where(items.c.conversation == key.id, items.c.position == found.position)
            .values(item="", media=None, size=ITEM_ROW)
        )
    freed: int = sum(found.size - ITEM_ROW for found in gone)
    connection.execute(
        objects.update().where(objects.c.id == key.id).values(size=objects.c.size - freed)
    )
    count(connection, 0, -freed - _drop_media(connection, files, key, gone))
    return find(connection, key)


def _drop_media(connection: Connection, files: Files, key: Key, gone: Sequence[Row[Any]]) -> int:
    """Delete the media of items that no other item of the conversation has; see `Files.drop`."""
    unused = _hashes(row.media for row in gone)
    if unused:
        kept = _live(key).with_only_columns(items.c.media).where(items.c.media.is_not(None))
        unused -= _hashes(connection.scalars(kept))
    return files.drop(connection, key.id, unused) if unused else 0


def _hashes(texts: Iterable[str | None]) -> set[str]:
    return {place.hash for text in texts if text is not None for place in loads(text)}


def _new(
    connection: Connection, name: str, rows: Sequence[ItemRow], strict: bool = False
) -> list[ItemRow]:
    """Return the rows whose ids neither a conversation nor an earlier row has; see `append_new`."""
    ids = [row.values["id"] for row in rows]
    known: set[str] = set()
    for start in range(0, len(ids), MANY):
        some = items.c.id.in_(ids[start : start + MANY])
        same = items.c.conversation == name, items.c.item != "", some
        known.update(connection.scalars(select(items.c.id).where(*same)))
    new = []
    for item_id, row in zip(ids, rows, strict=True):
        if item_id not in known:
            known.add(item_id)
            new.append(row)
        elif strict:
            raise DuplicateItem(item_id)
    return new


def _live(key: Key) -> Select[Any]:
    """Return a statement for the items of a conversation that are not deleted."""
    return select(items).where(items.c.conversation == key.id, items.c.item != "")


def _restored(connection: Connection, files: Files, row: Row[Any]) -> dict[str, Any]:
    request = {"input": [item_of(row.item)]}
    found: dict[str, Any] = files.whole(connection, request, row.media)["input"][0]
    return found
