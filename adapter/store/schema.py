"""The schema of a store: its tables, the same for SQLite and PostgreSQL, and their migrations.

Text of JSON is kept as text, so that an operator can read it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    Index(
        "latimer_objects_by_chain",
        "chain",
        sqlite_where=column("chain").is_not(None),
        postgresql_where=column("chain").is_not(None),
    ),
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
)

# The number of objects, and the bytes of objects and media, kept by every transaction.
totals = Table(
    "latimer_totals",
    schema,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

# The number of the last migration.
versions = Table("latimer_schema", schema, Column("version", Integer, primary_key=True))


# The statements of each migration, from version 1. A released migration never changes.
MIGRATIONS: Sequence[Sequence[str]] = (
    (
        """CREATE TABLE latimer_objects (
            id TEXT NOT NULL PRIMARY KEY,
            kind TEXT NOT NULL,
            owner TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            used_at BIGINT NOT NULL,
            parent TEXT,
            chain TEXT,
            model TEXT NOT NULL,
            request_id TEXT NOT NULL,
            size BIGINT NOT NULL,
            metadata TEXT NOT NULL,
            media TEXT,
            request TEXT NOT NULL,
            reply TEXT NOT NULL,
            input TEXT NOT NULL
        )""",
        """CREATE INDEX latimer_objects_by_time
            ON latimer_objects (owner, kind, created_at, id)""",
        """CREATE INDEX latimer_objects_by_model
            ON latimer_objects (owner, kind, model, created_at, id)""",
        "CREATE INDEX latimer_objects_by_age ON latimer_objects (created_at, id)",
        "CREATE INDEX latimer_objects_by_use ON latimer_objects (used_at, id)",
        """CREATE INDEX latimer_objects_by_chain
            ON latimer_objects (chain) WHERE chain IS NOT NULL""",
        """CREATE TABLE latimer_items (
            conversation TEXT NOT NULL,
            position BIGINT NOT NULL,
            id TEXT NOT NULL,
            size BIGINT NOT NULL,
            media TEXT,
            item TEXT NOT NULL,
            PRIMARY KEY (conversation, position)
        )""",
        "CREATE INDEX latimer_items_by_id ON latimer_items (conversation, id)",
        """CREATE TABLE latimer_metadata (
            owner TEXT NOT NULL,
            kind TEXT NOT NULL,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            id TEXT NOT NULL,
            PRIMARY KEY (owner, kind, key, value, created_at, id)
        ){clustered}""",
        """CREATE TABLE latimer_media (
            hash TEXT NOT NULL PRIMARY KEY,
            size BIGINT NOT NULL,
            data {bytes}
        )""",
        """CREATE TABLE latimer_object_media (
            hash TEXT NOT NULL,
            id TEXT NOT NULL,
            PRIMARY KEY (hash, id)
        ){clustered}""",
        "CREATE INDEX latimer_object_media_by_object ON latimer_object_media (id)",
        """CREATE TABLE latimer_totals (
            name TEXT NOT NULL PRIMARY KEY,
            value BIGINT NOT NULL
        )""",
        "INSERT INTO latimer_totals (name, value) VALUES ('objects', 0), ('bytes', 0)",
    ),
)

_WORDS = {
    # SQLite keeps a table with this clause in the order of its primary key, without an index.
    "sqlite": {"bytes": "BLOB", "clustered": " WITHOUT ROWID"},
    "postgresql": {"bytes": "BYTEA", "clustered": ""},
}
# The key of PostgreSQL's advisory lock: "latimer" in ASCII.
_LOCK = int.from_bytes(b"latimer", "big")

NEWEST = len(MIGRATIONS)
# The beginning of the names of all tables.
OWN = "latimer_"


def version_of(connection: Connection) -> int:
    """Return the number of the last migration; 0 for an empty database.

    Raises:
        StoreError: it is an SQLite file of another program.
    """
    if not inspect(connection).has_table(versions.name):
        _refuse_foreign(connection)
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
    if not before:
        connection.execute(text("CREATE TABLE latimer_schema (version INTEGER NOT NULL)"))
        connection.execute(versions.insert(), {"version": 0})
    words = _WORDS[connection.dialect.name]
    for statements in MIGRATIONS[before:]:
        for statement in statements:
            connection.exec_driver_sql(statement.format(**words))
    connection.execute(versions.update().values(version=NEWEST))
    return before, NEWEST


def _refuse_foreign(connection: Connection) -> None:
    """Raise `StoreError` for an SQLite file whose tables are those of another program.

    A database of PostgreSQL is usually shared by programs.
    """
    if connection.dialect.name != "sqlite":
        return
    tables = inspect(connection).get_table_names()
    if tables and not any(name.startswith(OWN) for name in tables):
        raise StoreError(
            "It is a database of another program, with tables that are not Latimer's. Name a new "
            "file, or a file of Latimer."
        )


def check(version: int) -> None:
    """Raise `StoreError` for a schema that is newer than this program."""
    if version > NEWEST:
        raise StoreError(
            f"The store's schema has version {version}, and this Latimer knows versions up to "
            f"{NEWEST}. Use the Latimer that made it, or a newer one."
        )
