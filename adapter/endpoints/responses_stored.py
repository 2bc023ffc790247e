"""Stored responses: retrieve, delete and cancel them, and list their input items."""

from __future__ import annotations

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.errors import shortened
from ...schemas.openai.response_queries import ItemsQuery, RetrieveQuery
from ..errors import InvalidRequest
from ..exchange import EVENT_STREAM, Exchange
from ..query import read_query
from ..responses.listed import input_items
from ..responses.replay import replayed
from ..service import Service
from ..store.ids import time_of
from ..store.record import Stored
from ..store.store import Store
from .stored import wrong_after
from .stored_replies import as_json, page_of

KIND = "response"

_RETRIEVE: TypeAdapter[RetrieveQuery] = TypeAdapter(RetrieveQuery)
_ITEMS: TypeAdapter[ItemsQuery] = TypeAdapter(ItemsQuery)
# The size of a response is not known before it is made, so it is made in a thread.
_SIZE = offload.SMALL + 1


async def retrieve_response(exchange: Exchange, service: Service, name: str) -> None:
    """Return a stored response, or its events with `stream=true`."""
    query = read_query(exchange, _RETRIEVE, service.strict)
    stored = await found_response(exchange, service.store, name)
    if not query.stream:
        await exchange.reply_in_parts(await offload.run(_SIZE, as_json, stored.reply))
        return
    after = -1 if query.starting_after is None else query.starting_after
    parts = await offload.run(_SIZE, replayed, stored.reply, after)
    await exchange.start(200, EVENT_STREAM)
    for part in parts:
        await exchange.chunk(part)
    await exchange.chunk(b"", more=False)


async def delete_response(exchange: Exchange, service: Service, name: str) -> None:
    """Delete a stored response."""
    store = service.store
    known = store is not None and time_of(name) is not None
    if store is None or not known or not await store.delete(exchange.key, KIND, name):
        raise unknown_response(name)
    body = {"id": name, "object": "response.deleted", "deleted": True}
    await exchange.reply(200, orjson.dumps(body))


async def cancel_response(exchange: Exchange, service: Service, name: str) -> None:
    """Reject the request: a response that is stored has ended."""
    await found_response(exchange, service.store, name)
    raise InvalidRequest("Cannot cancel a synchronous response.")


async def list_input_items(exchange: Exchange, service: Service, name: str) -> None:
    """List the items of the input of a stored response, without those of earlier responses."""
    query = read_query(exchange, _ITEMS, service.strict)
    stored = await found_response(exchange, service.store, name, whole=True)
    items = await offload.run(_SIZE, input_items, stored)
    if query.order == "desc":
        items.reverse()
    if query.after:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise wrong_after(query.after, "the id of an input item of this response")
        items = items[ids.index(query.after) + 1 :]
    page, more = items[: query.limit], len(items) > query.limit
    await exchange.reply_in_parts(await offload.run(_SIZE, page_of, page, more, ""))


async def found_response(
    exchange: Exchange, store: Store | None, name: str, whole: bool = False
) -> Stored:
    """Return a stored response of the client's key.

    Args:
        whole: True to get the request with its input.

    Raises:
        InvalidRequest: a 404 for an id that does not exist, or of another key.
    """
    found = None
    if store is not None and time_of(name) is not None:
        found = await store.get(exchange.key, KIND, name, whole)
    if found is None:
        raise unknown_response(name)
    return found


def unknown_response(name: str) -> InvalidRequest:
    """Return the error for a response that does not exist."""
    return InvalidRequest(f"Response with id '{shortened(name)}' not found.", status=404)
