"""The conversation before a Responses request, and the storing of the response (contract, 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson
from pydantic import TypeAdapter

from ...backends import offload
from ...backends.errors import Unsupported, shortened
from ...schemas.openai.response_items import Item, ItemReference, ReasoningItem
from ...schemas.openai.responses import ResponseRequest
from ..errors import InvalidRequest, StoreUnavailable, not_found
from ..request import FRAME, Exchange
from ..responses.background import RUNNING
from ..responses.input import Unseal
from ..responses.items import history, input_items, items_of, place_of, turn_items
from ..responses.lanes import Create, Kept
from ..responses.response import USABLE
from ..service import Service
from ..store.records import Stored
from ..store.store import Store
from .common import LATE, LOGPROB, TEXT, nothing_is_stored, record_of
from .conversations import duplicate
from .stored import RESPONSE as KIND
from .stored import may_see

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
# The bytes of JSON that take as long to parse as a byte of items takes to validate.
_VALIDATED = 4
_NO_STORE = "This server runs with --store off. Send the items of the earlier turns in 'input'."
# The fields that name the conversation before a request.
_CONTEXTS = ("previous_response_id", "conversation")


@dataclass(slots=True)
class State:
    """The conversation that a request continues.

    Args:
        before: the items of the responses that the request continues, from the oldest.
        chain: the id of the first of them; None if the request continues none.
        referenced: the stored items that the request refers to, by their ids.
        turns: the items before as JSON lists, for the request of a WebSocket.
        is_unstored: True if the store has not all of them.
    """

    before: Sequence[Item] = ()
    chain: str | None = None
    referenced: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    turns: tuple[bytes, ...] = ()
    is_unstored: bool = False
    _typed: Mapping[str, Item] = field(default_factory=dict)

    def resolve(self, name: str) -> Item | None:
        """Return the stored item with an id, or None."""
        return self._typed.get(name)


NO_STATE = State()


async def state_of(exchange: Exchange, service: Service, request: ResponseRequest) -> State:
    """Return the conversation that a request continues.

    Raises:
        InvalidRequest: the response before does not exist, or cannot be continued; or an item of
            the input is in the conversation already.
        Unsupported: nothing is stored here.
    """
    store = service.store
    references: Sequence[str] = ()
    if not isinstance(request.input, str):
        if ReasoningItem in map(type, request.input):
            await service.seal.load()
        unseal = partial(service.seal.unseal, owner=exchange.key)
        references = await offload.run(exchange.size, _references, request.input, unseal)
    asked = [name for name in _CONTEXTS if getattr(request, name) is not None]
    if not asked and not references:
        return NO_STATE
    frame: Create | None = exchange.scope.get(FRAME)
    kept = None if frame is None else frame.turns.find(request.previous_response_id)
    if store is None:
        if kept is not None:
            return await _continued(kept)
        if not asked:
            return NO_STATE
        raise Unsupported(asked[0], "this server", _NO_STORE)
    state = State()
    if kept is not None:
        state = await _continued(kept)
    elif request.previous_response_id is not None:
        running = service.background.find(exchange.key, request.previous_response_id)
        if running is not None and running.reply["status"] in RUNNING:
            raise _not_usable(running.id, running.reply["status"])
        chain = await _chain(exchange, service, store, request.previous_response_id)
        items = history(chain)
        state.before = await offload.run(offload.UNKNOWN, _typed, items)
        state.chain = chain[0].id
        if frame is not None:
            state.turns = (await offload.run(offload.UNKNOWN, orjson.dumps, items),)
    elif request.conversation is not None:
        found = await store.all_items(exchange.key, request.conversation.id)
        if found is None:
            raise not_found("Conversation", request.conversation.id)
        await offload.run(exchange.size, _check_new, request, found)
        state.before = await offload.run(offload.UNKNOWN, _typed, found)
    referenced = await _referenced(exchange, store, references)
    if referenced:
        typed = await offload.run(offload.UNKNOWN, _typed, [*referenced.values()])
        state.referenced = referenced
        state._typed = dict(zip(referenced, typed, strict=True))
    return state


async def _continued(kept: Kept) -> State:
    """Return the state of a request that continues a response of its WebSocket."""
    before = await offload.run(_VALIDATED * kept.size, _typed_turns, kept.items)
    return State(before, kept.chain, turns=kept.items, is_unstored=not kept.is_stored)


def _typed_turns(turns: Sequence[bytes]) -> list[Item]:
    return _typed(_items_of_turns(turns))


def _items_of_turns(turns: Sequence[bytes]) -> list[dict[str, Any]]:
    return [item for turn in turns for item in orjson.loads(turn)]


async def keep_turn(
    frame: Create, request: ResponseRequest, state: State, reply: Mapping[str, Any]
) -> None:
    """Keep a response that can be continued for the frames of its WebSocket that do so.

    One in a conversation is continued with `conversation` only.
    """
    if reply["status"] not in USABLE:
        return
    frame.has_succeeded = True
    if request.conversation is not None:
        return
    body: Mapping[str, Any] = frame.body
    size = frame.size + TEXT * reply["usage"]["output_tokens"]
    if state.referenced:
        # The size does not count stored items.
        size = max(size, offload.UNKNOWN)
        body = await offload.run(size, stored_request, body, state)
    turn = [*items_of(body.get("input")), *reply["output"]]
    if size <= offload.SMALL:
        # The bytes that orjson returns take at least 4 KiB, and a copy what they need.
        items = bytes(memoryview(orjson.dumps(turn)))
    else:
        items = await offload.run(size, orjson.dumps, turn)
    turns = (*state.turns, items)
    stored = bool(reply["store"])
    chain = reply["id"] if state.chain is None or (stored and state.is_unstored) else state.chain
    kept = Kept(reply["id"], chain, turns, stored, sum(map(len, turns)))
    frame.turns.keep(frame.lane, kept)


def stored_request(body: Mapping[str, Any], state: State) -> Mapping[str, Any]:
    """Return a request's body as it is stored: with items instead of references to them."""
    if not state.referenced:
        return body
    return {**body, "input": [_stored_item(item, state) for item in body["input"]]}


def _stored_item(item: Mapping[str, Any], state: State) -> Mapping[str, Any]:
    kind = item.get("type")
    if kind not in (None, "item_reference", "reasoning") or (kind is None and item.get("role")):
        return item
    found = state.referenced.get(str(item.get("id")), item)
    # Reasoning is nothing without its content, and takes that of no other item.
    return item if kind == "reasoning" != found["type"] else found


def _references(items: Sequence[Item], unseal: Unseal) -> list[str]:
    """Return the ids of items that the request names without content that can be read."""
    return [item.id for item in items if _is_reference(item, unseal)]  # type: ignore[union-attr]


def _is_reference(item: Item, unseal: Unseal) -> bool:
    if isinstance(item, ItemReference):
        return True
    if not isinstance(item, ReasoningItem) or item.is_named:
        return isinstance(item, ReasoningItem)
    sealed = None if item.text or not isinstance(item.id, str) else item.encrypted_content
    return sealed is not None and unseal(sealed) is None


def _check_new(request: ResponseRequest, items: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InvalidRequest` if the input repeats an item of the conversation."""
    if isinstance(request.input, str):
        return
    known_ids = {item["id"] for item in items}
    for item in request.input:
        name = getattr(item, "id", None)
        if isinstance(name, str) and name in known_ids:
            raise duplicate(name, "input")


async def _chain(exchange: Exchange, service: Service, store: Store, name: str) -> list[Stored]:
    """Return the response before, and those that it continues, from the oldest."""
    chain = await store.chain(exchange.key, KIND, name)
    if not all(may_see(exchange, one) for one in chain):
        raise _unknown(name)
    if not chain:
        elsewhere = service.background.elsewhere
        other = None if elsewhere is None else await elsewhere.find(exchange.key, name)
        if other is not None and other.reply["status"] not in USABLE:
            raise _not_usable(name, other.reply["status"])
        raise await _not_found(exchange, store, name)
    status = chain[-1].reply["status"]
    if status not in USABLE:
        raise _not_usable(name, status)
    for one in chain:
        if (conversation := one.reply.get("conversation")) is not None:
            # Its items are in the conversation: half of the context would be missing.
            raise InvalidRequest(
                f"Previous response with id '{shortened(one.id)}' belongs to the conversation "
                f"'{conversation['id']}'. Send 'conversation' instead of 'previous_response_id'.",
                "previous_response_id",
                "invalid_value",
            )
    return chain


async def _not_found(exchange: Exchange, store: Store, name: str) -> InvalidRequest:
    """Return the error for a response that is unknown, or continues one that is."""
    missing = name
    while True:
        found = await store.get(exchange.key, KIND, missing)
        before = None if found is None else found.reply.get("previous_response_id")
        if before is None:
            break
        missing = before
    return _unknown(missing, f" '{name}' continues it." if missing != name else "")


def _unknown(name: str, more: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"Previous response with id '{shortened(name)}' not found.{more}",
        "previous_response_id",
        "previous_response_not_found",
    )


def _not_usable(name: str, status: str) -> InvalidRequest:
    hint = "Continue the response before it"
    if status in RUNNING:
        hint = "Retrieve it until it has ended"
    return InvalidRequest(
        f"Previous response with id '{shortened(name)}' cannot be continued: its status is "
        f"'{status}'. {hint}.",
        "previous_response_id",
        "invalid_value",
    )


async def _referenced(
    exchange: Exchange, store: Store, names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the stored items with these ids; those that are unknown are missing."""
    responses: dict[tuple[str, bool], Stored | None] = {}
    found: dict[str, Mapping[str, Any]] = {}
    for name in names:
        place = place_of(name)
        if place is None:
            continue
        key = place.response, place.is_input
        if key not in responses:
            responses[key] = await store.get(exchange.key, KIND, place.response, place.is_input)
        stored = responses[key]
        if stored is None or not may_see(exchange, stored):
            continue
        items = input_items(stored) if place.is_input else stored.reply["output"]
        if place.index < len(items) and items[place.index]["id"] == name:
            found[name] = items[place.index]
    return found


def _typed(items: Sequence[Mapping[str, Any]]) -> list[Item]:
    return _ITEMS.validate_python([*items])


async def check_store(store: Store | None) -> None:
    """Check that a response can be stored, before it is generated.

    Raises:
        InvalidRequest: nothing is stored here.
        StoreUnavailable: the store is required, and it is known not to work.
    """
    if store is None:
        raise nothing_is_stored()
    if store.place.required:
        await store.check()
    else:
        await store.begin()


async def store_response(
    exchange: Exchange,
    reply: dict[str, Any],
    store: Store,
    request: ResponseRequest,
    state: State,
) -> None:
    """Store a response before its end is sent; if that fails, the response says so.

    Of a response that is not to be stored, the conversation gets the items nevertheless.

    Raises:
        StoreUnavailable: the store is required, and the response was not stored in time.
    """
    body: Mapping[str, Any] = exchange.to_store or {}
    if state.referenced:
        body = await offload.run(exchange.size, stored_request, body, state)
    parent, chain, more = request.previous_response_id, state.chain or reply["id"], 0
    if state.is_unstored:
        # The store has not the turns before, so the response begins with them.
        before = await offload.run(offload.UNKNOWN, _items_of_turns, state.turns)
        body = {**body, "input": [*before, *items_of(body.get("input"))]}
        parent, chain, more = None, reply["id"], sum(map(len, state.turns))
    logprobs = 0 if request.top_logprobs is None else 1 + request.top_logprobs
    tokens = (reply["usage"] or {}).get("output_tokens", 0) * (TEXT + LOGPROB * logprobs)
    record = record_of(exchange, body, reply, tokens)
    record.is_kept = bool(reply["store"])
    record.parent, record.chain = parent, chain
    record.size += more
    if request.conversation is not None and reply["status"] in USABLE:
        # The items of input and output are appended together, and only if there is an answer.
        record.conversation = request.conversation.id
        turn = reply["id"], body.get("input"), reply["output"]
        record.items = await offload.run(record.size, turn_items, *turn)
        # They repeat the input and the output, which are most of the size.
        record.size *= 2
    if (not record.is_kept and record.conversation is None) or await store.commit(record):
        return
    reply["store"] = False
    if store.place.required:
        raise StoreUnavailable(LATE)
