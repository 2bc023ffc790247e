"""The request as a model of several engines sees it, and the headers that name its engine."""

from __future__ import annotations

from functools import partial

from ..backends.queue import Ticket
from .request import Exchange
from .service import ServedModel

# The headers by which clients and harnesses name their session.
SESSION_HEADERS = (b"x-session-id", b"x-session-affinity", b"x-claude-code-session-id")
ENGINE, AFFINITY, MODEL = b"x-latimer-engine", b"x-latimer-affinity", b"x-latimer-model"
# The bytes of a session's name that count.
_MOST = 256


def ticket_of(exchange: Exchange, served: ServedModel, party: Ticket | None = None) -> Ticket:
    """Return the request as the queue of its model knows it.

    Args:
        party: the same, as far as it is known already.
    """
    party = party or Ticket()
    if served.is_pooled:
        party.key = exchange.key
        party.session = exchange.cache_key[:_MOST] or _named(exchange)
        party.routed = partial(_note, exchange)
        if served.replaces:
            _set(exchange, MODEL, served.name)
    return party


def _named(exchange: Exchange) -> str:
    found = dict(exchange.scope["headers"])
    for name in SESSION_HEADERS:
        if name in found:
            return str(found[name][:_MOST], "latin-1")
    return ""


def _note(exchange: Exchange, engine: str, affinity: str) -> None:
    """Name the engine in the headers of the response, unless they are sent."""
    if not exchange.started:
        _set(exchange, ENGINE, engine)
        _set(exchange, AFFINITY, affinity)


def _set(exchange: Exchange, name: bytes, value: str) -> None:
    headers = [header for header in exchange.response_headers if header[0] != name]
    text = value.encode("ascii", "backslashreplace")
    exchange.response_headers[:] = [*headers, (name, text)]
