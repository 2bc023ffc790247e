"""Stored chat completions: list, retrieve, update and delete them (contract, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.errors import shortened
from ...schemas.openai.stored import CompletionsQuery, Deleted, ListQuery, MetadataUpdate
from ..errors import InvalidRequest
from ..exchange import Exchange
from ..query import read_query
from ..service import Service
from ..store.records import Query, Stored, time_of
from ..store.store import Store
from ..validation import note_unknown, read
from .stored_replies import completion, joined, listed_completion, message_number, messages

KIND = "chat.completion"

_LIST: TypeAdapter[ListQuery] = TypeAdapter(ListQuery)
_COMPLETIONS: TypeAdapter[CompletionsQuery] = TypeAdapter(CompletionsQuery)
_UPDATE: TypeAdapter[MetadataUpdate] = TypeAdapter(MetadataUpdate)

# The size of a response is not known before it is made, so it is made in a thread.
_SIZE = offload.SMALL + 1


async def list_chat_completions(exchange: Exchange, service: Service) -> None:
    """List the stored chat completions of the client's key."""
    store = store_of(exchange, service)
    query = read_query(exchange, _COMPLETIONS, service.strict)
    if query.after and time_of(query.after) is None:
        raise wrong_after(query.after, "the id of a chat completion")
    wanted = Query(
        query.after or None,
        query.limit,
        query.order == "desc",
        query.model,
        query.metadata or {},
    )
    page = await store.page(exchange.key, KIND, wanted, listed_completion)
    await _send(exchange, joined, page.data, page.has_more)


async def retrieve_chat_completion(exchange: Exchange, service: Service, name: str) -> None:
    """Return a stored chat completion."""
    store = store_of(exchange, service)
    await _send(exchange, completion, await _found(exchange, store, name))


async def update_chat_completion(exchange: Exchange, service: Service, name: str) -> None:
    """Replace the metadata of a stored chat completion, and return it."""
    store = store_of(exchange, service)
    update = await read(exchange, _UPDATE)
    note_unknown(exchange, update, service.strict)
    metadata = update.metadata or {}
    known = time_of(name) is not None
    changed = await store.update(exchange.key, KIND, name, metadata) if known else None
    if changed is None:
        raise _unknown(name)
    await _send(exchange, completion, changed)


async def delete_chat_completion(exchange: Exchange, service: Service, name: str) -> None:
    """Delete a stored chat completion."""
    store = store_of(exchange, service)
    if time_of(name) is None or not await store.delete(exchange.key, KIND, name):
        raise _unknown(name)
    reply: Deleted = {"object": "chat.completion.deleted", "id": name, "deleted": True}
    await exchange.reply(200, orjson.dumps(reply))


async def list_messages(exchange: Exchange, service: Service, name: str) -> None:
    """List the messages of a stored chat completion's request."""
    store = store_of(exchange, service)
    query = read_query(exchange, _LIST, service.strict)
    stored = await _found(exchange, store, name, whole=True)
    after = None
    if query.after:
        after = message_number(stored, query.after)
        if after is None:
            raise wrong_after(query.after, "the id of a message of this chat completion")
    await _send(exchange, messages, stored, after, query.limit, query.order == "desc")


def store_of(exchange: Exchange, service: Service) -> Store:
    """Return the store.

    Raises:
        InvalidRequest: this server stores nothing.
    """
    if service.store is None:
        asked = shortened(f"{exchange.scope['method']} {exchange.scope['path']}")
        raise InvalidRequest(
            f"This server does not serve {asked}, because it runs with --store off. Start it with "
            "--store memory, or with a file.",
            code="unsupported_endpoint",
            status=404,
        )
    return service.store


async def _found(exchange: Exchange, store: Store, name: str, whole: bool = False) -> Stored:
    """Return a stored chat completion of the client's key.

    Args:
        whole: True to get the request with its messages.

    Raises:
        InvalidRequest: a 404 for an id that does not exist, or of another key.
    """
    known = time_of(name) is not None
    found = await store.get(exchange.key, KIND, name, whole) if known else None
    if found is None:
        raise _unknown(name)
    return found


def _unknown(name: str) -> InvalidRequest:
    return InvalidRequest(f"Chat completion with id '{shortened(name)}' not found.", status=404)


def wrong_after(after: str, expected: str) -> InvalidRequest:
    """Return the error for an `after` that is not an id in the list."""
    return InvalidRequest(
        f"Invalid 'after': '{shortened(after)}' is not {expected}. Send the 'last_id' of the "
        "previous page, or omit it.",
        "after",
        "invalid_value",
    )


async def _send(
    exchange: Exchange, make: Callable[..., Sequence[bytes]], *arguments: object
) -> None:
    """Send a response in parts, which a function makes in a thread."""
    await exchange.reply_in_parts(await offload.run(_SIZE, make, *arguments))
