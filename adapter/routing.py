"""The request as a model of several engines sees it."""

from __future__ import annotations

from ..backends.queue import Ticket
from .request import Exchange, header_value
from .service import ServedModel

# The headers by which clients and harnesses name their session.
SESSION_HEADERS = (b"x-session-id", b"x-session-affinity", b"x-claude-code-session-id")
MODEL = b"x-latimer-model"
# The bytes of a session's name that count.
_MOST = 256


def ticket_of(exchange: Exchange, served: ServedModel, party: Ticket | None = None) -> Ticket:
    """Return the request as the queue of its model knows it.

    Args:
        party: the same, as far as it is known already.
    """
    party = party or Ticket()
    if served.is_pooled:
        exchange.party = party
        party.key = exchange.key
        if exchange.grant is not None:
            party.weight = exchange.grant.weight
        session = exchange.cache_key
        if not session:
            headers = dict(exchange.scope["headers"])
            for name in SESSION_HEADERS:
                if name in headers:
                    session = str(headers[name], "latin-1")
                    break
        party.session = session[:_MOST]
        if served.replaces:
            exchange.response_headers.append((MODEL, header_value(served.name)))
    return party
