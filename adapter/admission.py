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


async def admit(
    exchange: Exchange,
    service: Service,
    served: ServedModel,
    most: int | None = None,
    choices: int = 1,
    prompts: int = 1,
) -> None:
    """Reserve what a request may use of the limits of its key, which has a table.

    The tokens are estimated: those of the prompt by the size of the request, those of the answers
    by `max_tokens`. The end of the request corrects them. A request never reserves more than the
    limit, so that none is refused for ever.

    Args:
        most: the tokens of an answer at most; None if there is no limit.
        choices: the answers to each prompt.

    Raises:
        RateLimited: the key has too little left.
        LimitsUnavailable: the store of the limits does not answer, and requests are refused then.
    """
    grant = exchange.grant
    if grant is None or grant.rates is NO_RATES:
        return
    context, limit, prompt, tokens = served.model.context, grant.rates.tokens, 0, 0
    if limit is not None:
        prompt = min(exchange.size // TOKEN + 1, context * prompts)
        answer = ANSWER if most is None or most < 0 else most
        tokens = min(answer, context) * choices * prompts + prompt
        if tokens > limit:
            tokens = limit
    found = await service.limits.reserve(grant, tokens)
    if isinstance(found, Refusal):
        raise _refused(found, served.name, grant)
    found.prompt = prompt
    exchange.lease = found
    requests, spent = found.left
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
