"""Turn the body of a Messages request into a typed request, with Anthropic's errors."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from ...schemas.anthropic.messages import CountTokensRequest
from ..errors import InvalidRequest, unsupported
from ..request import Exchange
from ..validation import parse, path_of
from .errors import ThreadRefused, dotted

R = TypeVar("R", bound=CountTokensRequest)

# A model's own defaults name the fields of chat.
_SAME = CountTokensRequest.foreign | {"temperature", "top_p", "top_k"}


def read(exchange: Exchange, adapter: TypeAdapter[R]) -> Awaitable[R]:
    """Parse and validate a request's body.

    Raises:
        InvalidRequest: the body is invalid; with Anthropic's message.
    """
    return exchange.read_json(partial(_read, exchange, adapter))


def _read(exchange: Exchange, adapter: TypeAdapter[R], body: Mapping[str, Any]) -> R:
    # A request that is refused counts for its model, too.
    exchange.asked = body.get("model") or ""
    request = parse(adapter, (), body, from_validation)
    if unknown := request.__pydantic_extra__:
        # A null is the same as a field that was not sent (contract of messages, 2.1).
        for name in [name for name, one in unknown.items() if one is None]:
            del unknown[name]
    if exchange.defaults is not None:
        defaults = exchange.defaults(body)
        values = {name: one for name, one in defaults.items() if name in _SAME - body.keys()}
        if values:
            request = parse(adapter, (), {**values, **body}, from_validation)
    if request.stream:
        exchange.wants_stream = True
    if request.metadata is not None:
        _note_user(exchange, request.metadata.user_id)
    if request.thread is not None:
        raise ThreadRefused
    if request.mcp_servers:
        raise unsupported("mcp_servers", "This server calls no MCP servers. Omit it.")
    return request


def _note_user(exchange: Exchange, user: str | None) -> None:
    """Note the end user, and the session in it that Claude Code names as JSON."""
    if not user:
        return
    exchange.end_user = user
    if user.startswith("{"):
        try:
            session = orjson.loads(user).get("session_id")
        except orjson.JSONDecodeError:
            return
        if isinstance(session, str):
            exchange.cache_key = session


def from_validation(error: ValidationError, body: Any, schema: Any) -> InvalidRequest:
    """Return Anthropic's error for a body: a missing field first, then the first other error.

    Args:
        schema: pydantic's core schema of the body.
    """
    details = error.errors(include_url=False)
    first = next((one for one in details if one["type"] == "missing"), details[0])
    path = path_of(first["loc"], body, schema, first["type"] == "missing")
    if first["type"] == "openai":
        # A field of chat.
        context = first["ctx"]
        full = path + context["path"]
        return InvalidRequest(context["text"].replace("{param}", full), full)
    message = first["msg"]
    if first["type"] == "model_type":
        # pydantic names a class of this program, too.
        message = "Input should be a valid dictionary"
    elif first["type"] == "too_long":
        most, count = (first["ctx"][name] for name in ("max_length", "actual_length"))
        message = f"at most {most} items are allowed, not {count}"
    return InvalidRequest(f"{dotted(path)}: {message}" if path else message)
