"""Parameters in the query of a URL, as typed values."""

from __future__ import annotations

import re
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from pydantic import TypeAdapter

from ..schemas.openai.common import Request
from .errors import InvalidRequest
from .exchange import Exchange
from .validation import note_unknown, parse

R = TypeVar("R", bound=Request)

_PAIR = re.compile(r"([^\[]+)\[(.*)\]", re.DOTALL)


def read_query(exchange: Exchange, adapter: TypeAdapter[R], strict: bool) -> R:
    """Return the query of a request; unknown parameters are listed in a header.

    Args:
        strict: reject unknown parameters.

    Raises:
        InvalidRequest: the query is invalid; with OpenAI's message.
    """
    query = parse(adapter, (), parameters(exchange.scope.get("query_string", b"")))
    note_unknown(exchange, query, strict)
    return query


def parameters(query: bytes) -> dict[str, Any]:
    """Return the parameters of a query; of repeated ones, the last.

    `name[key]=value` is the pair of an object, percent-encoded in any way or not.

    Raises:
        InvalidRequest: the query is not UTF-8.
    """
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise InvalidRequest(
            "Invalid query string: it is not UTF-8. Encode it as UTF-8, and then percent-encode "
            "it.",
            code="invalid_value",
        ) from None
    found: dict[str, Any] = {}
    for name, value in pairs:
        match = _PAIR.fullmatch(name)
        if match is None:
            found[name] = value
            continue
        inner = found.get(match[1])
        if not isinstance(inner, dict):
            inner = found[match[1]] = {}
        inner[match[2]] = value
    return found
