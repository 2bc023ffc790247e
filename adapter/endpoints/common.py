"""Steps that several endpoints share.

The instruct format of a request, its tier in the queue, the size of its prompt, the storing of its
response (contract, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...backends import offload
from ...backends.base import Finish, Generation, Text
from ...backends.errors import EngineError, Unsupported
from ...backends.queue import Ticket, Tier
from ...schemas.openai.chat import ChatRequest, InstructAdapter
from ...schemas.openai.messages import Message
from ..chat.instruct import INSTRUCT_FORMATS, ROLES, InstructFormat, Opening, Turn
from ..errors import InvalidRequest, StoreUnavailable, in_log, wrong_value
from ..model_entry import ServedModel
from ..request import Exchange
from ..store.records import Record, time_of
from ..store.store import Store

if TYPE_CHECKING:
    from ...schemas.anthropic.messages import CountTokensRequest
    from ...schemas.openai.responses import ResponseRequest

# The names in responses (contract 3.9); the others stay as they are.
_NAMES = {"auto": "default", "fast": "priority", "ultrafast": "priority"}
# The other tiers have the default place.
_PLACES: Mapping[str | None, Tier] = {
    "priority": Tier.PRIORITY,
    "fast": Tier.PRIORITY,
    "ultrafast": Tier.PRIORITY,
    "flex": Tier.FLEX,
}
# The characters that are tokenized of a long text, of which an engine takes two seconds, and the
# pieces that they come from. Prompts for a context of 200,000 tokens are shorter.
SAMPLE, _PIECES = 2_000_000, 16
# The least of them for each token that fits, and the tokens that a cut between two pieces adds.
_FITS, _CUT = 8, 64


def ticket_of_tier(tier: str | None) -> Ticket | None:
    """Return the request as engines know it; None if it has the default place."""
    place = _PLACES.get(tier)
    return None if place is None else Ticket.of(place)


def name_of(tier: str) -> str:
    """Return the tier that the response names."""
    return _NAMES.get(tier, tier)


async def prompt_tokens(served: ServedModel, job: Generation, most: int | None = None) -> int:
    """Return the number of tokens in the prompt of a job, without an added BOS.

    Images and audio have as many tokens as the engine makes of them. It evaluates such a prompt,
    and generates one token.

    Args:
        most: the number above which the result may be estimated from pieces of a long text. A text
            of 30 MB takes half a minute to tokenize, and 1.7 GB of memory.
    """
    prompt = job.prompt
    if prompt.media:
        async with served.backend.open(replace(job, max_tokens=1)) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, Finish):
                        return event.prompt_tokens
        raise EngineError("The engine ended its response without its usage.")
    content = prompt.content
    if not isinstance(content, Text):
        return len(content) - prompt.bos_count
    text = content.text
    tokenize = partial(
        served.backend.tokenize, add_special=False, parse_special=content.parse_special
    )
    if most is not None and len(text) > (size := max(SAMPLE, _FITS * most)):
        sample = _pieces_of(text, size)
        count = len(await tokenize(sample))
        if count > most + _PIECES * _CUT:
            return count * len(text) // len(sample)
    return len(await tokenize(text))


def _pieces_of(text: str, size: int) -> str:
    """Return pieces of a text that have a size together, at equal distances."""
    step, length = len(text) // _PIECES, size // _PIECES
    return "".join(text[at * step : at * step + length] for at in range(_PIECES))


async def send(
    exchange: Exchange, make: Callable[..., Sequence[bytes]], *arguments: object
) -> None:
    """Send a response in parts, which a function makes in a thread."""
    await exchange.reply_in_parts(await offload.run(offload.UNKNOWN, make, *arguments))


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
        raise wrong_value(
            "store", "an engine's own response is not stored. Omit 'store' or 'oai_compat'."
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
    elif not store.keep(record):
        if not exchange.started:
            exchange.response_headers.append((b"x-latimer-ignored", b"store"))
    elif store.is_shared:
        # The client's next request can reach another process.
        await store.settle()


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


def chosen_format(
    request: ChatRequest | ResponseRequest | CountTokensRequest, served: ServedModel
) -> InstructFormat | None:
    """Return the instruct format of a request or of the model, if one replaces the template."""
    own = None
    if request.adapter is not None:
        own = format_of(request.adapter)
    elif served.policy.chat_format is not None:
        own = INSTRUCT_FORMATS[served.policy.chat_format]
    if own is not None and request.chat_template_kwargs:
        hint = "An instruct format has no template variables. Omit one of them."
        raise Unsupported("chat_template_kwargs", served.capabilities.engine, hint)
    return own


def opening_of(
    request: ChatRequest | ResponseRequest, messages: Sequence[Message]
) -> Opening | None:
    """Return the end of the prompt that a request names, with vLLM's rules; None if it names none.

    Raises:
        InvalidRequest: it both continues a message and begins a turn, or there is no message to
            continue.
    """
    begins, continues = request.add_generation_prompt, request.continue_final_message
    if begins is None and continues is None:
        return None
    if not continues:
        return "end" if begins is False else "begin"
    name = "continue_final_message"
    if begins:
        raise wrong_value(name, "'add_generation_prompt' must then be false.")
    if messages[-1].role != "assistant":
        raise wrong_value(name, "the last message must then be the assistant's.")
    return "continue"


def format_of(adapter: InstructAdapter) -> InstructFormat:
    """Return the instruct format of a request's `adapter`; missing parts are empty.

    Raises:
        InvalidRequest: a role is set twice, or no text separates user and assistant messages.
    """
    turns: dict[str, Turn] = {}
    for role in ROLES:
        nested = getattr(adapter.templates, role) if adapter.templates is not None else None
        flat = (getattr(adapter, f"{role}_start"), getattr(adapter, f"{role}_end"))
        if nested is not None and flat != (None, None):
            raise wrong_value(
                f"adapter.{role}_start",
                f"'adapter.templates.{role}' sets it already. Omit one of them.",
            )
        turns[role] = (
            Turn(nested.start or "", nested.end or "")
            if nested is not None
            else Turn(flat[0] or "", flat[1] or "")
        )
    if not (turns["user"].start or turns["user"].end or turns["assistant"].start):
        raise wrong_value(
            "adapter",
            "no text separates user and assistant messages. Send at least 'user_start' and "
            "'assistant_start', or 'templates' with both.",
        )
    begin = turns["assistant"].start if adapter.assistant_gen is None else adapter.assistant_gen
    return InstructFormat(turns["system"], turns["user"], turns["assistant"], begin)
