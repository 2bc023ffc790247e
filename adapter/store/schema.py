"""The schema of a store: its tables, the same for SQLite and PostgreSQL, and their migrations.

Text of JSON is kept as text, so that an operator can read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    column,
    inspect,
    select,
    text,
)

from .errors import StoreError

schema = MetaData()
_CHAINED = column("chain").is_not(None)

# One row for each stored object. Times are in microseconds since 1970, `size` in bytes. An object
# that continues another one has it as `parent`. All objects of a tree have its root as `chain`, and
# the same `used_at`.
objects = Table(
    "latimer_objects",
    schema,
    Column("id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("used_at", BigInteger, nullable=False),
    Column("parent", Text),
    Column("chain", Text),
    Column("model", Text, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("metadata", Text, nullable=False),
    # The places of media that were taken out of the request (`media.py`).
    Column("media", Text),
    Column("request", Text, nullable=False),
    Column("reply", Text, nullable=False),
    # The request's messages, apart from its parameters, because no list reads them.
    Column("input", Text, nullable=False),
    Index("latimer_objects_by_time", "owner", "kind", "created_at", "id"),
    Index("latimer_objects_by_model", "owner", "kind", "model", "created_at", "id"),
    Index("latimer_objects_by_age", "created_at", "id"),
    Index("latimer_objects_by_use", "used_at", "id"),
    Index("latimer_objects_by_chain", "chain", sqlite_where=_CHAINED, postgresql_where=_CHAINED),
)

# With the sizes, which are added up without the rows.
_BY_OWNER = Index(
    "latimer_objects_by_owner", *(objects.c[name] for name in ("owner", "used_at", "id", "size"))
)

# One row for each item of a conversation, in their order. The size of a conversation contains those
# of its items. A deleted item is an empty text, so that a list can still continue after it.
items = Table(
    "latimer_items",
    schema,
    Column("conversation", Text, primary_key=True),
    Column("position", BigInteger, primary_key=True),
    Column("id", Text, nullable=False),
    Column("size", BigInteger, nullable=False),
    # The places of media that were taken out of the item, which are media of the conversation.
    Column("media", Text),
    Column("item", Text, nullable=False),
    Index("latimer_items_by_id", "conversation", "id"),
)

# One row for each pair of metadata, in the order of a filtered list.
pairs = Table(
    "latimer_metadata",
    schema,
    Column("owner", Text, primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text, primary_key=True),
    Column("created_at", BigInteger, primary_key=True),
    Column("id", Text, primary_key=True),
    # SQLite keeps such a table in the order of its primary key, without an index.
    sqlite_with_rowid=False,
)

# One row for each image or audio file; `data` is null if the bytes are outside the database.
media = Table(
    "latimer_media",
    schema,
    Column("hash", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("data", LargeBinary),
)

# The media of each object.
uses = Table(
    "latimer_object_media",
    schema,
    Column("hash", Text, primary_key=True),
    Column("id", Text, primary_key=True),
    Index("latimer_object_media_by_object", "id"),
    sqlite_with_rowid=False,
)

# The number of objects, and the bytes of objects and media, kept by every transaction.
totals = Table(
    "latimer_totals",
    schema,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

# The number of the last migration.
versions = Table("latimer_schema", schema, Column("version", Integer, nullable=False))


def _with_order_of_owners(connection: Connection) -> None:
    _BY_OWNER.create(connection)


# The changes from each version to the next, from version 1. A released migration never changes. An
# empty database gets the tables above, which are those of the newest version.
MIGRATIONS: Sequence[Callable[[Connection], None]] = (_with_order_of_owners,)
# The key of PostgreSQL's advisory lock: "latimer" in ASCII.
_LOCK = int.from_bytes(b"latimer", "big")

NEWEST = 1 + len(MIGRATIONS)
# The beginning of the names of all tables.
OWN = "latimer_"


def version_of(connection: Connection) -> int:
    """Return the number of the last migration; 0 for an empty database.

    Raises:
        StoreError: it is an SQLite file of another program.
    """
    found = inspect(connection)
    if not found.has_table(versions.name):
        # A database of PostgreSQL is usually shared by programs.
        tables = found.get_table_names() if connection.dialect.name == "sqlite" else ()
        if tables and not any(name.startswith(OWN) for name in tables):
            raise StoreError(
                "It is a database of another program, with tables that are not Latimer's."
            )
        return 0
    return connection.scalar(select(versions.c.version)) or 0


def migrate(connection: Connection) -> tuple[int, int]:
    """Run the missing migrations; return the versions before and after.

    The caller's transaction must be one that writes. Another process that migrates at the same
    time waits for it.

    Raises:
        StoreError: the schema is newer than this program.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    before = version_of(connection)
    check(before)
    if before == NEWEST:
        return before, before
    if before:
        for migration in MIGRATIONS[before - 1 :]:
            migration(connection)
    else:
        schema.create_all(connection, checkfirst=False)
        connection.execute(
            totals.insert(), [{"name": "objects", "value": 0}, {"name": "bytes", "value": 0}]
        )
        connection.execute(versions.insert(), {"version": 0})
    connection.execute(versions.update().values(version=NEWEST))
    return before, NEWEST


def check(version: int) -> None:
    """Raise `StoreError` for a schema that is newer than this program."""
    if version > NEWEST:
        raise StoreError(
            f"The store's schema has version {version}, and this Latimer knows versions up to "
            f"{NEWEST}. Use the Latimer that made it, or a newer one."
        )
