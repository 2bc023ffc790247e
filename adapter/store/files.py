"""The media of objects: a row for each, and its bytes in the database or in blobs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Connection, Row, exists, func, select
from sqlalchemy.dialects import postgresql, sqlite

from . import media as places
from .blobs import Blobs
from .errors import StoreUnavailable
from .media import Medium, Restored
from .tables import media, uses

# The largest number of values in one statement.
MANY = 500

_INSERT: Mapping[str, Callable[..., Any]] = {
    "postgresql": postgresql.insert,
    "sqlite": sqlite.insert,
}

# The reason for clients. The log has the hash.
MISSING = "an image, audio or file of the request is missing or damaged"


class Files:
    """The media of a store; every function runs in the transaction of the caller.

    A row is locked while its bytes are added or deleted. So a process that deletes a medium and
    another one that stores it at the same time run one after the other. Bytes are added before
    their row is committed, and deleted after its deletion is committed: a process can be killed
    between the two.

    Args:
        blobs: takes the bytes by their hash; None to keep them in the database.

    Attributes:
        unused: the hashes of media whose bytes can be deleted after the transaction.
    """

    def __init__(self, blobs: Blobs | None) -> None:
        self._blobs = blobs
        self.unused: set[str] = set()

    def add(self, connection: Connection, found: Sequence[tuple[str, Medium]]) -> int:
        """Store the media of objects; return the bytes that were not stored before."""
        data = {medium.place.hash: medium.data for _, medium in found}
        added = 0
        # Every process locks rows in the same order.
        for name in sorted(data):
            added += self._add(connection, name, data[name])
        rows = {(medium.place.hash, object_id) for object_id, medium in found}
        # A conversation can already have a medium of its new items.
        connection.execute(
            _INSERT[connection.dialect.name](uses).on_conflict_do_nothing(),
            [{"hash": name, "id": object_id} for name, object_id in sorted(rows)],
        )
        return added

    def remove(self, connection: Connection, ids: Sequence[str]) -> int:
        """Delete the media that only these objects have; return the number of bytes."""
        hashes = {*connection.scalars(select(uses.c.hash).where(uses.c.id.in_(ids)))}
        if not hashes:
            return 0
        connection.execute(uses.delete().where(uses.c.id.in_(ids)))
        return sum(self._remove(connection, hashes))

    def drop(self, connection: Connection, object_id: str, hashes: Collection[str]) -> int:
        """Take some media from an object, and delete those that no other one has; see `remove`."""
        same = uses.c.id == object_id, uses.c.hash.in_(hashes)
        connection.execute(uses.delete().where(*same))
        return sum(self._remove(connection, hashes))

    def own(self, connection: Connection, ids: Sequence[str]) -> dict[str, int]:
        """Return the bytes of the media that each object has alone, by its id."""
        if not ids:
            return {}
        other = uses.alias()
        shared = exists().where(other.c.hash == uses.c.hash, other.c.id != uses.c.id)
        rows = connection.execute(
            select(uses.c.id, func.sum(media.c.size))
            .join(media, media.c.hash == uses.c.hash)
            .where(uses.c.id.in_(ids), ~shared)
            .group_by(uses.c.id)
        )
        return {name: int(size) for name, size in rows}

    def known(self, connection: Connection, hashes: Sequence[str]) -> set[str]:
        """Return those of some hashes that are media of the store."""
        return {*connection.scalars(select(media.c.hash).where(media.c.hash.in_(hashes)))}

    def clean(self, connection: Connection) -> set[str]:
        """Delete the bytes of unused media, in a transaction of its own; return their hashes.

        A row that is inserted makes other processes that store the same medium wait.
        """
        names = sorted(self.unused)
        if self._blobs is None or not names:
            return set()
        free = [name for name in names if self._reserve(connection, name, 0)]
        self._blobs.delete(free)
        for start in range(0, len(free), MANY):
            some = free[start : start + MANY]
            connection.execute(media.delete().where(media.c.hash.in_(some)))
        self.unused.difference_update(names)
        return {*free}

    def restored(self, connection: Connection, row: Row[Any]) -> Restored:
        """Return the request of a row of `objects`, and the places of media that are missing."""
        request: dict[str, Any] = orjson.loads(row.request) | orjson.loads(row.input)
        return self._restored(connection, request, row.media)

    def whole(self, connection: Connection, row: Row[Any]) -> dict[str, Any]:
        """Return the whole request of a row of `objects`, with its messages and media.

        Raises:
            StoreUnavailable: a medium is missing or damaged.
        """
        return _whole(self.restored(connection, row))

    def refilled(
        self, connection: Connection, request: dict[str, Any], extracted: str | None
    ) -> dict[str, Any]:
        """Return a request with the media that were extracted from it; see `whole`.

        Args:
            extracted: the JSON of their places.
        """
        return _whole(self._restored(connection, request, extracted))

    def _restored(
        self, connection: Connection, request: dict[str, Any], extracted: str | None
    ) -> Restored:
        if extracted is None:
            return Restored(request, [])
        read = partial(self._read, connection)
        return places.restore(request, places.loads(extracted), read)

    def _add(self, connection: Connection, name: str, data: bytes) -> int:
        """Store a medium and lock its row; return its size if it was not stored before."""
        inside = data if self._blobs is None else None
        for _ in range(3):
            if self._reserve(connection, name, len(data), inside):
                if self._blobs is not None:
                    self._blobs.put(name, data)
                return len(data)
            lock = select(media.c.hash).where(media.c.hash == name).with_for_update()
            if connection.scalar(lock) is not None:
                return 0
            # Another process deleted it between the two statements.
        raise StoreUnavailable("other processes store and delete the same media")

    def _reserve(
        self, connection: Connection, name: str, size: int, data: bytes | None = None
    ) -> bool:
        """Insert the row of a medium; return False if there is one."""
        insert = (
            _INSERT[connection.dialect.name](media)
            .on_conflict_do_nothing()
            .execution_options(preserve_rowcount=True)
        )
        return connection.execute(insert.values(hash=name, size=size, data=data)).rowcount == 1

    def _remove(self, connection: Connection, hashes: Collection[str]) -> list[int]:
        """Delete the rows of media that no object has; return their sizes.

        Their bytes are deleted by `clean`, after the transaction.
        """
        locked = select(media.c.hash, media.c.size).where(media.c.hash.in_(hashes))
        sizes = {
            row.hash: row.size
            for row in connection.execute(locked.order_by(media.c.hash).with_for_update())
        }
        # A new statement also sees what others committed before the rows were locked.
        kept = {*connection.scalars(select(uses.c.hash).where(uses.c.hash.in_(hashes)))}
        gone = [name for name in sizes if name not in kept]
        if gone:
            connection.execute(media.delete().where(media.c.hash.in_(gone)))
            if self._blobs is not None:
                self.unused.update(gone)
        return [sizes[name] for name in gone]

    def _read(self, connection: Connection, name: str) -> bytes | None:
        row = connection.execute(
            select(media.c.data, media.c.hash).where(media.c.hash == name)
        ).one_or_none()
        if row is None:
            return None
        if row.data is None and self._blobs is not None:
            return self._blobs.get(name)
        data: bytes | None = row.data
        return data


def _whole(found: Restored) -> dict[str, Any]:
    """Return a request whose media are all there; an empty image would be a wrong answer."""
    if found.missing:
        hashes = {place.hash for place in found.missing}
        detail = f"the medium {min(hashes)} is missing or damaged"
        if len(hashes) > 1:
            detail = f"{detail}, and {len(hashes) - 1} more of the same request"
        raise StoreUnavailable(MISSING, detail)
    return found.request
