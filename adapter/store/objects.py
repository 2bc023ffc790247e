"""Insert, find, change and delete objects, each in the transaction of the caller.

A page of a list is in the order of creation. Each filter has an index in the order of the list. The
filter with the fewest objects is read in this order, and the others are looked up for each of its
objects.

Objects that continue one another are a chain. All objects of a tree have the same `used_at`, so
that they are evicted together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import orjson
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    and_,
    bindparam,
    case,
    exists,
    func,
    literal,
    literal_column,
    or_,
    select,
    tuple_,
)

from .blobs import MANY, Files
from .media import Medium
from .records import (
    CONVERSATION,
    Key,
    Page,
    Query,
    Record,
    Stored,
    column_of,
    pairs_of,
    rows_of,
    size_of,
    time_of,
)
from .schema import items, objects, pairs, totals

_SAME = [column == bindparam(f"its_{column.name}") for column in pairs.c]
# The columns of an object without its request's messages.
_LISTED = [column for column in objects.c if column.name != "input"]
# What a row of `objects` and a `Stored` begin with.
_COMMON: Callable[[Row[Any]], tuple[str, str, str, int, str, str]] = attrgetter(
    "id", "kind", "owner", "created_at", "model", "request_id"
)
_COUNT = totals.update().values(
    value=totals.c.value
    + case((totals.c.name == "objects", bindparam("number")), else_=bindparam("size"))
)


T = TypeVar("T")


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


def find(connection: Connection, key: Key, files: Files | None = None) -> Stored | None:
    """Return an object, or None; its request is whole with files, else without its messages."""
    row = connection.execute(_of(key) if files is None else _of(key, objects)).one_or_none()
    if row is None:
        return None
    if files is None:
        return stored_of(row, orjson.loads(row.request))
    return stored_of(row, files.whole(connection, request_of(row), row.media))


def known(connection: Connection, kind: str, ids: Sequence[str]) -> list[str]:
    """Return the ids, of at most `MANY`, that objects of a kind have, of any owner."""
    wanted = select(objects.c.id).where(objects.c.kind == kind, objects.c.id.in_(ids))
    return [*connection.scalars(wanted)]


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
    """Return the object of a row of `objects`, with a request that is whole or not.

    Raises:
        ValueError, TypeError: the row is damaged.
    """
    metadata, reply = orjson.loads(row.metadata), orjson.loads(row.reply)
    if not all(type(part) is dict for part in (metadata, request, reply)):
        raise TypeError
    return Stored(*_COMMON(row), metadata, request, reply, row.parent, row.chain)


def request_of(row: Row[Any]) -> dict[str, Any]:
    """Return the request of a row of `objects` with its messages, and without its media."""
    request: dict[str, Any] = orjson.loads(row.request) | orjson.loads(row.input)
    return request


# Objects to count before two filters count as equally common.
FEW = 1_000


class Filter(NamedTuple):
    """Values that an object must have in a table, whose index then has the list's order."""

    table: FromClause
    values: Mapping[str, Any]

    def on(self, table: FromClause) -> ColumnElement[bool]:
        """Return the filter as a condition on its table or an alias of it."""
        return and_(*(table.c[name] == value for name, value in self.values.items()))


def ids_of(
    connection: Connection, owner: str, kind: str, query: Query, since: int | None
) -> list[str]:
    """Return the ids of a page in order, and one more if the list continues.

    Args:
        since: microseconds since 1970; objects that were last used earlier are not in the list.
    """
    filters = _filters(owner, kind, query)
    first = filters[0]
    if len(filters) > 1:
        counts = [_count_some(connection, one) for one in filters]
        first = filters[counts.index(min(counts))]
    columns = (first.table.c.created_at, first.table.c.id)
    wanted = [first.on(first.table), *(_also(first, one) for one in filters if one is not first)]
    if query.after is not None:
        place, after = tuple_(*columns), tuple_(time_of(query.after), query.after)
        wanted.append(place < after if query.descending else place > after)
    if query.grant is not None and query.grant.names is not None:
        wanted.append(_permitted(first, query.grant.names, query.grant.prefixes))
    if since is not None:
        wanted.append(_used(first, since))
    order = [column.desc() if query.descending else column.asc() for column in columns]
    statement = select(columns[1]).where(*wanted).order_by(*order).limit(query.limit + 1)
    return [*connection.scalars(statement)]


def _filters(owner: str, kind: str, query: Query) -> Sequence[Filter]:
    common = {"owner": owner, "kind": kind}
    found = [
        Filter(pairs, {**common, "key": column_of(key), "value": column_of(value)})
        for key, value in query.metadata.items()
    ]
    if query.model is not None:
        found.append(Filter(objects, {**common, "model": column_of(query.model)}))
    return found or [Filter(objects, common)]


def _count_some(connection: Connection, one: Filter) -> int:
    """Return the number of objects that a filter finds, counted up to `FEW`."""
    some = (
        select(literal_column("1"))
        .select_from(one.table)
        .where(one.on(one.table))
        .limit(FEW)
        .subquery()
    )
    return connection.scalar(select(func.count()).select_from(some)) or 0


def _also(first: Filter, other: Filter) -> ColumnElement[bool]:
    """Return the condition that another filter finds the object, too."""
    table = other.table.alias()
    return exists().where(
        other.on(table),
        table.c.created_at == first.table.c.created_at,
        table.c.id == first.table.c.id,
    )


def _permitted(first: Filter, names: Iterable[str], prefixes: Iterable[str]) -> ColumnElement[bool]:
    """Return the condition that the model of an object has one of these names or beginnings."""
    table = objects.alias()
    allowed = or_(
        table.c.model.in_([*map(column_of, names)]),
        # LIKE would ignore case in SQLite.
        *(func.substr(table.c.model, 1, len(one)) == one for one in map(column_of, prefixes)),
    )
    return exists().where(allowed, table.c.id == first.table.c.id)


def _used(first: Filter, since: int) -> ColumnElement[bool]:
    """Return the condition that an object was used since a time."""
    if first.table is objects:
        return objects.c.used_at >= since
    table = objects.alias()
    return exists().where(table.c.id == first.table.c.id, table.c.used_at >= since)


def read_chain(connection: Connection, files: Files, key: Key) -> list[Stored]:
    """Return an object and those that it continues, with their whole requests, the oldest first.

    The list is empty if the object or one that it continues does not exist.
    """
    own = (objects.c.owner == key.owner, objects.c.kind == key.kind)
    links = (
        select(objects.c.id, objects.c.parent, literal(0).label("depth"))
        .where(objects.c.id == key.id, objects.c.used_at >= key.since, *own)
        .cte("links", recursive=True)
    )
    links = links.union_all(
        select(objects.c.id, objects.c.parent, links.c.depth + 1).where(
            objects.c.id == links.c.parent, *own
        )
    )
    found = select(objects).join(links, links.c.id == objects.c.id).order_by(links.c.depth.desc())
    rows = connection.execute(found).all()
    if not rows or rows[0].parent is not None:
        return []
    return [stored_of(row, files.whole(connection, request_of(row), row.media)) for row in rows]


def use(connection: Connection, /, now: int, **same: str) -> None:
    """Note that the objects with these values are used, in microseconds since 1970."""
    wanted = [objects.c[name] == value for name, value in same.items()]
    connection.execute(objects.update().where(*wanted, objects.c.used_at < now).values(used_at=now))


@dataclass(frozen=True, slots=True)
class Selection:
    """The objects that have all of these values; without values, every object.

    Args:
        owner: the digest of an API key; empty for the objects of a server without keys.
        metadata: pairs that an object must have.
        since: microseconds since 1970; older objects are not selected.
        before: microseconds since 1970; objects of this time and newer ones are not selected.
    """

    kind: str | None = None
    owner: str | None = None
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    since: int | None = None
    before: int | None = None

    def where(self) -> list[ColumnElement[bool]]:
        """Return the conditions on a row of `objects`."""
        values = {
            "kind": self.kind,
            "owner": self.owner,
            "model": None if self.model is None else column_of(self.model),
        }
        found = [objects.c[name] == value for name, value in values.items() if value is not None]
        if self.since is not None:
            found.append(objects.c.created_at >= self.since)
        if self.before is not None:
            found.append(objects.c.created_at < self.before)
        return found + [_has(key, value) for key, value in self.metadata.items()]


ALL = Selection()


def some_after(
    connection: Connection, after: tuple[int, str] | None, most: int, selection: Selection
) -> Sequence[Row[Any]]:
    """Return the time, id, size and media of the next objects of a selection, the oldest first."""
    order = objects.c.created_at, objects.c.id
    columns: list[Any] = [*order, objects.c.size, objects.c.media]
    wanted = select(*columns).where(*selection.where())
    if after is not None:
        wanted = wanted.where(tuple_(*order) > tuple_(*after))
    return connection.execute(wanted.order_by(*order).limit(most)).all()


def _has(key: str, value: str) -> ColumnElement[bool]:
    same = [pairs.c[name] == objects.c[name] for name in ("owner", "kind", "created_at", "id")]
    return exists().where(*same, pairs.c.key == key, pairs.c.value == value)
