"""Conversations: create, retrieve, update and delete them (contract of responses, section 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import orjson
from pydantic import TypeAdapter

from ...backends.errors import shortened
from ...schemas.openai.conversations import AddItems, CreateConversation, DeletedConversation
from ...schemas.openai.stored import MetadataUpdate
from ..errors import InvalidRequest
from ..exchange import Exchange
from ..responses.listed import named
from ..service import Service
from ..store.errors import ConversationTooLarge, DuplicateItem
from ..store.records import CONVERSATION, time_of
from ..validation import note_unknown, parse, read
from .stored import store_of

G = TypeVar("G", CreateConversation, AddItems)

_CREATE: TypeAdapter[CreateConversation] = TypeAdapter(CreateConversation)
_UPDATE: TypeAdapter[MetadataUpdate] = TypeAdapter(MetadataUpdate)


class Given(NamedTuple):
    """The items of a request with ids and in the form of lists, and its metadata."""

    items: list[dict[str, Any]]
    metadata: Mapping[str, str]


async def create_conversation(exchange: Exchange, service: Service) -> None:
    """Create a conversation, empty or with its first items."""
    store = store_of(exchange, service)
    items, metadata = await given(exchange, service, _CREATE)
    with refusals():
        stored = await store.create_conversation(exchange.key, exchange.request_id, metadata, items)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def retrieve_conversation(exchange: Exchange, service: Service, name: str) -> None:
    """Return a conversation without its items."""
    store = store_of(exchange, service)
    stored = await store.get(exchange.key, CONVERSATION, known(name))
    if stored is None:
        raise unknown(name)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def update_conversation(exchange: Exchange, service: Service, name: str) -> None:
    """Replace the metadata of a conversation, and return it."""
    store = store_of(exchange, service)
    update = await read(exchange, _UPDATE)
    note_unknown(exchange, update, service.strict)
    stored = await store.update(exchange.key, CONVERSATION, known(name), update.metadata or {})
    if stored is None:
        raise unknown(name)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def delete_conversation(exchange: Exchange, service: Service, name: str) -> None:
    """Delete a conversation with its items."""
    store = store_of(exchange, service)
    if not await store.delete(exchange.key, CONVERSATION, known(name)):
        raise unknown(name)
    reply: DeletedConversation = {"id": name, "object": "conversation.deleted", "deleted": True}
    await exchange.reply(200, orjson.dumps(reply))


async def given(exchange: Exchange, service: Service, adapter: TypeAdapter[G]) -> Given:
    """Return the items and the metadata of a request; unknown fields are listed in a header."""
    return await exchange.json(partial(_given, exchange, service.strict, adapter))


def _given(
    exchange: Exchange, strict: bool, adapter: TypeAdapter[G], body: Mapping[str, Any]
) -> Given:
    request = parse(adapter, (), body)
    note_unknown(exchange, request, strict)
    metadata = request.metadata if isinstance(request, CreateConversation) else None
    return Given(named(body.get("items") or ()), metadata or {})


def known(name: str) -> str:
    """Return the id of a conversation.

    Raises:
        InvalidRequest: it is the id of nothing that was ever made here.
    """
    if time_of(name) is None:
        raise unknown(name)
    return name


def unknown(name: str) -> InvalidRequest:
    """Return the error for a conversation that does not exist, or of another key."""
    return InvalidRequest(f"Conversation with id '{shortened(name)}' not found.", status=404)


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
        raise InvalidRequest(
            "Invalid 'items': the conversation would be larger than the store. Delete items, or "
            "start the server with a larger --store-size.",
            "items",
            "invalid_value",
        ) from None
