"""The pages of a list: filtered, and in the order of creation.

Each filter has an index in the order of the list. The filter with the fewest objects is read in
this order, and the others are looked up for each of its objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    and_,
    exists,
    func,
    literal_column,
    select,
    tuple_,
)

from .ids import time_of
from .record import Query
from .rows import column_of
from .tables import objects, pairs

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
        since: microseconds since 1970; older objects are not in the list.
    """
    filters = _filters(owner, kind, query)
    first = filters[0]
    if len(filters) > 1:
        counts = [_count(connection, one) for one in filters]
        first = filters[counts.index(min(counts))]
    columns = (first.table.c.created_at, first.table.c.id)
    wanted = [first.on(first.table), *(_also(first, one) for one in filters if one is not first)]
    if query.after is not None:
        place, after = tuple_(*columns), tuple_(time_of(query.after), query.after)
        wanted.append(place < after if query.descending else place > after)
    if since is not None:
        wanted.append(first.table.c.created_at >= since)
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


def _count(connection: Connection, one: Filter) -> int:
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
