"""The record of an object on its way into the store, its rows, and the object that comes back.

An id contains the time of its creation. It therefore has its place in a list, even after its object
was deleted. A client that deletes objects while it lists them continues at the right place.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import orjson

from ..limits.leases import Grant
from ..parts import PART, ChunkedJson
from .media import LISTS, Medium, dumps, extract

T = TypeVar("T")

# The kind of objects that have items.
CONVERSATION = "conversation"


@dataclass(slots=True, eq=False)
class Record:
    """An object to store; it is turned into JSON in the thread that writes it.

    Args:
        id: the object's id (`new_id`).
        kind: OpenAI's `object`, such as `chat.completion`.
        owner: the digest of the API key; empty if the server has no keys.
        created_at: microseconds since 1970, as in the id.
        request_id: the id of the request, as its response's header has it.
        request: the request's body.
        reply: the response object, with `metadata`.
        size: the estimated size, in bytes of JSON, which bounds the queue.
        end_user: the hash of the end user, for the log.
        parent: the id of the object that this one continues, or None.
        chain: the id of the first object that it continues in the end; its own id if it is the
            first of a chain, and None for an object that is never continued.
        conversation: the id of the conversation that the object belongs to, or None.
        items: the items, each with an id, to append to this conversation in the same transaction;
            those whose ids it has are not appended again. Their size is a part of `size`.
        is_kept: False to append the items only, and store no object.
        is_withdrawn: True if the object must not stay in the store, because its response says so.
        is_tried: True if the database may have got the object.
        is_rejected: True if the database can never take the object.
        is_loose: True until the object is packed because it has to wait.
        rows: the packed object as JSON, in place of its request and reply.
        item_rows: the packed items, in place of `items`.
        appended: the ids of the items that the last attempt appended.
    """

    id: str
    kind: str
    owner: str
    created_at: int
    model: str
    request_id: str
    request: Mapping[str, Any]
    reply: Mapping[str, Any]
    metadata: Mapping[str, str]
    size: int = 0
    end_user: str = ""
    parent: str | None = None
    chain: str | None = None
    conversation: str | None = None
    items: Sequence[Mapping[str, Any]] = ()
    is_kept: bool = True
    is_withdrawn: bool = field(default=False, init=False)
    is_tried: bool = field(default=False, init=False)
    is_rejected: bool = field(default=False, init=False)
    is_loose: bool = field(default=True, init=False)
    rows: Any = field(default=None, init=False)
    item_rows: Any = field(default=None, init=False)
    appended: Sequence[str] = field(default=(), init=False)


class Key(NamedTuple):
    """The owner, kind and id of an object.

    Args:
        since: microseconds since 1970; an object that was last used earlier counts as deleted.
    """

    owner: str
    kind: str
    id: str
    since: int = 0


class Stored(NamedTuple):
    """An object as the store returns it; see `Record`.

    Args:
        request: the request's body as the client sent it, with its media.
        reply: the response object as it was sent; a stream is joined.
    """

    id: str
    kind: str
    owner: str
    created_at: int
    model: str
    request_id: str
    metadata: dict[str, str]
    request: dict[str, Any]
    reply: dict[str, Any]
    parent: str | None = None
    chain: str | None = None


class Query(NamedTuple):
    """The part of a list that a client asks for.

    Args:
        after: the id that the page continues after, or None for the first page.
        limit: the number of objects.
        descending: True to begin with the newest object.
        model: only objects of this model.
        metadata: only objects with all these pairs.
        grant: only objects of models that a key may use.
    """

    after: str | None = None
    limit: int = 20
    descending: bool = False
    model: str | None = None
    metadata: Mapping[str, str] = MappingProxyType({})
    grant: Grant | None = None


class Page(NamedTuple, Generic[T]):
    """A part of a list.

    Args:
        is_known: False if the conversation never had the item that the page continues after.
    """

    data: list[T]
    has_more: bool
    is_known: bool = True


class Status(NamedTuple):
    """The state of a store.

    Args:
        state: `unavailable` while the database does not answer, `full` while its queue takes
            nothing more.
        waiting: the number of objects that are not written yet.
        lost: the number of objects that were never written.
    """

    state: str
    waiting: int
    lost: int


# Bytes that the database and its indexes need for an object besides its text, measured.
ROW = 600
# The same for an item of a conversation.
ITEM_ROW = 350

# The fields of a record that its row has unchanged.
_COPIED = ("id", "kind", "owner", "created_at", "parent", "chain", "request_id")

Rows: TypeAlias = tuple[dict[str, Any], list[dict[str, Any]], list[Medium]]


def pack(records: Iterable[Record]) -> None:
    """Replace requests and replies by their JSON, which takes up to 25 times less memory.

    Another thread may write them meanwhile. It gets a request before it looks for the JSON.
    """
    for record in records:
        # Who writes a record that has no JSON rejects it.
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            rows, items = rows_of(record), items_of(record)
            record.rows, record.item_rows = rows, items
            record.request, record.reply, record.items = {}, {}, ()


def rows_of(record: Record) -> Rows:
    """Return the row of an object, the rows of its metadata, and the media of its request."""
    whole, reply = record.request, record.reply
    if record.rows is not None:
        packed: Rows = record.rows
        return packed
    request, media = extract(whole)
    given = {name: request[name] for name in LISTS if name in request}
    # An update changes the metadata, which have a column of their own.
    apart = {*given, "metadata"}
    parameters = {name: value for name, value in request.items() if name not in apart}
    texts = {
        "metadata": orjson.dumps(record.metadata).decode(),
        "request": _json(parameters, record.size),
        "reply": _json(reply, record.size),
        "input": _json(given, record.size),
    }
    places = dumps([medium.place for medium in media]) if media else None
    row = {
        **{name: getattr(record, name) for name in _COPIED},
        "used_at": record.created_at,
        "model": column_of(record.model),
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
    items = record.items
    if record.item_rows is not None:
        packed: Sequence[ItemRow] = record.item_rows
        return packed
    return item_rows(items, record.size)


def item_rows(items: Iterable[Mapping[str, Any]], size: int = PART + 1) -> list[ItemRow]:
    """Return the rows of items.

    Args:
        size: the estimated size of all items, in bytes of JSON.
    """
    rows = []
    for item in items:
        request, media = extract({"input": [item]})
        text = _json(request["input"][0], size)
        places = dumps([medium.place for medium in media]) if media else None
        values = {
            "id": column_of(item["id"]),
            "size": ITEM_ROW + size_of(text) + size_of(places or ""),
            "media": places,
            "item": text,
        }
        rows.append(ItemRow(values, media))
    return rows


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
    parts = ChunkedJson()
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


# Hexadecimal digits of the time in microseconds, and of the random number after it at least.
_TIME, _RANDOM = 14, 10
_ID = re.compile(rf"[a-z]+[-_]([0-9a-f]{{{_TIME}}})[0-9a-f]{{{_RANDOM},}}")


def new_id(prefix: str, digits: int = _RANDOM) -> tuple[str, int]:
    """Return a new id, and the time that it contains, in microseconds since 1970.

    Args:
        digits: the number of random hexadecimal digits.
    """
    now = time.time_ns() // 1_000
    return f"{prefix}{now:0{_TIME}x}{os.urandom(digits // 2 + 1).hex()[:digits]}", now


def time_of(id: str) -> int | None:  # noqa: A002
    """Return the time that an id contains, in microseconds since 1970; None if it has none."""
    match = _ID.fullmatch(id)
    return None if match is None else int(match[1], 16)
