"""Conversations and their items: create, list, update, delete (contract of responses, 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson
from pydantic import TypeAdapter

from ...backends.errors import shortened
from ...schemas.openai.conversations import AddItems, CreateConversation, DeletedConversation
from ...schemas.openai.stored import ItemsQuery
from ..errors import InvalidRequest, not_found, wrong_value
from ..request import Exchange
from ..responses.items import named
from ..service import Service
from ..store.errors import ConversationTooLarge, DuplicateItem
from ..store.records import CONVERSATION
from ..store.store import Store
from ..validation import note_unknown, parse, read_query
from .common import send
from .stored import as_json, delete, found_object, page_of, store_of, updated, wrong_after

G = TypeVar("G", CreateConversation, AddItems)

_CREATE: TypeAdapter[CreateConversation] = TypeAdapter(CreateConversation)


class Given(NamedTuple):
    """The items of a request with ids and in the form of lists, and its metadata."""

    items: list[dict[str, Any]]
    metadata: Mapping[str, str]


async def create_conversation(exchange: Exchange, service: Service) -> None:
    """Create a conversation, empty or with its first items."""
    await exchange.read_body()
    store = store_of(exchange, service)
    items, metadata = await given(exchange, service, _CREATE)
    with refusals():
        stored = await store.create_conversation(exchange.key, exchange.request_id, metadata, items)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def retrieve_conversation(exchange: Exchange, service: Service, name: str) -> None:
    """Return a conversation without its items."""
    stored = await found_object(exchange, service, CONVERSATION, name)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def update_conversation(exchange: Exchange, service: Service, name: str) -> None:
    """Replace the metadata of a conversation, and return it."""
    stored = await updated(exchange, service, CONVERSATION, name)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def delete_conversation(exchange: Exchange, service: Service, name: str) -> None:
    """Delete a conversation with its items."""
    await delete(exchange, service, CONVERSATION, name)
    reply: DeletedConversation = {"id": name, "object": "conversation.deleted", "deleted": True}
    await exchange.reply(200, orjson.dumps(reply))


async def given(exchange: Exchange, service: Service, adapter: TypeAdapter[G]) -> Given:
    """Return the items and the metadata of a request; unknown fields are listed in a header."""
    return await exchange.read_json(partial(_given, exchange, service.strict, adapter))


def _given(
    exchange: Exchange, strict: bool, adapter: TypeAdapter[G], body: Mapping[str, Any]
) -> Given:
    request = parse(adapter, (), body)
    note_unknown(exchange, request, strict)
    metadata = request.metadata if isinstance(request, CreateConversation) else None
    return Given(named(body.get("items") or ()), metadata or {})


def duplicate(item: str, param: str) -> InvalidRequest:
    """Return OpenAI's error for an item with an id that the conversation has already."""
    return InvalidRequest(
        f"Duplicate item found with id {shortened(item)}. Remove duplicate items from your input "
        "and try again.",
        param,
    )


@contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of items that a conversation cannot take into errors of the request."""
    try:
        yield
    except DuplicateItem as error:
        raise duplicate(error.id, "items") from None
    except ConversationTooLarge:
        raise wrong_value(
            "items",
            "the store has no room for the conversation. Delete items or other conversations, or "
            "start the server with a larger --store-size.",
        ) from None


_ADD: TypeAdapter[AddItems] = TypeAdapter(AddItems)
_LIST: TypeAdapter[ItemsQuery] = TypeAdapter(ItemsQuery)


async def append_items(exchange: Exchange, service: Service, name: str) -> None:
    """Append items to a conversation, and return them as a list."""
    await exchange.read_body()
    store = store_of(exchange, service)
    items, _ = await given(exchange, service, _ADD)
    with refusals():
        found = await store.append(exchange.key, name, items)
    if not found:
        raise not_found("Conversation", name)
    await send(exchange, page_of, items, False, "")


async def list_items(exchange: Exchange, service: Service, name: str) -> None:
    """List the items of a conversation, by default the newest one first."""
    store = store_of(exchange, service)
    query = read_query(exchange, _LIST, service.strict)
    page = await store.items(
        exchange.key, name, query.after or None, query.limit, query.order == "desc"
    )
    if page is None:
        raise not_found("Conversation", name)
    if not page.is_known:
        raise wrong_after(query.after or "", "the id of an item of this conversation")
    await send(exchange, page_of, page.data, page.has_more, "")


async def retrieve_item(exchange: Exchange, service: Service, name: str, item: str) -> None:
    """Return an item of a conversation."""
    store = store_of(exchange, service)
    found = await store.item(exchange.key, name, item)
    if found is None:
        raise await _unknown_item(exchange, store, name, item)
    await send(exchange, as_json, found)


async def delete_item(exchange: Exchange, service: Service, name: str, item: str) -> None:
    """Delete an item of a conversation, and return the conversation."""
    store = store_of(exchange, service)
    stored = await store.remove_item(exchange.key, name, item)
    if stored is None:
        raise await _unknown_item(exchange, store, name, item)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def _unknown_item(exchange: Exchange, store: Store, name: str, item: str) -> InvalidRequest:
    """Return the error for an item that does not exist, or for its conversation."""
    if await store.get(exchange.key, CONVERSATION, name) is None:
        return not_found("Conversation", name)
    return not_found("Item", item)
