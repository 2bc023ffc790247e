"""The tables of a store, the same for SQLite and PostgreSQL.

`migrations.py` makes them. Text of JSON is kept as text, so that an operator can read it.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    column,
)

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
