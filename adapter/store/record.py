"""The record of one object on its way into the store, and the object that comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

# The kind of objects that have items.
CONVERSATION = "conversation"


@dataclass(slots=True, eq=False)
class Record:
    """An object to store; it is turned into JSON in the thread that writes it.

    Args:
        id: the object's id (`ids.new_id`).
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
    is_withdrawn: bool = field(default=False, init=False)
    is_tried: bool = field(default=False, init=False)
    is_rejected: bool = field(default=False, init=False)
    is_loose: bool = field(default=True, init=False)
    rows: Any = field(default=None, init=False)
    item_rows: Any = field(default=None, init=False)
    appended: Sequence[str] = field(default=(), init=False)


@dataclass(frozen=True, slots=True)
class Stored:
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


@dataclass(frozen=True, slots=True)
class Query:
    """The part of a list that a client asks for.

    Args:
        after: the id that the page continues after, or None for the first page.
        limit: the number of objects.
        descending: True to begin with the newest object.
        model: only objects of this model.
        metadata: only objects with all these pairs.
    """

    after: str | None = None
    limit: int = 20
    descending: bool = False
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Page(NamedTuple, Generic[T]):
    """A part of a list."""

    data: list[T]
    has_more: bool


class ItemPage(NamedTuple):
    """A part of the items of a conversation.

    Args:
        is_known: False if the conversation never had the item that the page continues after.
    """

    data: list[dict[str, Any]]
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
