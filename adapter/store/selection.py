"""A part of the objects of a store, for its operator: all owners, in the order of creation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, Select, exists, select, tuple_

from .rows import column_of
from .tables import objects, pairs


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


class Mark(NamedTuple):
    """The place of an object in the order of creation."""

    created_at: int
    id: str


def after(
    statement: Select[Any], mark: Mark | None, most: int, selection: Selection
) -> Select[Any]:
    """Return a statement on `objects` for the next objects of a selection, the oldest first."""
    columns = objects.c.created_at, objects.c.id
    if mark is not None:
        statement = statement.where(tuple_(*columns) > tuple_(*mark))
    return statement.where(*selection.where()).order_by(*columns).limit(most)


def some_after(
    connection: Connection, mark: Mark | None, most: int, selection: Selection
) -> Sequence[Row[Any]]:
    """Return the place, last use, size and media of the next objects of a selection."""
    columns = [objects.c[name] for name in ("created_at", "used_at", "id", "size", "media")]
    return connection.execute(after(select(*columns), mark, most, selection)).all()


def _has(key: str, value: str) -> ColumnElement[bool]:
    same = [pairs.c[name] == objects.c[name] for name in ("owner", "kind", "created_at", "id")]
    return exists().where(*same, pairs.c.key == key, pairs.c.value == value)
