"""Objects that continue one another: read a chain, and keep it while it is used.

All objects of a tree have the same `used_at`, so that they are evicted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, literal, select

from .files import Files
from .objects import Key, stored_of
from .record import Record, Stored
from .tables import objects


def read(connection: Connection, files: Files, key: Key) -> list[Stored]:
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
    return [stored_of(row, files.whole(connection, row)) for row in rows]


def touch(connection: Connection, records: Iterable[Record]) -> None:
    """Note that records continue their chains."""
    for record in records:
        if record.parent is not None and record.chain is not None:
            use(connection, record.chain, record.created_at)


def use(connection: Connection, chain: str, now: int) -> None:
    """Note that a chain is used, in microseconds since 1970."""
    connection.execute(
        objects.update()
        .where(objects.c.chain == chain, objects.c.used_at < now)
        .values(used_at=now)
    )


def whole(connection: Connection, chains: Sequence[str]) -> list[str]:
    """Return the ids of all objects of chains."""
    return [*connection.scalars(select(objects.c.id).where(objects.c.chain.in_(chains)))]
