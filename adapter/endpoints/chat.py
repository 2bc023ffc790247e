"""`POST /v1/chat/completions` (contract, section 3)."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from ...backends import offload
from ...backends.base import Capabilities, Generation, Sampling
from ...backends.errors import LatimerError, Unsupported
from ...schemas import limits
from ...schemas.openai.chat import ChatCompletion, ChatRequest
from ...schemas.openai.common import Usage
from ...schemas.openai.messages import NO_CONTENT, THOUGHTS, AssistantMessage
from .. import dialects
from ..chat.message import ChatFrames, Shape, message_of
from ..chat.prepare import ChatJob, prepare
from ..chat.tools import check_calls
from ..errors import InvalidRequest, in_chat
from ..exchange import Exchange
from ..generation.logprobs import to_chat
from ..generation.native import pass_native
from ..generation.obfuscation import in_stream
from ..generation.run import Plan
from ..generation.sinks import Answer, Result, respond
from ..generation.token_ids import in_model_vocabulary
from ..generation.usage import detailed_usage_of
from ..hosted import CHAT_LIMITS, lacking
from ..service import Served, Service
from ..validation import (
    check_stream_options,
    notes,
    read,
    refuse_unserved,
    sampling_of,
)
from .turns import turn_of

_REQUEST = TypeAdapter(ChatRequest)

_LEAVE_OUT = "Omit it."


def _never(_value: Any) -> bool:
    return False


def _falsy(value: Any) -> bool:
    return not value


_UNSERVED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "audio": (_never, _LEAVE_OUT),
    "modalities": (lambda value: "audio" not in value, "Request text only."),
    "moderation": (_never, _LEAVE_OUT),
    "store": (_falsy, _LEAVE_OUT),
    "web_search_options": (_never, _LEAVE_OUT),
}

# Fields that request a call, and the fields with the tools.
_CALLS = {"tool_choice": "tools", "function_call": "functions"}
_NO_CALL = (None, "none", "auto")

# The `service_tier` of a response, by that of the request (contract 3.9).
_TIERS = {"auto": "default", "fast": "priority"}


async def create_chat_completion(exchange: Exchange, service: Service) -> None:
    """Create a chat completion."""
    request = await read(exchange, _REQUEST, CHAT_LIMITS if service.hosted else ())
    served = await service.resolve(request.model)
    capabilities, strict = served.capabilities, served.policy.strict
    include_usage = check_stream_options(request)
    _check_combinations(request)
    refuse_unserved(request, _UNSERVED, capabilities.engine)
    sampling = (
        _checked(request, capabilities)
        if exchange.size <= offload.SMALL
        else await offload.run(exchange.size, _checked, request, capabilities)
    )
    inexact: Sequence[str] = ()
    if sampling.logit_bias:
        sampling, inexact = await in_model_vocabulary(request, sampling, served)
    try:
        chat = await prepare(await turn_of(exchange, request, served, sampling), served)
    except LatimerError as error:
        raise in_chat(error) from None
    inexact = (*inexact, *chat.inexact)
    await notes(exchange, request, sampling, capabilities, strict, inexact, chat.dropped)
    if request.oai_compat is False:
        _check_native(chat.job, capabilities)
        await pass_native(exchange, served.backend, chat.job, bool(request.stream))
    else:
        await _answer(exchange, service, served, request, chat, include_usage)


def _answer(
    exchange: Exchange,
    service: Service,
    served: Served,
    request: ChatRequest,
    chat: ChatJob,
    include_usage: bool,
) -> Awaitable[None]:
    job = chat.job
    plan = Plan([job], len(job.seeds), detailed_usage_of, form=chat.form, translate=in_chat)
    head: dict[str, Any] = {
        "id": f"chatcmpl-{random.getrandbits(96):024x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": served.name,
    }
    if request.service_tier is not None:
        head["service_tier"] = _TIERS.get(request.service_tier, request.service_tier)
    head["system_fingerprint"] = served.model.fingerprint
    show = to_chat if job.logprobs is not None else None
    frames = None
    if request.stream:
        chunk = {**head, "object": "chat.completion.chunk"}
        frames = in_stream(request, ChatFrames(chunk, include_usage, show, chat.shape))
    answer = Answer(partial(_whole, head, chat.shape), show)
    return respond(exchange, served, plan, answer, frames, service.observers(served))


def _whole(
    head: Mapping[str, Any], shape: Shape, results: Sequence[Result], usage: Usage
) -> ChatCompletion:
    return {
        **head,  # type: ignore[typeddict-item]
        "choices": [
            {
                "index": index,
                "message": message_of(result.deltas, shape),
                "logprobs": result.logprobs,
                "finish_reason": result.finish_reason,
            }
            for index, result in enumerate(results)
        ],
        "usage": usage,
    }


def _check_combinations(request: ChatRequest) -> None:
    """Reject fields that need another field, or contradict one (contract 3.1)."""
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            "top_logprobs",
        )
    for name in sorted(request.__pydantic_fields_set__ & _CALLS.keys()):
        if getattr(request, name) not in _NO_CALL and not getattr(request, _CALLS[name]):
            raise lacking(name, _CALLS[name])
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise InvalidRequest(
            f"Invalid 'max_tokens': {both[0]} differs from 'max_completion_tokens', {both[1]}. "
            "Send only 'max_completion_tokens'; 'max_tokens' is its deprecated name.",
            "max_tokens",
            "invalid_value",
        )
    if request.audio is None and "audio" in (request.modalities or ()):
        raise InvalidRequest(
            "Missing required parameter: 'audio'.", "audio", "missing_required_parameter"
        )


def _checked(request: ChatRequest, capabilities: Capabilities) -> Sampling:
    """Check the messages of a request, and return its sampling."""
    _check_messages(request, capabilities)
    return sampling_of(request, capabilities)


def _check_messages(request: ChatRequest, capabilities: Capabilities) -> None:
    """Reject messages that a chat template would silently omit."""
    parts = 0
    for index, message in enumerate(request.messages):
        if isinstance(message.content, list):
            parts += len(message.content)
        if message.__pydantic_extra__:
            _check_extra(message.__pydantic_extra__, f"messages[{index}]")
        if isinstance(message, AssistantMessage):
            here = f"messages[{index}]"
            if message.audio is not None:
                raise Unsupported(f"{here}.audio", capabilities.engine, _LEAVE_OUT)
            thought = message.thought
            if thought:
                _check_thoughts(message, here)
            said = (
                message.content, message.refusal, message.tool_calls or None,
                message.function_call, thought,
            )  # fmt: skip
            if all(one is None for one in said):
                if "content" in message.__pydantic_fields_set__:
                    raise InvalidRequest(NO_CONTENT, f"messages.[{index}].content")
                raise InvalidRequest(
                    f"Missing required parameter: '{here}.content'.",
                    f"{here}.content",
                    "missing_required_parameter",
                )
    if parts > limits.PARTS.most:
        raise InvalidRequest(
            f"Invalid 'messages': they have {parts} content parts; at most {limits.PARTS.most} "
            "are allowed. Send fewer, larger parts.",
            "messages",
            "array_above_max_length",
        )
    check_calls(request.messages)


def _check_extra(extra: Mapping[str, Any], here: str) -> None:
    """Reject fields of other servers that would change the answer."""
    for name, hint in dialects.REFUSED_IN_MESSAGES.items():
        if extra.get(name):
            raise dialects.unsupported(f"{here}.{name}", hint)


def _check_thoughts(message: AssistantMessage, here: str) -> None:
    """Reject reasoning that differs between the fields of one message."""
    given = [name for name in THOUGHTS if getattr(message, name)]
    for name in given[1:]:
        if getattr(message, name) != getattr(message, given[0]):
            raise InvalidRequest(
                f"Invalid '{here}.{name}': it differs from '{given[0]}' of the same message. Send "
                "only one of them.",
                f"{here}.{name}",
                "invalid_value",
            )


def _check_native(job: Generation, capabilities: Capabilities) -> None:
    if not capabilities.native:
        hint = capabilities.refused["oai_compat"]
    elif len(job.seeds) > 1:
        hint = "A native response has one choice. Omit 'n'."
    else:
        return
    raise Unsupported("oai_compat", capabilities.engine, hint)
