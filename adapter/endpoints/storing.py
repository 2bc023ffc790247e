"""Store the response of a chat request with `store: true` (contract, section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...schemas.openai.chat import ChatRequest
from ..end_user import in_log
from ..errors import InvalidRequest, StoreUnavailable
from ..exchange import Exchange
from ..store.records import Record, time_of
from ..store.store import Store

# The estimated size of a token in a response, in bytes of JSON: of its text, and of each of its
# log-probabilities.
TEXT, LOGPROB = 8, 100
# The estimated size of the rest of a response.
REST = 1_024


LATE = "the response was not written in time"


async def check_store(request: ChatRequest, store: Store | None) -> None:
    """Check that the response to a request can be stored, before it is generated.

    Raises:
        InvalidRequest: nothing is stored here, or the response is an engine's own.
        StoreUnavailable: the store is required, and it is known not to work.
    """
    if store is None:
        raise nothing_is_stored()
    if request.oai_compat is False:
        raise InvalidRequest(
            "Invalid 'store': an engine's own response is not stored. Omit 'store' or "
            "'oai_compat'.",
            "store",
            "invalid_value",
        )
    if store.place.required:
        await store.check()


def nothing_is_stored() -> InvalidRequest:
    """Return the error for a request that asks to be stored where nothing is stored."""
    return InvalidRequest(
        "Unsupported parameter: 'store' is not supported by this server, which runs with "
        "--store off. Omit it, or start the server with --store memory, or with a file.",
        "store",
        "unsupported_parameter",
    )


async def store_reply(
    exchange: Exchange, store: Store, request: ChatRequest, reply: Mapping[str, Any]
) -> None:
    """Store a finished response; a required store is waited for.

    Raises:
        StoreUnavailable: the store is required, and the response was not stored in time.
    """
    logprobs = 1 + (request.top_logprobs or 0) if request.logprobs else 0
    tokens = reply["usage"]["completion_tokens"] * (TEXT + LOGPROB * logprobs)
    record = record_of(exchange, exchange.to_store or {}, reply, tokens)
    if store.place.required:
        if not await store.commit(record):
            raise StoreUnavailable(LATE)
    elif not store.keep(record) and not exchange.started:
        exchange.headers.append((b"x-latimer-ignored", b"store"))


def record_of(
    exchange: Exchange, body: Mapping[str, Any], reply: Mapping[str, Any], size: int
) -> Record:
    """Return the record of a response object.

    Args:
        body: the request's body.
        size: the estimated size of the generated tokens, in bytes of JSON.
    """
    return Record(
        reply["id"],
        reply["object"],
        exchange.key,
        time_of(reply["id"]) or 0,
        reply["model"],
        exchange.request_id,
        body,
        reply,
        reply["metadata"],
        exchange.size + size + REST,
        in_log(exchange.end_user) if exchange.end_user else "",
    )
