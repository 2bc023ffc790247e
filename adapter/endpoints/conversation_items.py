"""The items of conversations: append, list, retrieve and delete them."""

from __future__ import annotations

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.errors import shortened
from ...schemas.openai.conversations import AddItems
from ...schemas.openai.response_queries import ItemsQuery
from ..errors import InvalidRequest
from ..exchange import Exchange
from ..query import read_query
from ..service import Service
from ..store.records import CONVERSATION
from ..store.store import Store
from .conversations import given, known, refusals, unknown
from .stored import store_of, wrong_after
from .stored_replies import as_json, page_of

_ADD: TypeAdapter[AddItems] = TypeAdapter(AddItems)
_LIST: TypeAdapter[ItemsQuery] = TypeAdapter(ItemsQuery)
# The size of a response is not known before it is made, so it is made in a thread.
_SIZE = offload.SMALL + 1


async def append_items(exchange: Exchange, service: Service, name: str) -> None:
    """Append items to a conversation, and return them as a list."""
    store = store_of(exchange, service)
    items, _ = await given(exchange, service, _ADD)
    with refusals():
        found = await store.append(exchange.key, known(name), items)
    if not found:
        raise unknown(name)
    await exchange.reply_in_parts(await offload.run(_SIZE, page_of, items, False, ""))


async def list_items(exchange: Exchange, service: Service, name: str) -> None:
    """List the items of a conversation, by default the newest one first."""
    store = store_of(exchange, service)
    query = read_query(exchange, _LIST, service.strict)
    page = await store.items(
        exchange.key, known(name), query.after or None, query.limit, query.order == "desc"
    )
    if page is None:
        raise unknown(name)
    if not page.is_known:
        raise wrong_after(query.after or "", "the id of an item of this conversation")
    parts = await offload.run(_SIZE, page_of, page.data, page.has_more, "")
    await exchange.reply_in_parts(parts)


async def retrieve_item(exchange: Exchange, service: Service, name: str, item: str) -> None:
    """Return an item of a conversation."""
    store = store_of(exchange, service)
    found = await store.item(exchange.key, known(name), item)
    if found is None:
        raise await _unknown_item(exchange, store, name, item)
    await exchange.reply_in_parts(await offload.run(_SIZE, as_json, found))


async def delete_item(exchange: Exchange, service: Service, name: str, item: str) -> None:
    """Delete an item of a conversation, and return the conversation."""
    store = store_of(exchange, service)
    stored = await store.remove_item(exchange.key, known(name), item)
    if stored is None:
        raise await _unknown_item(exchange, store, name, item)
    await exchange.reply(200, orjson.dumps(stored.reply))


async def _unknown_item(exchange: Exchange, store: Store, name: str, item: str) -> InvalidRequest:
    """Return the error for an item that does not exist, or for its conversation."""
    if await store.get(exchange.key, CONVERSATION, name) is None:
        return unknown(name)
    return InvalidRequest(f"Item with id '{shortened(item)}' not found.", status=404)
