"""Stored responses: retrieve, delete and cancel them, and list their input items."""

from __future__ import annotations

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.errors import shortened
from ...schemas.openai.response_queries import ItemsQuery, RetrieveQuery
from ..background import KEPT
from ..errors import InvalidRequest
from ..exchange import EVENT_STREAM, Exchange
from ..query import read_query
from ..responses.listed import input_items
from ..responses.replay import replayed
from ..service import Service
from ..store.records import Stored, time_of
from .background import follow
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
    after = -1 if query.starting_after is None else query.starting_after
    job = service.background.find(exchange.key, name)
    if job is not None and query.stream:
        await found_response(exchange, service, name)
        await follow(exchange, job, after)
        return
    stored = await found_response(exchange, service, name, whole=query.stream)
    if not query.stream:
        await exchange.reply_in_parts(await offload.run(_SIZE, as_json, stored.reply))
        return
    if stored.reply["background"]:
        raise _not_streamed()
    parts = await offload.run(
        _SIZE, replayed, stored.reply, after, stored.request.get("service_tier") or "auto"
    )
    if not parts:
        raise _beyond(after)
    await exchange.start(200, EVENT_STREAM)
    for part in parts:
        await exchange.chunk(part)
    await exchange.chunk(b"", more=False)


async def delete_response(exchange: Exchange, service: Service, name: str) -> None:
    """Delete a stored response."""
    store = service.store
    job = service.background.find(exchange.key, name)
    if job is not None:
        await job.cancel(delete=True)
    known = store is not None and time_of(name) is not None
    found = store is not None and known and await store.delete(exchange.key, KIND, name)
    if job is not None:
        service.background.forget(name)
    elif not found:
        raise unknown_response(name)
    body = {"id": name, "object": "response.deleted", "deleted": True}
    await exchange.reply(200, orjson.dumps(body))


async def cancel_response(exchange: Exchange, service: Service, name: str) -> None:
    """End a response in the background, and return it; one that has ended is returned as it is."""
    job = service.background.find(exchange.key, name)
    if job is not None:
        await job.cancel()
    stored = await found_response(exchange, service, name)
    if not stored.reply["background"]:
        raise InvalidRequest("Cannot cancel a synchronous response.")
    await exchange.reply_in_parts(await offload.run(_SIZE, as_json, stored.reply))


async def list_input_items(exchange: Exchange, service: Service, name: str) -> None:
    """List the items of the input of a stored response, without those of earlier responses."""
    query = read_query(exchange, _ITEMS, service.strict)
    stored = await found_response(exchange, service, name, whole=True)
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
    exchange: Exchange, service: Service, name: str, whole: bool = False
) -> Stored:
    """Return a response of the client's key that is stored, or in the background.

    Args:
        whole: True to get the request with its input.

    Raises:
        InvalidRequest: a 404 for an id that does not exist, or of another key.
    """
    job = service.background.find(exchange.key, name)
    if job is not None and not job.is_stored:
        return job.stored()
    store, found = service.store, None
    if store is not None and time_of(name) is not None:
        found = await store.get(exchange.key, KIND, name, whole)
    if found is None:
        raise unknown_response(name)
    return found


def unknown_response(name: str) -> InvalidRequest:
    """Return the error for a response that does not exist."""
    return InvalidRequest(f"Response with id '{shortened(name)}' not found.", status=404)


def _beyond(after: int) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid 'starting_after': this response has no event after {after}. The events of a "
        "stored response have new numbers, with one delta for each text. Omit it.",
        "starting_after",
        "invalid_value",
    )


def _not_streamed() -> InvalidRequest:
    return InvalidRequest(
        f"This response can no longer be streamed because it ended more than {KEPT / 60:.0f} "
        "minutes ago, or its server was started again. Retrieve it without 'stream'.",
        "stream",
    )
