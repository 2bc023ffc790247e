"""Admit requests: by the limits of their keys, and to the queue of a model of several engines.

What a key has left is in the headers of the response (contract 1.5).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..backends.base import Model
from ..backends.errors import LatimerError
from ..backends.queue import Ticket
from .errors import Header, InvalidRequest, RateLimited, UnknownModel, go_duration
from .limits.leases import NO_RATES, SECONDS, Grant, Kind, Rates, Refusal
from .model_entry import ServedModel
from .request import Exchange, header_value
from .service import Service

if TYPE_CHECKING:
    from ..backends.speech.base import Speaker, Transcriber

# The estimated size of a token of a prompt, in bytes of the request.
TOKEN = 4
# The tokens that an answer without `max_tokens` is estimated to have.
ANSWER = 1_024

_UNITS: Mapping[Kind, str] = {
    "requests": "requests per min (RPM)",
    "tokens": "tokens per min (TPM)",
    "concurrent": "concurrent requests",
}
_RESET = go_duration(SECONDS).encode()
# The headers by which clients and harnesses name their session.
SESSION_HEADERS = (b"x-session-id", b"x-session-affinity", b"x-claude-code-session-id")
_SESSION_HEADERS = frozenset(SESSION_HEADERS)
MODEL = b"x-latimer-model"
# The bytes of a session's name that count.
_MOST = 256


async def admitted(
    exchange: Exchange,
    service: Service,
    name: str | None,
    most: int | None = None,
    choices: int = 1,
    prompts: int = 1,
    is_free: bool = False,
) -> ServedModel:
    """Return the backend for a model name once the limits of the key, which has a table, allow it.

    A request reserves what it may use. The tokens are estimated: those of the prompt by the size of
    the request, those of the answers by `max_tokens`. The end of the request corrects them. A
    request never reserves more than the limit, so that none is refused for ever. A request that a
    fallback takes over has its lease already. One for a model that no engine has described yet
    waits for it after its admission.

    Args:
        most: the tokens of an answer at most; None if there is no limit.
        choices: the answers to each prompt.
        is_free: True if it does not matter which models the key may use.

    Raises:
        RateLimited: the key has too little left.
        LimitsUnavailable: the store of the limits does not answer, and requests are refused then.
        LatimerError: see `Service.resolve`.
    """
    grant = exchange.grant
    names = None if is_free else grant
    served, chosen = service.latest(name, names), None
    known: Model | None
    if served is None and service.table is not None:
        chosen = service.chosen(name, names)
        if chosen[0].pool is None:
            served = await service.served(*chosen)
    elif served is None:
        served = await service.resolve(name, names)
    if served is not None:
        known, model, exchange.model = served.model, served.name, served.label
    else:
        assert chosen is not None
        entry, model, _ = chosen
        assert entry.pool is not None
        known, exchange.model = entry.pool.known, entry.names[0]
    if grant is not None and grant.rates is not NO_RATES:
        if exchange.lease is None:
            tokens = prompt = 0
            if grant.rates.tokens is not None:
                prompt = exchange.size // TOKEN + 1
                answer = ANSWER if most is None or most < 0 else most
                if known is not None:
                    # Neither a prompt nor an answer has more tokens.
                    context = known.context
                    if prompt > context * prompts:
                        prompt = context * prompts
                    if answer > context:
                        answer = context
                tokens = answer * choices * prompts + prompt
                if tokens > grant.rates.tokens:
                    tokens = grant.rates.tokens
            found = service.limits.try_reserve(grant, tokens)
            if found is None:
                found = await service.limits.reserve(grant, tokens)
            if isinstance(found, Refusal):
                raise _refused(found, model, grant)
            found.prompt = prompt
            exchange.lease = found
        exchange.response_headers += _headers(grant.rates, exchange.lease.left)
    if served is None:
        assert chosen is not None
        served = await service.served(*chosen)
    return served


class AudioUse(NamedTuple):
    """Speech or transcription, as the models of a server have it.

    Args:
        own: the server's own speaker or transcriber, which then serves every model.
        can: returns True if the engine of a model speaks or transcribes.
        stands_for: the names of OpenAI's models. Clients have them as defaults, so one of the
            server's models stands for them, unless a model is served by that name.
        nothing: the error if nothing here speaks or transcribes.
    """

    own: Speaker | Transcriber | None
    can: Callable[[ServedModel], Awaitable[bool]]
    stands_for: Collection[str]
    nothing: InvalidRequest

    async def first(self, service: Service, grant: Grant | None) -> str | None:
        """Return the first model that a key may use and that can do it; None if there is none."""
        for name, served in (await service.models(grant)).items():
            if self.own is not None or (served is not None and await self.can(served)):
                return name
        return None


async def admitted_for_audio(
    exchange: Exchange, service: Service, name: str | None, use: AudioUse
) -> tuple[ServedModel, bool]:
    """Return the model for a name, as `admitted` does, and False if it stands for OpenAI's.

    Raises:
        InvalidRequest: no model has the name, or nothing here speaks or transcribes.
        LatimerError: see `admitted`.
    """
    own, grant, is_exact = use.own, exchange.grant, True
    try:
        served = await admitted(exchange, service, name, 0)
    except UnknownModel as error:
        if own is not None and service.is_own(own, name, grant):
            # A key that may use it need not be allowed the first model, whose rules apply.
            first = next(iter(await service.models()))
            served = await admitted(exchange, service, first, 0, is_free=True)
        elif name in use.stands_for and (other := await use.first(service, grant)) is not None:
            served, is_exact = await admitted(exchange, service, other, 0), False
        elif own is None:
            raise (use.nothing if name in use.stands_for else error) from None
        else:
            its = own.known().name
            if service.hosted or not service.is_own(own, its, grant):
                raise
            raise UnknownModel(error.name, f" For this path, it is '{its}'.{error.hint}") from None
    if own is not None:
        # It is the model that is used, also by another name.
        exchange.model = own.known().name
        served = replace(served, name=exchange.model, label=exchange.model)
    return served, is_exact


def _headers(
    rates: Rates, left: tuple[float, float], requests_in: bytes = _RESET, tokens_in: bytes = _RESET
) -> tuple[Header, ...]:
    """Return the headers of a response that say what a key has left.

    Args:
        left: the requests and tokens.
        requests_in, tokens_in: the times until these are there again.
    """
    requests, spent = left
    headers: tuple[Header, ...] = ()
    if rates.requests is not None:
        headers += (
            (b"x-ratelimit-limit-requests", b"%d" % rates.requests),
            (b"x-ratelimit-remaining-requests", b"%d" % requests),
            (b"x-ratelimit-reset-requests", requests_in),
        )
    if rates.tokens is not None:
        headers += (
            (b"x-ratelimit-limit-tokens", b"%d" % rates.tokens),
            (b"x-ratelimit-remaining-tokens", b"%d" % spent),
            (b"x-ratelimit-reset-tokens", tokens_in),
        )
    return headers


def _refused(refusal: Refusal, model: str, grant: Grant) -> LatimerError:
    """Return OpenAI's error for a limit that a request exceeds."""
    kind, limit, used, requested, wait, left = refusal
    again = go_duration(wait).encode()
    resets = [again if kind == one else _RESET for one in ("requests", "tokens")]
    # An answer can take more than its estimate, and limits can have become less.
    requests, spent = (max(one, 0) for one in left)
    headers = _headers(grant.rates, (requests, spent), *resets)
    return RateLimited(model, grant.name, _UNITS[kind], limit, used, requested, wait, headers)


def ticket_of(exchange: Exchange, served: ServedModel, ticket: Ticket | None = None) -> Ticket:
    """Return the request as the queue of its model knows it.

    Args:
        ticket: the same, as far as it is known already.
    """
    ticket = ticket or Ticket()
    if served.is_pooled:
        if exchange.keepalive:
            exchange.keepalive = served.policy.keepalive
        exchange.ticket = ticket
        ticket.key = exchange.key
        if exchange.grant is not None:
            ticket.weight = exchange.grant.weight
        session = exchange.cache_key
        if not session:
            headers = exchange.named
            if not _SESSION_HEADERS.isdisjoint(headers):
                name = next(name for name in SESSION_HEADERS if name in headers)
                session = str(headers[name], "latin-1")
        if session:
            ticket.session = session[:_MOST]
        if served.replaces:
            exchange.response_headers.append((MODEL, header_value(served.name)))
    return ticket
