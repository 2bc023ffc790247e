"""Stored chat completions and responses: list, retrieve, update, cancel and delete them.

Contract, section 4; contract of responses, sections 1 and 9.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.errors import RequestError, shortened
from ...schemas.openai.chat import ChatRequest
from ...schemas.openai.stored import (
    CompletionsQuery,
    Deleted,
    ItemsQuery,
    ListedMessage,
    ListQuery,
    MetadataUpdate,
    RetrieveQuery,
    StoredCompletion,
)
from .. import dialects
from ..errors import (
    InvalidRequest,
    ReplicaUnavailable,
    WebSocketRefused,
    not_found,
    wrong_value,
)
from ..generation.frames import padded
from ..parts import LEVELS, ChunkedJson
from ..request import EVENT_STREAM, Exchange
from ..responses.background import KEPT, RUNNING, Job
from ..responses.items import input_items
from ..responses.output import replayed
from ..service import Service
from ..store.records import CONVERSATION, Query, Stored, time_of
from ..store.store import Store
from ..validation import note_unknown, read, read_query
from .background import follow
from .common import send

COMPLETION, RESPONSE = "chat.completion", "response"
# The kinds of objects in errors.
WORDS = {COMPLETION: "Chat completion", CONVERSATION: "Conversation", RESPONSE: "Response"}

_LIST: TypeAdapter[ListQuery] = TypeAdapter(ListQuery)
_COMPLETIONS: TypeAdapter[CompletionsQuery] = TypeAdapter(CompletionsQuery)
_UPDATE: TypeAdapter[MetadataUpdate] = TypeAdapter(MetadataUpdate)


async def list_chat_completions(exchange: Exchange, service: Service) -> None:
    """List the stored chat completions of the client's key."""
    await _list(exchange, service, COMPLETION, listed_completion)


async def list_responses(exchange: Exchange, service: Service) -> None:
    """List the stored responses of the client's key; OpenAI's API has no such list.

    Raises:
        WebSocketRefused: the request is the handshake of a WebSocket, which has the same path.
    """
    if exchange.headers.get("upgrade", "").lower() == "websocket":
        raise WebSocketRefused(exchange.scope["path"])
    await _list(exchange, service, RESPONSE, _listed_response)


async def _list(
    exchange: Exchange, service: Service, kind: str, show: Callable[[Stored], Listed]
) -> None:
    """List the stored objects of a kind that the query asks for."""
    store = store_of(exchange, service)
    query = read_query(exchange, _COMPLETIONS, service.strict)
    if query.after and time_of(query.after) is None:
        raise wrong_after(query.after, f"the id of a {WORDS[kind].lower()}")
    wanted = Query(
        query.after or None,
        query.limit,
        query.order == "desc",
        query.model,
        query.metadata or {},
        exchange.grant,
    )
    page = await store.page(exchange.key, kind, wanted, show)
    await send(exchange, joined, page.data, page.has_more)


async def retrieve_chat_completion(exchange: Exchange, service: Service, name: str) -> None:
    """Return a stored chat completion."""
    await send(exchange, completion, await found_object(exchange, service, COMPLETION, name))


async def update_chat_completion(exchange: Exchange, service: Service, name: str) -> None:
    """Replace the metadata of a stored chat completion, and return it."""
    await send(exchange, completion, await updated(exchange, service, COMPLETION, name))


async def updated(exchange: Exchange, service: Service, kind: str, name: str) -> Stored:
    """Replace the metadata of a stored object by that of the request, and return it."""
    await exchange.read_body()
    store = store_of(exchange, service)
    update = await read(exchange, _UPDATE)
    note_unknown(exchange, update, service.strict)
    if exchange.grant is not None:
        await found_object(exchange, service, kind, name)
    changed = await store.update(exchange.key, kind, name, update.metadata or {})
    if changed is None:
        raise not_found(WORDS[kind], name)
    return changed


async def delete_chat_completion(exchange: Exchange, service: Service, name: str) -> None:
    """Delete a stored chat completion."""
    await delete(exchange, service, COMPLETION, name)
    await service.transcripts.forget(exchange.key, name)
    reply: Deleted = {"object": "chat.completion.deleted", "id": name, "deleted": True}
    await exchange.reply(200, orjson.dumps(reply))


async def delete(exchange: Exchange, service: Service, kind: str, name: str) -> None:
    """Delete a stored object."""
    store = store_of(exchange, service)
    if exchange.grant is not None:
        await found_object(exchange, service, kind, name)
    if not await store.delete(exchange.key, kind, name):
        raise not_found(WORDS[kind], name)


async def list_messages(exchange: Exchange, service: Service, name: str) -> None:
    """List the messages of a stored chat completion's request."""
    store_of(exchange, service)
    query = read_query(exchange, _LIST, service.strict)
    stored = await found_object(exchange, service, COMPLETION, name, whole=True)
    after = None
    if query.after:
        after = message_number(stored, query.after)
        if after is None:
            raise wrong_after(query.after, "the id of a message of this chat completion")
    await send(exchange, messages, stored, after, query.limit, query.order == "desc")


def store_of(exchange: Exchange, service: Service) -> Store:
    """Return the store.

    Raises:
        InvalidRequest: this server stores nothing.
    """
    if service.store is None:
        asked = shortened(exchange.place)
        raise InvalidRequest(
            f"This server does not serve {asked}, because it runs with --store off. Start it with "
            "--store memory, or with a file.",
            code="unsupported_endpoint",
            status=404,
        )
    return service.store


async def found_object(
    exchange: Exchange, service: Service, kind: str, name: str, whole: bool = False
) -> Stored:
    """Return a stored object of the client's key.

    Args:
        whole: True to get the request with its messages.

    Raises:
        InvalidRequest: a 404 for an id that does not exist, or of another key.
    """
    found = await store_of(exchange, service).get(exchange.key, kind, name, whole)
    if found is None or not may_see(exchange, found):
        raise not_found(WORDS[kind], name)
    return found


def may_see(exchange: Exchange, stored: Stored) -> bool:
    """Return True if the client's key may use the model of a stored object, if it has one."""
    grant = exchange.grant
    return grant is None or not stored.model or grant.allows(stored.model)


def wrong_after(after: str, expected: str) -> InvalidRequest:
    """Return the error for an `after` that is not an id in the list."""
    return wrong_value(
        "after",
        f"'{shortened(after)}' is not {expected}. Send the 'last_id' of the previous page, or "
        "omit it.",
    )


# The parameters of a request that its chat completion has, with OpenAI's defaults.
_PARAMETERS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "tools": None,
    "tool_choice": None,
    "response_format": None,
}
# The fields of a message that are only listed if the request has them.
_MORE = ("refusal", "audio", "tool_calls", "function_call", "tool_call_id")


def completion(stored: Stored) -> Sequence[bytes]:
    """Return a stored chat completion as JSON in parts."""
    return as_json(completion_of(stored))


def as_json(value: Mapping[str, Any]) -> Sequence[bytes]:
    """Return an object as JSON in parts."""
    parts = ChunkedJson()
    parts.add_value(value, LEVELS - 1)
    return parts.end()


class Listed(NamedTuple):
    """An element of a list: its id, and its JSON in parts."""

    id: str
    parts: Sequence[bytes]


def listed_completion(stored: Stored) -> Listed:
    """Return a stored chat completion as an element of a list."""
    return Listed(stored.id, completion(stored))


def _listed_response(stored: Stored) -> Listed:
    return Listed(stored.id, as_json(stored.reply))


def joined(found: Sequence[Listed], has_more: bool) -> Sequence[bytes]:
    """Return OpenAI's envelope of a list of encoded elements as JSON in parts."""
    parts = ChunkedJson()
    parts.add(b'{"object":"list","data":[')
    for index, one in enumerate(found):
        parts.add(b"," if index else b"")
        for part in one.parts:
            parts.add(part)
    parts.add(b"]")
    parts.add(_ends([one.id for one in found], has_more, None))
    return parts.end()


def messages(stored: Stored, after: int | None, limit: int, descending: bool) -> Sequence[bytes]:
    """Return a list of the messages of a request as JSON in parts.

    Args:
        after: the number of the message before the page; None for the first page.
    """
    sent = stored.request["messages"]
    order = range(len(sent))[::-1] if descending else range(len(sent))
    if after is not None:
        order = order[order.index(after) + 1 :]
    page = [message_of(stored.id, number, sent[number]) for number in order[:limit]]
    return page_of(page, len(order) > limit)


def message_number(stored: Stored, name: str) -> int | None:
    """Return the number of the message with an id; None if the request has no such message."""
    count = len(stored.request["messages"])
    start, _, digits = name.rpartition("-")
    if start != stored.id or not digits.isdecimal() or len(digits) > len(str(count)):
        return None
    number = int(digits)
    return number if number < count and str(number) == digits else None


def completion_of(stored: Stored) -> StoredCompletion:
    """Return a stored chat completion with the parameters of its request."""
    sent = _translated(stored.request)
    parameters = {
        name: default if sent.get(name) is None else sent[name]
        for name, default in _PARAMETERS.items()
    }
    reply = stored.reply
    shown = {
        **reply,
        "choices": [{**one, "message": _with_calls(one["message"])} for one in reply["choices"]],
        "service_tier": reply.get("service_tier", "default"),
        "request_id": stored.request_id,
        **parameters,
        "input_user": sent.get("user"),
        "metadata": stored.metadata,
    }
    return cast(StoredCompletion, shown)


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of a response in which a call that it lacks is null."""
    return {**message, **{name: message.get(name) for name in ("tool_calls", "function_call")}}


def message_of(name: str, number: int, message: Mapping[str, Any]) -> ListedMessage:
    """Return a message of the request for a chat completion with the id `name`."""
    content = message.get("content")
    parts = content if isinstance(content, list) else None
    if parts is not None:
        texts = [part["text"] for part in parts if part.get("type") == "text"]
        content = "".join(texts) if texts else None
    listed = {
        "id": f"{name}-{number}",
        "role": message["role"],
        "content": content,
        "name": message.get("name"),
        "content_parts": parts,
        **{name: message[name] for name in _MORE if name in message},
    }
    return cast(ListedMessage, listed)


def _translated(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request with Latimer's own fields instead of those of other servers."""
    extra = {name: request[name] for name in request.keys() - ChatRequest.model_fields.keys()}
    try:
        draft = dialects.replaced(request, extra, "chat") if extra else None
    except RequestError:
        # An earlier version of the server accepted the request.
        return request
    return request if draft is None else draft.body


def page_of(items: Sequence[Any], has_more: bool, empty: str | None = None) -> Sequence[bytes]:
    """Return OpenAI's envelope of a list as JSON in parts.

    Args:
        empty: the first and the last id of an empty list.
    """
    parts = ChunkedJson()
    parts.add(b'{"object":"list","data":')
    parts.add_value(items)
    parts.add(_ends([item["id"] for item in items], has_more, empty))
    return parts.end()


def _ends(ids: Sequence[str], has_more: bool, empty: str | None) -> bytes:
    """Return the end of the envelope of a list with these ids."""
    ends = {
        "first_id": ids[0] if ids else empty,
        "last_id": ids[-1] if ids else empty,
        "has_more": has_more,
    }
    return b"," + orjson.dumps(ends)[1:]


_RENUMBERED = (
    "The events of a stored response have new numbers, with one delta for each text. Omit it."
)
_RETRIEVE: TypeAdapter[RetrieveQuery] = TypeAdapter(RetrieveQuery)
_ITEMS: TypeAdapter[ItemsQuery] = TypeAdapter(ItemsQuery)


async def retrieve_response(exchange: Exchange, service: Service, name: str) -> None:
    """Return a stored response, or its events with `stream=true`."""
    query = read_query(exchange, _RETRIEVE, service.strict)
    after = -1 if query.starting_after is None else query.starting_after
    pads = bool(query.include_obfuscation)
    job = service.background.find(exchange.key, name)
    if job is not None and query.stream:
        await found_response(exchange, service, name)
        if job.log.has_ended and after >= job.log.count:
            raise _beyond(after, f"Send at most {job.log.count - 1}, or omit it.")
        await follow(exchange, job, after, pads)
        return
    stored = await found_response(exchange, service, name, whole=query.stream)
    if not query.stream:
        await send(exchange, as_json, stored.reply)
        return
    _check_here(job, stored)
    if stored.reply["background"]:
        raise InvalidRequest(
            f"This response can no longer be streamed because it ended more than {KEPT / 60:.0f} "
            "minutes ago, its server was started again, or another server made it. Retrieve it "
            "without 'stream'.",
            "stream",
        )
    tier = stored.request.get("service_tier") or "auto"
    parts = await offload.run(offload.UNKNOWN, _replayed, stored.reply, after, tier, pads)
    if not parts:
        raise _beyond(after, _RENUMBERED)
    await exchange.start(200, EVENT_STREAM)
    for part in parts:
        await exchange.chunk(part)
    await exchange.chunk(b"", more=False)


def _replayed(reply: Mapping[str, Any], after: int, tier: str, pads: bool) -> Sequence[bytes]:
    """Return the events of a stored response, padded or not; see `replayed`."""
    parts = replayed(reply, after, tier)
    return [*map(padded, parts)] if pads else parts


async def delete_response(exchange: Exchange, service: Service, name: str) -> None:
    """Delete a stored response."""
    store = service.store
    job = service.background.find(exchange.key, name)
    found = False
    if exchange.grant is not None or service.background.elsewhere is not None:
        await found_response(exchange, service, name)
        # It is deleted where it runs.
        found = job is None and await _stop(exchange, service, name, delete=True)
    if job is not None:
        await job.cancel(delete=True)
    if store is not None:
        found = await store.delete(exchange.key, RESPONSE, name) or found
    if job is not None:
        service.background.forget(name)
    elif not found:
        raise not_found("Response", name)
    body = {"id": name, "object": "response.deleted", "deleted": True}
    await exchange.reply(200, orjson.dumps(body))


async def cancel_response(exchange: Exchange, service: Service, name: str) -> None:
    """End a response in the background, and return it; one that has ended is returned as it is."""
    await exchange.read_body()
    if exchange.grant is not None:
        await found_response(exchange, service, name)
    job = service.background.find(exchange.key, name)
    if job is not None:
        await job.cancel()
    stored = await found_response(exchange, service, name)
    if not stored.reply["background"]:
        raise InvalidRequest("Cannot cancel a synchronous response.")
    if job is None and stored.reply["status"] in RUNNING:
        await _stop(exchange, service, name, delete=False)
        stored = await found_response(exchange, service, name)
    await send(exchange, as_json, stored.reply)


async def list_input_items(exchange: Exchange, service: Service, name: str) -> None:
    """List the items of the input of a stored response, without those of earlier responses."""
    query = read_query(exchange, _ITEMS, service.strict)
    stored = await found_response(exchange, service, name, whole=True)
    items = await offload.run(offload.UNKNOWN, input_items, stored)
    if query.order == "desc":
        items.reverse()
    if query.after:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise wrong_after(query.after, "the id of an input item of this response")
        items = items[ids.index(query.after) + 1 :]
    page, more = items[: query.limit], len(items) > query.limit
    await send(exchange, page_of, page, more, "")


async def found_response(
    exchange: Exchange, service: Service, name: str, whole: bool = False
) -> Stored:
    """Return a response of the client's key that is stored, or in the background.

    Args:
        whole: True to get the request with its input.

    Raises:
        InvalidRequest: a 404 for an id that does not exist, or of another key.
        ReplicaUnavailable: only another replica can know it.
    """
    job = service.background.find(exchange.key, name)
    elsewhere = service.background.elsewhere
    found: Stored | None = None
    if job is not None and not job.is_stored:
        found = job.stored()
    elif service.store is not None:
        found = await service.store.get(exchange.key, RESPONSE, name, whole)
    if found is None and elsewhere is not None:
        found = await elsewhere.find(exchange.key, name)
    if found is not None and may_see(exchange, found):
        return found
    if elsewhere is None:
        raise not_found("Response", name)
    if found is None and await elsewhere.may_have(exchange.key, name):
        raise ReplicaUnavailable
    raise not_found("Response", name, elsewhere.loss)


async def _stop(exchange: Exchange, service: Service, name: str, delete: bool) -> bool:
    """End a response that another process runs; return False if none does.

    Raises:
        ReplicaUnavailable: the process does not end it in time.
    """
    elsewhere = service.background.elsewhere
    found = None if elsewhere is None else await elsewhere.find(exchange.key, name)
    if elsewhere is None or found is None or found.reply["status"] not in RUNNING:
        return False
    if not await elsewhere.stop(exchange.key, name, delete):
        raise ReplicaUnavailable
    return True


def _check_here(job: Job | None, stored: Stored) -> None:
    """Raise `ReplicaUnavailable` if another process runs a response, and has its events."""
    if job is None and stored.reply["status"] in RUNNING:
        raise ReplicaUnavailable


def _beyond(after: int, advice: str) -> InvalidRequest:
    return wrong_value("starting_after", f"this response has no event after {after}. {advice}")
