"""Admit requests by the limits of their keys, and say what is left in headers (contract 1.5)."""

from __future__ import annotations

from collections.abc import Mapping

from ..backends.errors import LatimerError
from .errors import Header, RateLimited, go_duration
from .limits.leases import NO_RATES, SECONDS, Grant, Kind, Refusal
from .request import Exchange
from .service import ServedModel, Service

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


async def admitted(
    exchange: Exchange,
    service: Service,
    name: str | None,
    most: int | None = None,
    choices: int = 1,
    prompts: int = 1,
) -> ServedModel:
    """Return the backend for a model name once the limits of the key, which has a table, allow it.

    A request for a model that no engine has described yet waits for it after its admission.

    Args:
        most, choices: see `admit`.

    Raises:
        LatimerError: see `admit` and `Service.resolve`.
    """
    unread = service.unread(name, exchange.grant)
    if unread is not None:
        await admit(exchange, service, unread, None, most, choices, prompts)
    served = await service.resolve(name, exchange.grant)
    if unread is None:
        context = served.model.context
        await admit(exchange, service, served.name, context, most, choices, prompts)
    return served


async def admit(
    exchange: Exchange,
    service: Service,
    model: str,
    context: int | None,
    most: int | None = None,
    choices: int = 1,
    prompts: int = 1,
) -> None:
    """Reserve what a request may use of the limits of its key, which has a table.

    The tokens are estimated: those of the prompt by the size of the request, those of the answers
    by `max_tokens`. The end of the request corrects them. A request never reserves more than the
    limit, so that none is refused for ever. A request that a fallback takes over has its lease
    already.

    Args:
        model: its name, for errors.
        context: neither a prompt nor an answer has more tokens; None if that is not known yet.
        most: the tokens of an answer at most; None if there is no limit.
        choices: the answers to each prompt.

    Raises:
        RateLimited: the key has too little left.
        LimitsUnavailable: the store of the limits does not answer, and requests are refused then.
    """
    grant = exchange.grant
    if grant is None or grant.rates is NO_RATES:
        return
    limit, lease = grant.rates.tokens, exchange.lease
    if lease is None:
        prompt, tokens = 0, 0
        if limit is not None:
            prompt = exchange.size // TOKEN + 1
            answer = ANSWER if most is None or most < 0 else most
            if context is not None:
                prompt, answer = min(prompt, context * prompts), min(answer, context)
            tokens = min(answer * choices * prompts + prompt, limit)
        found = await service.limits.reserve(grant, tokens)
        if isinstance(found, Refusal):
            raise _refused(found, model, grant)
        found.prompt = prompt
        lease = exchange.lease = found
    requests, spent = lease.left
    if grant.rates.requests is not None:
        exchange.response_headers += (
            (b"x-ratelimit-limit-requests", b"%d" % grant.rates.requests),
            (b"x-ratelimit-remaining-requests", b"%d" % requests),
            (b"x-ratelimit-reset-requests", _RESET),
        )
    if limit is not None:
        exchange.response_headers += (
            (b"x-ratelimit-limit-tokens", b"%d" % limit),
            (b"x-ratelimit-remaining-tokens", b"%d" % spent),
            (b"x-ratelimit-reset-tokens", _RESET),
        )


def _refused(refusal: Refusal, model: str, grant: Grant) -> LatimerError:
    """Return OpenAI's error for a limit that a request exceeds."""
    kind, limit, used, requested, wait = refusal
    headers: tuple[Header, ...] = ()
    if kind != "concurrent":
        headers = (
            (b"x-ratelimit-limit-%b" % kind.encode(), b"%d" % limit),
            (b"x-ratelimit-remaining-%b" % kind.encode(), b"%d" % max(limit - used, 0)),
            (b"x-ratelimit-reset-%b" % kind.encode(), go_duration(wait).encode()),
        )
    return RateLimited(model, grant.name, _UNITS[kind], limit, used, requested, wait, headers)
