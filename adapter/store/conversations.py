"""The items of conversations, each function in the transaction of the caller.

Everyone who changes the items of a conversation locks its row first. So items are appended in one
order, without gaps between those that are appended together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, case, func, select

from .blobs import MANY, Files
from .errors import DuplicateItem
from .media import loads
from .objects import Key, count, find, lock
from .records import (
    CONVERSATION,
    ITEM_ROW,
    ItemPage,
    ItemRow,
    Record,
    Stored,
    column_of,
    item_of,
    items_of,
)
from .schema import items, objects

# The places of media of a conversation: its items have them.
_PLACES = "[]"


class Ask(NamedTuple):
    """The part of a list of items that a client asks for; see `records.Query`."""

    after: str | None
    limit: int
    descending: bool


def lock_all(connection: Connection, records: Iterable[Record]) -> dict[str, Row[Any] | None]:
    """Lock the conversations that records belong to; return their rows by their ids.

    A row is None for a conversation that does not exist.
    """
    keys = {Key(one.owner, CONVERSATION, one.conversation) for one in records if one.conversation}
    return {key.id: lock(connection, key) for key in sorted(keys)}


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
    if not locked:
        return 0
    grown = 0
    for record in records:
        row = None if record.conversation is None else locked[record.conversation]
        if row is not None:
            rows = items_of(record)
            known = _known(connection, row.id, [one.values["id"] for one in rows])
            new = [one for one in _distinct(rows) if one.values["id"] not in known]
            record.appended = [one.values["id"] for one in new]
            grown += append(connection, files, row, new, record.created_at)
    return grown


def append_new(
    connection: Connection, files: Files, row: Row[Any], rows: Sequence[ItemRow], now: int
) -> int:
    """Append items whose ids must be new to a conversation; see `append`.

    Raises:
        DuplicateItem: the conversation has an item with the same id, or two items have it.
    """
    known = _known(connection, row.id, [one.values["id"] for one in rows])
    for one in rows:
        if one.values["id"] in known:
            raise DuplicateItem(one.values["id"])
        known.add(one.values["id"])
    return append(connection, files, row, rows, now)


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
        values = [place | one.values for place, one in zip(places, rows, strict=True)]
        connection.execute(items.insert(), values)
    added = files.add(connection, media) if media else 0
    size: int = sum(one.values["size"] for one in rows)
    change = objects.update().where(objects.c.id == row.id)
    values = {"size": objects.c.size + size, "used_at": _later(now)}
    connection.execute(change.values(**values, **({"media": _PLACES} if media else {})))
    return size + added


def use(connection: Connection, key: Key, now: int) -> None:
    """Note that a conversation is used, in microseconds since 1970."""
    connection.execute(
        objects.update().where(objects.c.id == key.id, objects.c.used_at < now).values(used_at=now)
    )


def page(connection: Connection, files: Files, key: Key, ask: Ask) -> ItemPage | None:
    """Return a page of the items of a conversation, or None if there is no conversation."""
    if find(connection, key) is None:
        return None
    wanted = _live(key)
    position = items.c.position
    if ask.after is not None:
        # An id can be that of a deleted item, and of one that was appended later.
        same = items.c.conversation == key.id, items.c.id == column_of(ask.after)
        after = connection.scalar(select(func.max(position)).where(*same))
        if after is None:
            return ItemPage([], False, is_known=False)
        wanted = wanted.where(position < after if ask.descending else position > after)
    wanted = wanted.order_by(position.desc() if ask.descending else position.asc())
    rows = connection.execute(wanted.limit(ask.limit + 1)).all()
    found = [_restored(connection, files, row) for row in rows[: ask.limit]]
    return ItemPage(found, len(rows) > ask.limit)


def everything(connection: Connection, files: Files, key: Key) -> list[dict[str, Any]] | None:
    """Return all items of a conversation, the oldest first, or None if there is none."""
    if find(connection, key) is None:
        return None
    rows = connection.execute(_live(key).order_by(items.c.position)).all()
    return [_restored(connection, files, row) for row in rows]


def one(connection: Connection, files: Files, key: Key, name: str) -> dict[str, Any] | None:
    """Return an item of a conversation, or None."""
    if find(connection, key) is None:
        return None
    row = connection.execute(_live(key).where(items.c.id == column_of(name))).one_or_none()
    return None if row is None else _restored(connection, files, row)


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


def _known(connection: Connection, name: str, ids: Sequence[str]) -> set[str]:
    """Return those of some ids that items of a conversation have."""
    found: set[str] = set()
    for start in range(0, len(ids), MANY):
        some = items.c.id.in_(ids[start : start + MANY])
        same = items.c.conversation == name, items.c.item != "", some
        found.update(connection.scalars(select(items.c.id).where(*same)))
    return found


def _distinct(rows: Iterable[ItemRow]) -> Iterable[ItemRow]:
    """Return rows without later ones with the same id."""
    found: dict[str, ItemRow] = {}
    for row in rows:
        found.setdefault(row.values["id"], row)
    return found.values()


def _live(key: Key) -> Select[Any]:
    """Return a statement for the items of a conversation that are not deleted."""
    return select(items).where(items.c.conversation == key.id, items.c.item != "")


def _restored(connection: Connection, files: Files, row: Row[Any]) -> dict[str, Any]:
    request = {"input": [item_of(row.item)]}
    found: dict[str, Any] = files.refilled(connection, request, row.media)["input"][0]
    return found


def _later(now: int) -> ColumnElement[int]:
    """Return the new `used_at` of an object that is used."""
    return case((objects.c.used_at < now, now), else_=objects.c.used_at)
