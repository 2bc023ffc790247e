"""Records as rows of the tables, and back (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import orjson

from ..parts import PART, Parts
from .media import LISTS, Medium, dumps, extract
from .record import Record

# Bytes that the database and its indexes need for an object besides its text, measured.
ROW = 600
# The same for an item of a conversation.
ITEM_ROW = 350

Rows: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]], list[Medium]]


def pack(records: Iterable[Record]) -> None:
    """Replace requests and replies by their JSON, which takes up to 25 times less memory."""
    for record in records:
        # Who writes a record that has no JSON rejects it.
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            rows, items = rows_of(record), items_of(record)
            record.rows, record.item_rows = rows, items
            record.request, record.reply, record.items = {}, {}, ()


def rows_of(record: Record) -> Rows:
    """Return the row of an object, the rows of its metadata, and the media of its request."""
    if record.rows is not None:
        packed: Rows = record.rows
        return packed
    request, media = extract(record.request)
    given = {name: request[name] for name in LISTS if name in request}
    # An update changes the metadata, which have a column of their own.
    apart = {*given, "metadata"}
    parameters = {name: value for name, value in request.items() if name not in apart}
    texts = {
        "metadata": orjson.dumps(record.metadata).decode(),
        "request": _json(parameters, record.size),
        "reply": _json(record.reply, record.size),
        "input": _json(given, record.size),
    }
    places = dumps([medium.place for medium in media]) if media else None
    row = {
        "id": record.id,
        "kind": record.kind,
        "owner": record.owner,
        "created_at": record.created_at,
        "used_at": record.created_at,
        "parent": record.parent,
        "chain": record.chain,
        "model": column_of(record.model),
        "request_id": record.request_id,
        "size": ROW + sum(map(size_of, (*texts.values(), places or ""))),
        "media": places,
        **texts,
    }
    return row, pairs_of(record, record.metadata), media


def size_of(text: str) -> int:
    """Return the size of a text in bytes of UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def bytes_of(record: Record) -> int:
    """Return the size of a record with its media, in bytes."""
    row, _, media = rows_of(record)
    data = {medium.place.hash: len(medium.data) for medium in media}
    return int(row["size"]) + sum(data.values())


class ItemRow(NamedTuple):
    """The row of an item, without its conversation and its position, and its media."""

    values: dict[str, Any]
    media: list[Medium]


def items_of(record: Record) -> Sequence[ItemRow]:
    """Return the rows of the items that a record appends to its conversation."""
    if record.item_rows is not None:
        packed: Sequence[ItemRow] = record.item_rows
        return packed
    return item_rows(record.items, record.size)


def item_rows(items: Iterable[Mapping[str, Any]], size: int = PART + 1) -> list[ItemRow]:
    """Return the rows of items.

    Args:
        size: the estimated size of all items, in bytes of JSON.
    """
    return [_item_row(item, size) for item in items]


def _item_row(item: Mapping[str, Any], size: int) -> ItemRow:
    request, media = extract({"input": [item]})
    text = _json(request["input"][0], size)
    places = dumps([medium.place for medium in media]) if media else None
    values = {
        "id": column_of(item["id"]),
        "size": ITEM_ROW + size_of(text) + size_of(places or ""),
        "media": places,
        "item": text,
    }
    return ItemRow(values, media)


def item_of(text: str) -> dict[str, Any]:
    """Return the item of a row.

    Raises:
        ValueError, TypeError: the row is damaged.
    """
    item = orjson.loads(text)
    if type(item) is not dict:
        raise TypeError
    return item


def _json(value: Mapping[str, Any], size: int) -> str:
    """Return JSON; a large value is encoded in parts, so that other threads run meanwhile."""
    if size <= PART:
        return orjson.dumps(value).decode()
    parts = Parts()
    parts.add_value(value)
    return b"".join(parts.end()).decode()


def pairs_of(one: Any, metadata: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of metadata of a record, or of a row of `objects`."""
    common = {name: getattr(one, name) for name in ("owner", "kind", "created_at", "id")}
    pairs = {(column_of(key), column_of(value)): None for key, value in metadata.items()}
    return [{**common, "key": key, "value": value} for key, value in pairs]


def column_of(text: str) -> str:
    """Return a text for a column that is searched; PostgreSQL takes no null characters."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
